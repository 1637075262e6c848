// SPDX-License-Identifier: BSD-3-Clause
// zipperf: benchmarks of UCX-Zip. Each subcommand prints a table and writes the common JSON.
#include "tools/codec_bench.h"
#include "tools/error.h"
#include "tools/interrupt.h"

#include <CLI/CLI.hpp>

#ifdef HAVE_CONFIG_H
#include "config.h"
#endif
#ifdef HAVE_UCX
#include "tools/model_bench.h"
#include "tools/p2p_bench.h"
#endif

#include <algorithm>
#include <cstdio>
#include <exception>

namespace {

#ifdef HAVE_UCX
void add_model(CLI::App &app, tools::ModelOptions &options)
{
    CLI::App *model = app.add_subcommand(
            "model", "Send every tensor of a model to another process, with and without zip.");
    auto *listen = model->add_option("--listen", options.listen,
                                     "Receive: listen on ADDRESS[:PORT] and serve one sender");
    auto *connect = model->add_option("--connect", options.connect,
                                      "Send: connect to the receiver's ADDRESS[:PORT]");
    listen->excludes(connect);
    model->add_option("--model", options.models, "The model's .safetensors files");
    model->add_option("--dtype", options.dtypes, "Types to send the model in")
            ->delimiter(',')
            ->check(CLI::IsMember({"bf16", "fp32"}))
            ->capture_default_str();
    model->add_option("--plain-tls", options.plain_tls, "UCX_TLS of the plain strategy")
            ->capture_default_str();
    model->add_option("--zip-tls", options.zip_tls,
                      "UCX_TLS of the zip strategy (default: \"zip,\" and the plain list)");
    model->add_option("--window", options.window, "Messages under way at a time")
            ->check(CLI::Range(1U, 4096U))
            ->capture_default_str();
    model->add_option("--repeat", options.repeats,
                      "Timed passes for each strategy (default 5; 3 with --quick)")
            ->check(CLI::Range(1U, 1000U));
    model->add_option("--size", options.sizes,
                      "Message sizes of the sweep, e.g. 64K,1M,16MiB (default 16K, 64K..16M)");
    model->add_flag("!--no-sweep", options.sweep, "Only the whole model, no sweep over sizes");
    model->add_flag("--quick", options.quick, "Fewer sizes and repeats");
    model->add_flag("--require-zip", options.require_zip, "Exit with status 3 if zip was not used");
    model->add_option("--json", options.json, "Write the results to this file");
    model->add_option("--wire", options.wire, "What the results call the wire");
    model->add_option(
            "--interface", options.interface,
            "Network interface, or DEVICE:PORT of an RDMA device, whose byte counter is read "
            "(default: the network interface that leads to the receiver)");
    model->add_option("--timeout", options.timeout_s, "Seconds without progress that end it")
            ->check(CLI::Range(0.1, 86400.0))
            ->capture_default_str();
    model->add_option("--wait", options.wait_s,
                      "Seconds that the receiver waits for a sender; 0: for ever")
            ->check(CLI::Range(0.0, 864000.0))
            ->capture_default_str();
    model->callback([&options] {
        if (options.listen.empty() == options.connect.empty()) {
            throw CLI::ValidationError("model", "give --listen (receiver) or --connect (sender)");
        }
        if (!options.connect.empty() && options.models.empty()) {
            throw CLI::ValidationError("model", "--connect needs --model FILE.safetensors");
        }
    });
}

void add_p2p(CLI::App &app, tools::P2pOptions &options)
{
    CLI::App *p2p = app.add_subcommand(
            "p2p",
            "Transfers between two processes of this machine through UCX, without the plugin and "
            "with its strategies side by side: latency of one message (to the receiver's answer; a "
            "put's to its flush), or bandwidth with a window. Every message's hash is compared. "
            "Options that take a list measure every combination. GB/s are of original data, each "
            "way.");
    p2p->add_option("--size", options.sizes, "Message sizes, e.g. 64K,1M,16MiB")
            ->capture_default_str();
    p2p->add_option("--sweep", options.sweep,
                    "FROM:TO, instead of --size: every power of two, e.g. 64K:1G");
    p2p->add_option("--dtype", options.dtypes, "Types: bf16, fp32, fp16, fp64, e4m3, e5m2")
            ->delimiter(',')
            ->check(CLI::IsMember({"bf16", "fp32", "fp16", "fp64", "e4m3", "e5m2"}))
            ->capture_default_str();
    p2p->add_option("--data", options.data,
                    "Data sets: normal (0, 0.02), uniform ([-1, 1]), weights (of --model), kv, "
                    "random (bits); see zipperf codec --help")
            ->delimiter(',')
            ->check(CLI::IsMember({"normal", "uniform", "weights", "kv", "random"}))
            ->capture_default_str();
    p2p->add_option("--model", options.models, "Safetensors files for --data weights")
            ->delimiter(',');
    p2p->add_option("--op", options.ops,
                    "send (by tag), put (one-sided, with a flush), bidirectional (tag sends both "
                    "ways at once)")
            ->delimiter(',')
            ->check(CLI::IsMember({"send", "put", "bidirectional"}))
            ->capture_default_str();
    p2p->add_option("--window", options.window, "Messages under way at a time; 1: latency")
            ->check(CLI::Range(1U, 1024U))
            ->capture_default_str();
    p2p->add_option("--memory", options.memory, "Memory of the sender: host, cuda")
            ->check(CLI::IsMember({"host", "cuda"}))
            ->capture_default_str();
    p2p->add_option("--to-memory", options.to_memory, "Memory of the receiver (default: the same)")
            ->check(CLI::IsMember({"host", "cuda"}));
    p2p->add_option("--gpu", options.gpu, "Number of the sender's GPU")
            ->check(CLI::Range(0, 1023))
            ->capture_default_str();
    p2p->add_option("--to-gpu", options.to_gpus,
                    "Number of the receiver's (default: the same), or several: messages go to "
                    "them in turn, all of a --window at once")
            ->delimiter(',')
            ->check(CLI::Range(0, 1023));
    p2p->add_option("--misalign", options.misalign,
                    "Bytes behind an aligned address at which messages start")
            ->check(CLI::Range(0U, 255U))
            ->capture_default_str();
    p2p->add_option("--source-size", options.source_size,
                    "Memory from which a sender takes one message after the other, so that none "
                    "is in a cache")
            ->capture_default_str();
    p2p->add_flag("!--not-registered", options.registered,
                  "Do not give the memory to UCX beforehand (ucp_mem_map)");

    const char *ways = "Wires and strategies";
    p2p->add_option("--strategy", options.strategies,
                    "ucx (without the plugin), plain, encode-then-send, chunked, split-send, "
                    "streaming (UCX_ZIP_STRATEGY of that name), ends (its auto; all "
                    "of these without bypass), auto (the plugin's default, with bypass), "
                    "or any other name that has variables by --env-of")
            ->delimiter(',')
            ->capture_default_str()
            ->group(ways);
    p2p->add_option("--ucx-scheme", options.ucx_schemes,
                    "Values of UCX_RNDV_SCHEME of which strategy ucx is the best at each size "
                    "(default: default, and on rc put_zcopy and get_zcopy)")
            ->delimiter(',')
            ->group(ways);
    p2p->add_option("--env", options.env, "KEY=VALUE for all processes")->group(ways);
    p2p->add_option("--env-of", options.env_of, "STRATEGY:KEY=VALUE for one strategy's")
            ->group(ways);
    p2p->add_option("--plugin", options.plugin, "Folder of libuct_zip.so")
            ->envname("UCX_PLUGIN_PATH")
            ->group(ways);
    p2p->add_option("--wire", options.wires,
                    "rc (rc_verbs on the software verbs device, emulated), shm (posix), tcp "
                    "(loopback), custom (--tls)")
            ->delimiter(',')
            ->check(CLI::IsMember({"rc", "shm", "tcp", "custom"}))
            ->capture_default_str()
            ->group(ways);
    p2p->add_option("--wire-gbps", options.wire_gbps,
                    "rc: 10^9 bytes a second each way, a list; 0: no limit")
            ->delimiter(',')
            ->capture_default_str()
            ->group(ways);
    p2p->add_option("--wire-latency-us", options.wire_latency_us, "rc: microseconds one way")
            ->check(CLI::Range(0.0, 1e6))
            ->group(ways);
    p2p->add_option("--verbs", options.verbs,
                    "rc: the built libswverbs.so; its other settings by --env SWVERBS_... (for GPU "
                    "memory SWVERBS_CHUNK=4m and SWVERBS_LEAD_US=30, unless given)")
            ->envname("ZIP_TEST_VERBS")
            ->group(ways);
    p2p->add_option("--tls", options.tls, "custom: UCX_TLS without zip")->group(ways);
    p2p->add_option("--wire-name", options.wire_name, "custom: what the results call it")
            ->group(ways);
    p2p->add_flag("--in-process", options.in_process,
                  "Both sides in one process, a thread each, instead of two processes")
            ->group(ways);
    p2p->add_flag("--mps", options.mps,
                  "Start CUDA's Multi-Process Service for the run: two processes on one GPU "
                  "otherwise take turns")
            ->group(ways);

    const char *how = "How it is measured";
    p2p->add_option("--rounds", options.rounds,
                    "Rounds; in each, all strategies of a point are measured in turn")
            ->check(CLI::Range(1U, 10000U))
            ->capture_default_str()
            ->group(how);
    p2p->add_option("--iterations", options.iterations,
                    "Timed iterations of a strategy in a round (default: 4 to 20, by size)")
            ->check(CLI::Range(1U, 100000U))
            ->group(how);
    p2p->add_option("--warmup", options.warmup,
                    "Iterations before the first round (default: 3 to 40, by size)")
            ->check(CLI::Range(1U, 100000U))
            ->group(how);
    p2p->add_flag("!--no-verify", options.verify, "Do not compare what arrives")->group(how);
    p2p->add_option("--timeout", options.timeout_s, "Seconds that an iteration may take")
            ->check(CLI::Range(0.1, 86400.0))
            ->capture_default_str()
            ->group(how);
    p2p->add_option("--json", options.json, "Write the results to this file")->group(how);
    p2p->add_option("--logs", options.logs, "Folder in which the processes' logs are kept")
            ->group(how);
    p2p->callback([&options] {
        const bool weights = std::find(options.data.begin(), options.data.end(), "weights") !=
                             options.data.end();
        if (weights == options.models.empty()) {
            throw CLI::ValidationError("p2p", "--data weights and --model FILE.safetensors belong "
                                              "together");
        }
    });
}
#endif

void add_codec(CLI::App &app, tools::CodecOptions &options)
{
    CLI::App *codec = app.add_subcommand(
            "codec",
            "Encode and decode on the host and on a GPU, beside zstd and nvCOMP, every result "
            "compared "
            "with the original bit for bit. Options that take a list measure every combination.");
    codec->add_option("--on", options.where,
                      "host, gpu (default: the host, and the GPU if there is one)")
            ->delimiter(',')
            ->check(CLI::IsMember({"host", "gpu"}));
    codec->add_option("--size", options.sizes, "Bytes of original data in a buffer, e.g. 1M,16MiB")
            ->capture_default_str();
    codec->add_option("--dtype", options.dtypes, "Types: bf16, fp32, fp16, fp64, e4m3, e5m2")
            ->delimiter(',')
            ->check(CLI::IsMember({"bf16", "fp32", "fp16", "fp64", "e4m3", "e5m2"}))
            ->capture_default_str();
    codec->add_option("--shape", options.shapes,
                      "Shapes: default, 22228, 11238, 38, dense, columns, or auto: the encoder "
                      "looks for type and shape itself")
            ->delimiter(',')
            ->check(CLI::IsMember({"default", "22228", "11238", "38", "dense", "columns", "auto"}))
            ->capture_default_str();
    codec->add_option("--tiles", options.tiles, "Tiles: default, small (half as long)")
            ->delimiter(',')
            ->check(CLI::IsMember({"default", "small"}))
            ->capture_default_str();
    codec->add_option(
                 "--data", options.data,
                 "Data sets: normal (0, 0.02), uniform ([-1, 1]), weights (of --model), kv (128 "
                 "channels, each normal with a scale of its own, scales lognormal), random (bits). "
                 "64 MiB of values are made; a longer buffer repeats them, each time from another "
                 "place, farther apart than any codec here looks back. fp8 values are scaled to "
                 "the type's range, as quantized tensors are")
            ->delimiter(',')
            ->check(CLI::IsMember({"normal", "uniform", "weights", "kv", "random"}))
            ->capture_default_str();
    codec->add_option("--model", options.models,
                      "Safetensors files for --data weights, rounded to the type asked for")
            ->delimiter(',');
    codec->add_option("--op", options.ops,
                      "Operations: encode, decode, copy (of the original), and on a GPU add "
                      "(decode and add) and probe (guess of the type)")
            ->delimiter(',')
            ->check(CLI::IsMember({"encode", "decode", "add", "copy", "probe"}))
            ->capture_default_str();
    codec->add_option("--chunk", options.chunks,
                      "Original bytes of a chunk, a multiple of 16; 0: the buffer is one chunk")
            ->delimiter(',')
            ->capture_default_str();
    codec->add_option(
                 "--cache", options.caches,
                 "cold: 256 MiB of other memory are read before each run; warm (default: both on "
                 "the host, cold on a GPU)")
            ->delimiter(',')
            ->check(CLI::IsMember({"cold", "warm"}));
    codec->add_option("--repeat", options.repeats,
                      "Timed runs of a point (default 20 on a GPU; 7 on the host, fewer where they "
                      "take longer than 3 s)")
            ->check(CLI::Range(1U, 100000U));
    codec->add_option("--json", options.json,
                      "Write the results to this file: the tables' columns and more. us_median is "
                      "the time of the work; on a GPU host_us_median is what the host spends in "
                      "the call that launches it (the tables' \"host us\")");
    codec->add_option(
            "--dump", options.dump,
            "Write the data set to this file and measure nothing (see contrib/bench_zipnn)");

    const char *host = "On the host";
    std::vector<std::string> simd = tools::simd_names();
    codec->add_option("--simd", options.simd, "Instruction sets of the host codec")
            ->delimiter(',')
            ->check(CLI::IsMember(simd))
            ->capture_default_str()
            ->group(host);
    codec->add_option("--threads", options.threads, "Threads that share the chunks")
            ->check(CLI::Range(1U, 1024U))
            ->capture_default_str()
            ->group(host);
    codec->add_option("--zstd", options.zstd_levels, "Levels of zstd")
            ->delimiter(',')
            ->check(CLI::Range(1, 22))
            ->capture_default_str()
            ->group(host);
    codec->add_flag("!--no-zstd", options.zstd, "Without zstd")->group(host);

    const char *gpu = "On a GPU";
    codec->add_option("--gpu-codec", options.gpu_codec, "cuda, or the path of libzip_cuda.so")
            ->envname("ZIP_GPU_LIB")
            ->capture_default_str()
            ->group(gpu);
    codec->add_option("--gpu", options.device, "Number of the GPU")
            ->check(CLI::Range(0, 1023))
            ->capture_default_str()
            ->group(gpu);
    codec->add_option("--max-sms", options.max_sms, "Multiprocessors that a launch may use; 0: all")
            ->delimiter(',')
            ->capture_default_str()
            ->group(gpu);
    codec->add_option("--misalign", options.misalign,
                      "Bytes behind an aligned address at which the original starts")
            ->check(CLI::Range(0U, 255U))
            ->capture_default_str()
            ->group(gpu);
    codec->add_flag("!--no-progress", options.progress,
                    "Without the word a chunk that says to the host that it is done")
            ->group(gpu);
    codec->add_option("--batch", options.batch, "Buffers of --size bytes in one launch")
            ->check(CLI::Range(1U, 65536U))
            ->capture_default_str()
            ->group(gpu);
    codec->add_option("--chunks-in", options.chunks_in,
                      "Memory of the encoded bytes: device, or host (pinned)")
            ->check(CLI::IsMember({"device", "host"}))
            ->capture_default_str()
            ->group(gpu);
    codec->add_option("--nvcomp", options.nvcomp,
                      "Path of nvCOMP 6's libnvcomp.so.6, to compare with")
            ->envname("ZIP_NVCOMP_LIB")
            ->group(gpu);
    codec->add_option("--nvcomp-chunk", options.nvcomp_chunks, "Chunk sizes of nvCOMP")
            ->capture_default_str()
            ->group(gpu);
    codec->callback([&options] {
        const auto has = [&options](const char *data) {
            return std::find(options.data.begin(), options.data.end(), data) != options.data.end();
        };
        if (has("weights") == options.models.empty()) {
            throw CLI::ValidationError("codec",
                                       "--data weights and --model FILE.safetensors belong "
                                       "together");
        }
    });
}

} // namespace

int main(int argc, char **argv)
{
    tools::install_signal_handlers();
    CLI::App app("Benchmarks of UCX-Zip.", "zipperf");
    app.require_subcommand(1);
#ifdef HAVE_UCX
    tools::ModelOptions model;
    add_model(app, model);
    tools::P2pOptions p2p;
    add_p2p(app, p2p);
    // What `p2p` starts: this program in the role of one side, or of both.
    unsigned parts = 1;
    CLI::App *part = app.add_subcommand("p2p-part")->group("");
    part->add_option("parts", parts)->required()->check(CLI::Range(1U, 2U));
#endif
    tools::CodecOptions codec;
    add_codec(app, codec);
    try {
        app.parse(argc, argv);
    } catch (const CLI::Success &help) {
        return app.exit(help);
    } catch (const CLI::ParseError &error) {
        std::fprintf(stderr, "zipperf: error: %s (see zipperf --help)\n", error.what());
        return tools::kExitFailed;
    }

    try {
        if (app.got_subcommand("codec")) {
            tools::run_codec_bench(codec);
            return tools::kExitOk;
        }
#ifdef HAVE_UCX
        if (app.got_subcommand("p2p-part")) {
            return tools::run_p2p_parts(parts);
        }
        if (app.got_subcommand("p2p")) {
            tools::run_p2p_bench(p2p);
            return tools::kExitOk;
        }
        if (model.listen.empty()) {
            tools::run_model_sender(model);
        } else {
            tools::run_model_receiver(model);
        }
#endif
        return tools::kExitOk;
    } catch (const tools::Error &error) {
        std::fprintf(stderr, "zipperf: error: %s\n", error.what());
        return error.status();
    } catch (const std::exception &error) {
        std::fprintf(stderr, "zipperf: error: %s\n", error.what());
        return tools::kExitFailed;
    }
}
