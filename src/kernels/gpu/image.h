// SPDX-License-Identifier: BSD-3-Clause
// Device code in a shared object: files of it are embedded as arrays that are visible there only,
// and listed.
#ifndef ZIP_KERNELS_GPU_IMAGE_H
#define ZIP_KERNELS_GPU_IMAGE_H

// At namespace scope: `symbol` is then an extern "C" const unsigned char[].
#define ZIP_EMBED(symbol, file)                                                                    \
    asm(".section .rodata\n"                                                                       \
        ".balign 4096\n" /* what a loader of images may want */                                    \
        ".globl " #symbol "\n"                                                                     \
        ".hidden " #symbol "\n"                                                                    \
        ".type " #symbol ", @object\n" #symbol ":\n"                                               \
        ".incbin \"" file "\"\n"                                                                   \
        ".size " #symbol ", .-" #symbol "\n"                                                       \
        ".previous\n");                                                                            \
    extern "C" const unsigned char symbol[]

namespace zip::gpu {

struct Image {
    const char *name; // null: the list's end
    const unsigned char *code;
};

} // namespace zip::gpu

// All images of the back end; the build makes the list.
extern "C" const zip::gpu::Image zip_gpu_images[];

#endif
