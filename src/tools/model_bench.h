// SPDX-License-Identifier: BSD-3-Clause
// `zipperf model`: every tensor of a model from one process to another, with and without zip.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tools {

struct ModelOptions {
    // Receiver.
    std::string listen;
    double wait_s = 60.0; // for a sender; 0: for ever

    // Sender.
    std::string connect;
    std::vector<std::string> models;
    std::vector<std::string> dtypes = {"bf16", "fp32"};
    std::string plain_tls = "tcp";
    std::string zip_tls; // empty: "zip," and the plain list
    unsigned window = 8;
    unsigned repeats = 0; // 0: 5, or 3 with --quick
    std::string sizes;    // of the sweep; empty: the defaults
    bool sweep = true;
    bool quick = false;
    bool require_zip = false;
    std::string json;
    std::string wire;      // how the JSON names the wire; empty: the interface
    std::string interface; // whose counters are read; empty: that of the control connection

    // Both.
    double timeout_s = 20.0; // without any progress
};

inline constexpr const char *kDefaultPort = "13339";

// Both throw Error. The receiver serves one sender.
void run_model_receiver(const ModelOptions &options);
void run_model_sender(const ModelOptions &options);

} // namespace tools
