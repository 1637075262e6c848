// SPDX-License-Identifier: BSD-3-Clause
// `zipperf p2p`: point-to-point transfers through UCX between two processes of this machine,
// without the plugin and with its strategies, side by side on one wire.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tools {

struct P2pOptions {
    // What is sent.
    std::string sizes = "64K,256K,1M,4M,16M,64M";
    std::string sweep; // "FROM:TO": every power of two; replaces `sizes`
    std::vector<std::string> dtypes = {"bf16"};
    std::vector<std::string> data = {"normal"};
    std::vector<std::string> models; // files of --data weights
    std::vector<std::string> ops = {"send"};
    unsigned window = 1;
    std::string memory = "host"; // of the sender
    std::string to_memory;       // of the receiver; empty: the same
    int gpu = 0;
    std::vector<int> to_gpus; // messages go to them in turn; empty: the same
    unsigned misalign = 0;
    bool registered = true;           // memory is given to UCX beforehand
    std::string source_size = "128M"; // memory that a sender takes its messages from, in turn

    // By which ways.
    std::vector<std::string> strategies = {"ucx", "plain", "auto"};
    std::vector<std::string> ucx_schemes; // UCX_RNDV_SCHEME of `ucx`; empty: by wire
    std::vector<std::string> env;         // KEY=VALUE
    std::vector<std::string> env_of;      // STRATEGY:KEY=VALUE
    std::string plugin;                   // folder of libuct_zip.so
    std::vector<std::string> wires = {"tcp"};
    std::vector<std::string> wire_gbps = {"50"}; // of rc
    std::string wire_latency_us;                 // of rc; empty: the device's default
    std::string verbs;                           // the software verbs device, of rc
    std::string tls;                             // of custom, without zip
    std::string wire_name;                       // of custom
    bool in_process = false;
    bool mps = false;

    // How.
    unsigned rounds = 11;
    unsigned iterations = 0; // of a round; 0: by size
    unsigned warmup = 0;     // iterations; 0: by size
    bool verify = true;
    double timeout_s = 60.0; // for one iteration
    std::string json;
    std::string logs; // folder that keeps the processes' logs
};

// Throws Error. Nothing of CUDA or UCX is initialised in this process: all that measures are
// processes that it starts, each pair with the environment of its strategy.
void run_p2p_bench(const P2pOptions &options);

// The other role: `parts` (1 or 2) sides of transfers in this process, each with two descriptors
// from 3 on, to the process that measures and to the other side. The exit status.
int run_p2p_parts(unsigned parts);

} // namespace tools
