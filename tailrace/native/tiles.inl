// The tiles of AMX: how they are configured, and their instructions.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

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

#define TR_TILE_ZERO(T) asm volatile("tilezero %%tmm" #T : :)
#define TR_TILE_LOAD(T, p, stride) asm volatile("tileloadd (%0,%1,1), %%tmm" #T : : "r"(p), "r"(size_t(stride)) : "memory")
#define TR_TILE_STORE(T, p) asm volatile("tilestored %%tmm" #T ", (%0,%1,1)" : : "r"(p), "r"(size_t(64)) : "memory")

} // namespace TR_NS
