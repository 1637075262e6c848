// SPDX-License-Identifier: BSD-3-Clause
// zipperf: benchmarks of UCX-Zip. Each subcommand prints a table and writes the common JSON.
#include "tools/error.h"
#include "tools/interrupt.h"
#include "tools/model_bench.h"

#include <CLI/CLI.hpp>

#include <cstdio>
#include <exception>

namespace {

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

} // namespace

int main(int argc, char **argv)
{
    tools::install_signal_handlers();
    CLI::App app("Benchmarks of UCX-Zip.", "zipperf");
    app.require_subcommand(1);
    tools::ModelOptions model;
    add_model(app, model);
    try {
        app.parse(argc, argv);
    } catch (const CLI::Success &help) {
        return app.exit(help);
    } catch (const CLI::ParseError &error) {
        std::fprintf(stderr, "zipperf: error: %s (see zipperf --help)\n", error.what());
        return tools::kExitFailed;
    }

    try {
        if (model.listen.empty()) {
            tools::run_model_sender(model);
        } else {
            tools::run_model_receiver(model);
        }
        return tools::kExitOk;
    } catch (const tools::Error &error) {
        std::fprintf(stderr, "zipperf: error: %s\n", error.what());
        return error.status();
    } catch (const std::exception &error) {
        std::fprintf(stderr, "zipperf: error: %s\n", error.what());
        return tools::kExitFailed;
    }
}
