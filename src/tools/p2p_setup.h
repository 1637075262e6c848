// SPDX-License-Identifier: BSD-3-Clause
// `zipperf p2p`: the wires and strategies it knows, as sets of environment variables.
#pragma once

#include "tools/p2p_bench.h"

#include <map>
#include <string>
#include <vector>

namespace tools {

// An empty value is a variable that is not to be set.
using Env = std::map<std::string, std::string>;

struct P2pWire {
    std::string name;    // for the table and the JSON; an emulated one says so
    std::string tls;     // UCX_TLS without zip
    double gbps = 0;     // 10^9 bytes a second each way; 0: not known
    bool fabric = false; // pairs need a SWVERBS_FABRIC each
    std::string preload; // library
    Env env;
};

// One pair of processes: a strategy, or one setting of it.
struct P2pVariant {
    std::string strategy;
    std::string setting; // empty where a strategy has only one
    bool zip = false;    // the plugin takes part
    Env env;
};

// All wires that the options name. Throws Error, also where what a wire needs is missing.
std::vector<P2pWire> p2p_wires(const P2pOptions &options);

// All pairs that the options' strategies need on a wire. Throws Error.
std::vector<P2pVariant> p2p_variants(const P2pOptions &options, const P2pWire &wire);

// `base` as NAME=VALUE, changed by `env`. The plugin's own variables are left out unless `zip`;
// UCX_TLS, UCX_PLUGIN_PATH and those that belong to a wire come from `env` alone.
std::vector<std::string> p2p_environment(const std::vector<std::string> &base, const Env &env,
                                         bool zip);

} // namespace tools
