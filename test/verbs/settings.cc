// SPDX-License-Identifier: BSD-3-Clause
// Settings of the software verbs device: strict parsing, so that a test never runs on a typing
// error.
#include "settings.h"

#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <utility>

namespace swverbs {

namespace {

[[noreturn]] void refuse(const char *name, std::string_view value, const char *allowed)
{
    fprintf(stderr, "swverbs: %s=\"%.*s\": %s\n", name, static_cast<int>(value.size()),
            value.data(), allowed);
    exit(2);
}

// A non-negative decimal number that is all of `text`.
bool parse_number(const std::string &text, double &value)
{
    if (text.empty() || text.find_first_not_of("0123456789.eE+-") != std::string::npos) {
        return false;
    }
    char *end;
    errno = 0;
    value = strtod(text.c_str(), &end);
    return *end == 0 && errno == 0 && std::isfinite(value) && value >= 0;
}

const char *variable(const char *name)
{
    const char *value = getenv(name);
    return value != nullptr && *value != 0 ? value : nullptr;
}

double number(const char *name, double initial, double low, double high, bool whole)
{
    const char *text = variable(name);
    double value = initial;
    if (text != nullptr && (!parse_number(text, value) || value < low || value > high ||
                            (whole && value != std::floor(value)))) {
        char allowed[128];
        snprintf(allowed, sizeof(allowed), "must be a%s number from %.15g to %.15g",
                 whole ? " whole" : "", low, high);
        refuse(name, text, allowed);
    }
    return value;
}

// 5ms, 2s, 100us, 7ns
bool parse_duration(const std::string &text, uint64_t &nanoseconds)
{
    static constexpr std::pair<const char *, double> units[] = {
            {"ns", 1}, {"us", 1e3}, {"ms", 1e6}, {"s", 1e9}};
    for (const auto &[unit, factor] : units) {
        const size_t length = strlen(unit);
        double value;
        if (text.size() > length && text.compare(text.size() - length, length, unit) == 0 &&
            parse_number(text.substr(0, text.size() - length), value) && value * factor < 1e18) {
            nanoseconds = static_cast<uint64_t>(value * factor);
            return true;
        }
    }
    return false;
}

// 4096, 64k, 1m, 2g (powers of 1024)
bool parse_size(std::string text, uint64_t &size)
{
    uint64_t factor = 1;
    if (!text.empty()) {
        switch (text.back()) {
        case 'k':
            factor = 1ull << 10;
            break;
        case 'm':
            factor = 1ull << 20;
            break;
        case 'g':
            factor = 1ull << 30;
            break;
        default:
            break;
        }
        if (factor > 1) {
            text.pop_back();
        }
    }
    double value;
    if (text.find_first_not_of("0123456789") != std::string::npos || !parse_number(text, value) ||
        value * static_cast<double>(factor) > 1e18) {
        return false;
    }
    size = static_cast<uint64_t>(value) * factor;
    return true;
}

bool parse_status(const std::string &text, ibv_wc_status &status)
{
    static constexpr std::pair<const char *, ibv_wc_status> names[] = {
            {"loc_len", IBV_WC_LOC_LEN_ERR},       {"loc_qp_op", IBV_WC_LOC_QP_OP_ERR},
            {"loc_prot", IBV_WC_LOC_PROT_ERR},     {"rem_inv_req", IBV_WC_REM_INV_REQ_ERR},
            {"rem_access", IBV_WC_REM_ACCESS_ERR}, {"rem_op", IBV_WC_REM_OP_ERR},
            {"retry_exc", IBV_WC_RETRY_EXC_ERR},   {"rnr_retry_exc", IBV_WC_RNR_RETRY_EXC_ERR},
            {"wr_flush", IBV_WC_WR_FLUSH_ERR},     {"fatal", IBV_WC_FATAL_ERR},
            {"general", IBV_WC_GENERAL_ERR}};
    for (const auto &[name, code] : names) {
        if (text == name) {
            status = code;
            return true;
        }
    }
    return false;
}

// KIND@WHEN[:DETAIL]
bool parse_fault(const std::string &text, Fault &fault)
{
    const size_t at = text.find('@');
    if (at == std::string::npos) {
        return false;
    }
    const std::string kind = text.substr(0, at);
    std::string when = text.substr(at + 1);
    std::string detail;
    const size_t colon = when.find(':');
    const bool detailed = colon != std::string::npos;
    if (detailed) {
        detail = when.substr(colon + 1);
        when.resize(colon);
    }

    const size_t equals = when.find('=');
    if (equals == std::string::npos) {
        return false;
    }
    const std::string unit = when.substr(0, equals), amount = when.substr(equals + 1);
    double seconds;
    if (unit == "bytes") {
        fault.trigger = FaultTrigger::bytes;
        if (!parse_size(amount, fault.threshold)) {
            return false;
        }
    } else if (unit == "ops") {
        fault.trigger = FaultTrigger::operations;
        if (!parse_size(amount, fault.threshold)) {
            return false;
        }
    } else if (unit == "time") {
        fault.trigger = FaultTrigger::time;
        if (!parse_number(amount, seconds) || seconds > 1e9) {
            return false;
        }
        fault.threshold = static_cast<uint64_t>(seconds * 1e9);
    } else {
        return false;
    }

    if (kind == "link-down") {
        fault.kind = FaultKind::link_down;
        return !detailed || parse_duration(detail, fault.duration);
    }
    if (kind == "stall") {
        fault.kind = FaultKind::stall;
        return parse_duration(detail, fault.duration);
    }
    if (kind == "error") {
        fault.kind = FaultKind::error;
        return parse_status(detail, fault.status);
    }
    if (kind == "peer-gone") {
        fault.kind = FaultKind::peer_gone;
        return !detailed;
    }
    return false;
}

std::vector<Fault> faults(const char *name)
{
    std::vector<Fault> list;
    const char *value = variable(name);
    for (std::string rest = value == nullptr ? "" : value; !rest.empty();) {
        const size_t comma = rest.find(',');
        const std::string element = rest.substr(0, comma);
        rest = comma == std::string::npos ? "" : rest.substr(comma + 1);
        Fault fault;
        if (!parse_fault(element, fault)) {
            refuse(name, value,
                   "must be a list of KIND@WHEN[:DETAIL]: link-down[:DURATION], stall:DURATION, "
                   "error:STATUS or peer-gone, at bytes=N, ops=N or time=SECONDS (N with k, m, g; "
                   "DURATION as 5ms or 2s; STATUS as rem_access, rem_op, rem_inv_req, retry_exc, "
                   "rnr_retry_exc, loc_prot, loc_len, loc_qp_op, wr_flush, fatal, general)");
        }
        list.push_back(fault);
    }
    return list;
}

std::string fabric_name(const char *name)
{
    const char *value = variable(name);
    if (value == nullptr) {
        return "swverbs-" + std::to_string(getuid());
    }
    const std::string text = value;
    if (text.size() > 100 || text[0] == '.' ||
        text.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                               "0123456789-_.") != std::string::npos) {
        refuse(name, value, "must be at most 100 letters, digits, '-', '_', '.'");
    }
    return text;
}

bool one_of(const char *name, const char *no, const char *yes)
{
    const char *value = variable(name);
    if (value == nullptr || strcmp(value, no) == 0) {
        return false;
    }
    if (strcmp(value, yes) != 0) {
        char allowed[64];
        snprintf(allowed, sizeof(allowed), "must be %s or %s", no, yes);
        refuse(name, value, allowed);
    }
    return true;
}

Settings read_environment()
{
    Settings s;
    s.gbps = number("SWVERBS_GBPS", 0, 0, 1000, false);
    s.latency = static_cast<uint64_t>(number("SWVERBS_LATENCY_US", 0, 0, 1e6, false) * 1e3);
    s.rate = number("SWVERBS_RATE", 0, 0, 1e9, false);
    s.devices = static_cast<unsigned>(number("SWVERBS_DEVICES", 1, 1, 8, true));
    s.reorder = static_cast<uint64_t>(number("SWVERBS_REORDER_US", 0, 0, 1e6, false) * 1e3);
    s.seed = static_cast<uint64_t>(number("SWVERBS_SEED", 1, 0, 1e15, true));
    s.lead = static_cast<uint64_t>(number("SWVERBS_LEAD_US", 0, 0, 1e6, false) * 1e3);
    if (const char *text = variable("SWVERBS_CHUNK")) {
        uint64_t size;
        if (!parse_size(text, size) || size < 1024 || size > 16 << 20) {
            refuse("SWVERBS_CHUNK", text, "must be a size from 1k to 16m");
        }
        s.chunk = static_cast<uint32_t>(size);
    }
    s.ethernet = one_of("SWVERBS_LINK_LAYER", "ib", "ethernet");
    s.log = one_of("SWVERBS_LOG", "0", "1");
    s.fabric = fabric_name("SWVERBS_FABRIC");
    s.faults = faults("SWVERBS_FAULT");
    return s;
}

} // namespace

const Settings &settings()
{
    // not destroyed at exit: the device thread may still run then
    static const Settings *const once = new Settings(read_environment());
    return *once;
}

} // namespace swverbs
