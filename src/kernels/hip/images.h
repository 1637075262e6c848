// SPDX-License-Identifier: BSD-3-Clause
// The kernels' code objects, one an architecture; the build embeds them.
#ifndef ZIP_KERNELS_HIP_IMAGES_H
#define ZIP_KERNELS_HIP_IMAGES_H

namespace zip::gpu {

struct HipImage {
    const char *architecture;
    const unsigned char *code; // null: the list's end
};

} // namespace zip::gpu

extern "C" const zip::gpu::HipImage zip_hip_images[];
#endif
