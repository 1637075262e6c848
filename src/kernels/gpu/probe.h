// placeholder until written below
#ifndef ZIP_KERNELS_GPU_PROBE_H
#define ZIP_KERNELS_GPU_PROBE_H
#endif
