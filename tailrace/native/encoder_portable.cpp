// The portable build of the encoders' kernels.
#define TR_NS encoder_portable_build
#define TR_TABLE encoder_portable
#define TR_NAME "portable"
#include "encoder.h"
#include "simd.h"

#include "encoder.inl"
