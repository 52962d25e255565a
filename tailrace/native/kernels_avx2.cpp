// The avx2 build of the kernels.
#define TR_AVX2
#define TR_NS kernels_avx2_build
#define TR_TABLE kernels_avx2
#define TR_NAME "avx2"
#include "table.inl"
