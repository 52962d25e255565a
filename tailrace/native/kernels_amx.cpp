// The amx build of the kernels: AVX-512, and matrix instructions where there are many rows.
#define TR_AVX512
#define TR_DOT_BF16
#define TR_AMX
#define TR_NS kernels_amx_build
#define TR_TABLE kernels_amx
#define TR_NAME "amx"
#include "table.inl"
