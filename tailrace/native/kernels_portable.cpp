// The portable build of the kernels.
#define TR_NS kernels_portable_build
#define TR_TABLE kernels_portable
#define TR_NAME "portable"
#include "table.inl"
