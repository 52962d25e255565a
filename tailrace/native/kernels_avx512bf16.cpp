// The avx512bf16 build of the kernels: AVX-512, and dot products of bf16 in attention.
#define TR_AVX512
#define TR_DOT_BF16
#define TR_NS kernels_avx512bf16_build
#define TR_TABLE kernels_avx512bf16
#define TR_NAME "avx512bf16"
#include "table.inl"
