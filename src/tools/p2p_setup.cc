// SPDX-License-Identifier: BSD-3-Clause
// `zipperf p2p`: wires and strategies.
#include "tools/p2p_setup.h"

#include "tools/error.h"
#include "tools/table.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <set>
#include <utility>

namespace tools {

namespace {

namespace fs = std::filesystem;

// Strategies of the plugin, and the value of UCX_ZIP_STRATEGY that each is. Empty: its default.
constexpr std::array<std::pair<const char *, const char *>, 7> kZipStrategies = {
        {{"plain", "plain"},
         {"encode-then-send", "encode-then-send"},
         {"chunked", "chunked"},
         {"split-send", "split-send"},
         {"streaming", "streaming"},
         {"ends", "auto"},
         {"auto", ""}}};

// UCX's ways of a rendezvous over a card that registers the memory: which is best depends on size
// and card, and UCX's own choice is not always that.
const std::vector<std::string> kRcSchemes = {"default", "put_zcopy", "get_zcopy"};

std::pair<std::string, std::string> split_variable(const std::string &text, const char *option)
{
    const size_t equals = text.find('=');
    if (equals == 0 || equals == std::string::npos) {
        throw Error(std::string(option) + " " + text + " is not of the form KEY=VALUE");
    }
    return {text.substr(0, equals), text.substr(equals + 1)};
}

bool uses_cuda(const P2pOptions &options)
{
    return options.memory == "cuda" || options.to_memory == "cuda";
}

bool uses_host(const P2pOptions &options)
{
    return options.memory == "host" || options.to_memory == "host";
}

double parse_gbps(const std::string &text)
{
    char *end = nullptr;
    errno = 0;
    const double value = std::strtod(text.c_str(), &end);
    if (text.empty() || *end != '\0' || errno != 0 || !std::isfinite(value) || value < 0 ||
        value > 1000) {
        throw Error("--wire-gbps " + text +
                    " is not a number of 10^9 bytes a second up to 1000; write for example "
                    "12.5,25,50, or 0 for no limit");
    }
    return value;
}

std::string verbs_library(const P2pOptions &options)
{
    if (options.verbs.empty()) {
        throw Error("--wire rc needs the software verbs device: name the built libswverbs.so with "
                    "--verbs FILE or ZIP_TEST_VERBS");
    }
    std::error_code error;
    const fs::path path = fs::canonical(options.verbs, error);
    if (error || !fs::is_regular_file(path)) {
        throw Error("--verbs: no file " + options.verbs + "; build test/verbs/libswverbs.la");
    }
    if (path.string().find_first_of(": ") != std::string::npos) {
        throw Error("the loader cannot preload a path with a colon or a blank: " + path.string());
    }
    return path.string();
}

P2pWire rc_wire(const P2pOptions &options, const std::string &gbps, const std::string &cuda)
{
    P2pWire wire;
    wire.gbps = parse_gbps(gbps);
    wire.name = wire.gbps > 0 ? format("rc emulated %g GB/s", wire.gbps) : "rc emulated, no limit";
    wire.tls = "rc_verbs,ud_verbs" + cuda; // ud_verbs wires rc_verbs up
    wire.fabric = true;
    wire.preload = verbs_library(options);
    wire.env = {{"UCX_NET_DEVICES", "swverbs0:1"}, {"SWVERBS_GBPS", format("%g", wire.gbps)}};
    if (options.memory == "cuda" || options.to_memory == "cuda") {
        // else it is the device that limits GPU memory, not its set rate (doc/performance.md)
        wire.env["SWVERBS_CHUNK"] = "4m";
        wire.env["SWVERBS_LEAD_US"] = "30";
    }
    if (!options.wire_latency_us.empty()) {
        wire.env["SWVERBS_LATENCY_US"] = options.wire_latency_us;
    }
    return wire;
}

P2pWire other_wire(const P2pOptions &options, const std::string &kind, const std::string &cuda)
{
    P2pWire wire;
    if (kind == "shm") {
        wire.name = "shared memory";
        wire.tls = "posix" + cuda;
    } else if (kind == "tcp") {
        wire.name = "tcp loopback";
        wire.tls = "tcp" + cuda;
        wire.env = {{"UCX_NET_DEVICES", "lo"}};
    } else {
        if (options.tls.empty()) {
            throw Error("--wire custom needs --tls LIST: what UCX_TLS would name, without zip");
        }
        wire.name = options.wire_name.empty() ? options.tls : options.wire_name;
        wire.tls = options.tls;
    }
    return wire;
}

// The plugin's folder as an absolute path.
std::string plugin_folder(const P2pOptions &options, const std::string &strategy)
{
    if (options.plugin.empty()) {
        throw Error("strategy " + strategy +
                    " needs the plugin: name the folder of libuct_zip.so with --plugin or "
                    "UCX_PLUGIN_PATH");
    }
    std::error_code error;
    const fs::path path = fs::canonical(options.plugin, error);
    if (error || !fs::exists(path / "libuct_zip.so")) {
        throw Error("--plugin: no libuct_zip.so in " + options.plugin +
                    "; name the folder where it was built or installed");
    }
    return path.string();
}

// What --env-of says, by strategy.
std::map<std::string, Env> read_env_of(const P2pOptions &options)
{
    std::map<std::string, Env> out;
    for (const std::string &text : options.env_of) {
        const size_t colon = text.find(':');
        const std::string name = text.substr(0, colon);
        if (colon == 0 || colon == std::string::npos) {
            throw Error("--env-of " + text + " is not of the form STRATEGY:KEY=VALUE");
        }
        if (std::find(options.strategies.begin(), options.strategies.end(), name) ==
            options.strategies.end()) {
            throw Error("--env-of " + text + " is for a strategy that --strategy does not name");
        }
        const auto [key, value] = split_variable(text.substr(colon + 1), "--env-of");
        out[name][key] = value;
    }
    return out;
}

} // namespace

std::vector<P2pWire> p2p_wires(const P2pOptions &options)
{
    const std::string cuda = uses_cuda(options) ? ",cuda_copy" : "";
    std::vector<P2pWire> wires;
    const auto add = [&wires](P2pWire wire) {
        // None of ours uses UCX's EFA module, whose libnl clashes with the system's where UCX is a
        // wheel's, at the latest when the process ends.
        if (std::getenv("UCX_MODULES") == nullptr) {
            wire.env["UCX_MODULES"] = "^efa";
        }
        wires.push_back(std::move(wire));
    };
    for (const std::string &kind : options.wires) {
        if (kind == "rc") {
            for (const std::string &gbps : options.wire_gbps) {
                add(rc_wire(options, gbps, cuda));
            }
        } else if (kind == "custom") {
            wires.push_back(other_wire(options, kind, cuda));
        } else {
            add(other_wire(options, kind, cuda));
        }
    }
    return wires;
}

std::vector<P2pVariant> p2p_variants(const P2pOptions &options, const P2pWire &wire)
{
    const std::map<std::string, Env> env_of = read_env_of(options);
    Env all = {{"UCX_WARN_UNUSED_ENV_VARS", "n"}};
    for (const auto &[key, value] : wire.env) {
        all[key] = value;
    }
    Env given; // goes over what a strategy sets
    for (const std::string &text : options.env) {
        const auto [key, value] = split_variable(text, "--env");
        given[key] = value;
    }

    std::vector<P2pVariant> variants;
    std::set<std::string> seen;
    const auto add = [&](P2pVariant variant) {
        const auto own = env_of.find(variant.strategy);
        for (const Env &more : {given, own != env_of.end() ? own->second : Env{}}) {
            for (const auto &[key, value] : more) {
                variant.env[key] = value;
            }
        }
        if (!wire.preload.empty()) {
            const char *inherited = std::getenv("LD_PRELOAD");
            std::string &preload =
                    variant.env.try_emplace("LD_PRELOAD", inherited != nullptr ? inherited : "")
                            .first->second;
            preload.insert(0, preload.empty() ? wire.preload : wire.preload + ":");
        }
        variants.push_back(std::move(variant));
    };
    for (const std::string &name : options.strategies) {
        if (!seen.insert(name).second) {
            throw Error("--strategy names " + name + " twice");
        }
        if (name == "ucx") {
            std::vector<std::string> schemes = options.ucx_schemes;
            if (schemes.empty()) {
                schemes = wire.fabric ? kRcSchemes : std::vector<std::string>{"default"};
            }
            for (const std::string &scheme : schemes) {
                P2pVariant variant{name, schemes.size() > 1 ? scheme : "", false, all};
                variant.env["UCX_TLS"] = wire.tls;
                if (scheme != "default") {
                    variant.env["UCX_RNDV_SCHEME"] = scheme;
                }
                add(std::move(variant));
            }
            continue;
        }
        const auto *const known =
                std::find_if(kZipStrategies.begin(), kZipStrategies.end(),
                             [&name](const auto &pair) { return name == pair.first; });
        if (known == kZipStrategies.end() && !env_of.contains(name)) {
            std::string names = "ucx";
            for (const auto &[each, value] : kZipStrategies) {
                names.append(", ").append(each);
            }
            throw Error(
                    format("unknown strategy %s; known are %s, and any name that has variables of "
                           "its own by --env-of",
                           name.c_str(), names.c_str()));
        }
        P2pVariant variant{name, "", true, all};
        variant.env["UCX_TLS"] = "zip," + wire.tls;
        variant.env["UCX_PLUGIN_PATH"] = plugin_folder(options, name);
        variant.env["UCX_ZIP_MEM_TYPES"] = std::string(uses_host(options) ? "host" : "") +
                                           (uses_host(options) && uses_cuda(options) ? "," : "") +
                                           (uses_cuda(options) ? "cuda" : "");
        // Its interfaces then say what they have done: the ratio.
        variant.env["UCX_LOG_LEVEL"] = "info";
        if (known != kZipStrategies.end() && *known->second != '\0') {
            variant.env["UCX_ZIP_STRATEGY"] = known->second;
            // Only the plugin's own choice may leave things uncompressed.
            variant.env.try_emplace("UCX_ZIP_BYPASS", "never");
        }
        add(std::move(variant));
    }
    return variants;
}

std::vector<std::string> p2p_environment(const std::vector<std::string> &base, const Env &env,
                                         bool zip)
{
    static const std::set<std::string> kOwn = {"UCX_TLS", "UCX_PLUGIN_PATH", "UCX_LOG_FILE"};
    std::vector<std::string> out;
    for (const std::string &variable : base) {
        const std::string name = variable.substr(0, variable.find('='));
        const bool foreign = !zip && name.rfind("UCX_ZIP_", 0) == 0;
        if (!foreign && !kOwn.contains(name) && !env.contains(name)) {
            out.push_back(variable);
        }
    }
    for (const auto &[name, value] : env) {
        if (!value.empty()) {
            out.emplace_back(name).append("=").append(value);
        }
    }
    return out;
}

} // namespace tools
