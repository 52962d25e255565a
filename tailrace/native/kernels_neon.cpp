// The neon build of the kernels: what every AArch64 machine has.
#define TR_NEON
#define TR_NS kernels_neon_build
#define TR_TABLE kernels_neon
#define TR_NAME "neon"
#include "table.inl"
