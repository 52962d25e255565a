// The avx512 build of the kernels.
#define TR_AVX512
#define TR_NS kernels_avx512_build
#define TR_TABLE kernels_avx512
#define TR_NAME "avx512"
#include "table.inl"
