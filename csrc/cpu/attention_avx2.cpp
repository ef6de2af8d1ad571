// The kernels for AVX2 with FMA: 16 registers. Flags: -mavx2 -mfma.
#if defined(__x86_64__)
#define DFLASH_VECTOR_BYTES 32
#define DFLASH_ACCUMULATORS 12
#define DFLASH_KERNELS kAvx2Kernels
#define DFLASH_ISA_NAME "avx2"
#include "attention_kernel.inc"
#endif
