// The avx512 build of the encoders' kernels.
#define TR_AVX512
#define TR_NS encoder_avx512_build
#define TR_TABLE encoder_avx512
#define TR_NAME "avx512"
#include "encoder.h"
#include "simd.h"

#include "encoder.inl"
