// SPDX-License-Identifier: BSD-3-Clause
// NVIDIA's Multi-Process Service for the time of a run: processes that share a GPU otherwise take
// turns by time slices, which no measurement of latency survives.
#pragma once

#include <string>
#include <sys/types.h>

namespace tools {

class MpsDaemon {
public:
    // Starts nvidia-cuda-mps-control, found in PATH, with its sockets in `folder` and its logs in
    // `log_folder`, and sets CUDA_MPS_PIPE_DIRECTORY and CUDA_MPS_LOG_DIRECTORY for the processes
    // to come. A process of its own, forked here, ends it again when this object or this process
    // ends, however that comes about. To be called before anything else has started threads. Throws
    // Error.
    MpsDaemon(const std::string &folder, const std::string &log_folder);
    // Returns when the daemon has ended, or after some seconds.
    ~MpsDaemon();
    MpsDaemon(const MpsDaemon &) = delete;
    MpsDaemon &operator=(const MpsDaemon &) = delete;

private:
    std::string pipes_, logs_;
    pid_t keeper_ = -1;
    int alive_ = -1; // closed by our end, which the keeper waits for
};

} // namespace tools
