// Whether this process may use AMX: tiles, and their products of int8 and of bf16.
#pragma once

#include "kernels.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#endif

namespace tailrace {

// Asks the processor, the system, and then for the permission that Linux wants before a process's first tile instruction:
// the registers of a thread's tiles are 8 KiB, which it does not keep for whoever has not asked.
TR_INLINE bool ask_for_amx() {
#if defined(__x86_64__) && defined(__linux__)
    constexpr unsigned OSXSAVE = 1u << 27, ALL = 1u << 22 | 1u << 24 | 1u << 25; // amx_bf16, amx_tile, amx_int8
    constexpr unsigned STATES = 1u << 17 | 1u << 18;                             // tile configuration, tile data
    constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18;
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & OSXSAVE)) return false;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & ALL) != ALL) return false;
    uint32_t low, high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low & STATES) != STATES) return false;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0;
#else
    return false;
#endif
}

// The answer of the first time: it holds for every thread of the process, for as long as that lives.
TR_INLINE bool amx_permitted() {
    static const bool permitted = ask_for_amx();
    return permitted;
}

} // namespace tailrace
