// The kernels for any CPU: SSE2 on x86-64, 128-bit vectors elsewhere. No extra flags.
#define DFLASH_VECTOR_BYTES 16
#define DFLASH_ACCUMULATORS 12
#define DFLASH_KERNELS kBaselineKernels
#if defined(__x86_64__)
#define DFLASH_ISA_NAME "sse2"
#else
#define DFLASH_ISA_NAME "baseline"
#endif
#include "attention_kernel.inc"
