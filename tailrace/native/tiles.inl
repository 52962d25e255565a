// The tiles of AMX: how they are configured, and their instructions.
#pragma once

#include <immintrin.h>

#include "kernels.h"

namespace TR_NS {

// How many rows of how many bytes each tile has. Made by the compiler, like all that is static in a build that needs more than every
// machine has: its instructions must not run where the library is merely loaded.
struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    constexpr void set(int tile, int64_t count, int bytes) {
        rows[tile] = uint8_t(count);
        row_bytes[tile] = uint16_t(bytes);
    }
    inline void load() const { asm volatile("ldtilecfg %0" : : "m"(*this)); }
};

// What this thread's tiles are configured for; null: nothing of ours. Loading a configuration takes as long as thousands of products, so
// it stays from one task to the next, until `leave`.
inline thread_local const TileConfig *configured = nullptr;

inline void configure(const TileConfig &config) {
    if (configured == &config) return;
    config.load();
    configured = &config;
}

// Before and after a thread's part of a step: in between, nobody else uses its tiles.
inline void enter() { configured = nullptr; }
inline void leave() {
    if (configured) asm volatile("tilerelease");
    configured = nullptr;
}

template <int T> TR_INLINE void tile_zero() { asm volatile("tilezero %%tmm%c0" : : "i"(T)); }
template <int T> TR_INLINE void tile_load(const void *p, int64_t apart) { asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(apart), "i"(T) : "memory"); }
template <int T> TR_INLINE void tile_store(float *p, int64_t apart = 64) { asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(apart), "i"(T) : "memory"); }
template <int SUM, int X, int WEIGHTS> TR_INLINE void tile_dot() { asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUM), "i"(X), "i"(WEIGHTS)); }

// Between instructions that write a tile. Where a core's other thread is busy, one of them right behind another takes 8 to 17 ns,
// as if there were no tile registers to spare, and holds up all that comes after; with some ten others in between, 5. Where it is
// not, this costs nothing (docs/performance.md).
TR_INLINE void space() { asm volatile(".rept 10\n\tnop\n\t.endr"); }

} // namespace TR_NS
