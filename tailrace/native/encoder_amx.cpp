// The amx build of the encoders' kernels: AVX-512, and products with matrix instructions.
#define TR_AVX512
#define TR_AMX
#define TR_NS encoder_amx_build
#define TR_TABLE encoder_amx
#define TR_NAME "amx"
#include "encoder.h"
#include "simd.h"

#include "encoder.inl"
