// The kernels for AVX-512: 32 registers. Flags: -mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma.
#if defined(__x86_64__)
#define DFLASH_VECTOR_BYTES 64
#define DFLASH_ACCUMULATORS 24
#define DFLASH_KERNELS kAvx512Kernels
#define DFLASH_ISA_NAME "avx512"
#include "attention_kernel.inc"
#endif
