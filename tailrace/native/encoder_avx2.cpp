// The avx2 build of the encoders' kernels.
#define TR_AVX2
#define TR_NS encoder_avx2_build
#define TR_TABLE encoder_avx2
#define TR_NAME "avx2"
#include "encoder.h"
#include "simd.h"

#include "encoder.inl"
