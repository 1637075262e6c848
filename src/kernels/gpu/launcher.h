// SPDX-License-Identifier: BSD-3-Clause
// The host side of codec_gpu.h, the same for every driver: checks items, lays chunks out, chooses
// kernels, and hands them their table.
#ifndef ZIP_KERNELS_GPU_LAUNCHER_H
#define ZIP_KERNELS_GPU_LAUNCHER_H

#include <memory>

#include "kernels/codec_gpu.h"
#include "kernels/gpu/driver.h"

namespace zip::gpu {

// A back end's `open` hands its driver over here.
zip_status_t open_with(std::unique_ptr<Driver> driver, zip_gpu_t **gpu_p);

// The table of a back end with its own way to ask about addresses and to open.
zip_gpu_api_t make_api(const char *name,
                       zip_status_t (*memory_query)(const void *, zip_gpu_memory_t *),
                       zip_status_t (*open)(const zip_gpu_memory_t *, zip_gpu_t **));

} // namespace zip::gpu

// What a back end's shared object exports: zip_gpu_load() asks for it by this name.
#define ZIP_GPU_BACK_END zip_gpu_back_end
extern "C" const zip_gpu_api_t *ZIP_GPU_BACK_END();
#endif
