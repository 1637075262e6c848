// SPDX-License-Identifier: BSD-3-Clause
// Embeds a file of device code in a shared object, as an array that is visible there only.
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

#endif
