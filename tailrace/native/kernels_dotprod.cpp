// The dotprod build of the kernels: NEON and the dot product extension, an option of Armv8.2.
#if !defined(__ARM_FEATURE_DOTPROD)
#error "this file must be compiled for the dot product extension"
#endif
#define TR_NEON
#define TR_NS kernels_dotprod_build
#define TR_TABLE kernels_dotprod
#define TR_NAME "dotprod"
#include "table.inl"
