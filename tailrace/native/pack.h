// Rewrites tensors from their file's format into the kernels' tiles. Exact: every quantised value and scale is kept.
#pragma once

#include <cstdint>
#include <string>

#include "kernels.h"

namespace tailrace {

// Kind and quants that a file format (GGUF's name, or F32, F16, BF16) packs into, for a matrix of
// [n, k] values. `data` stays null. Throws std::invalid_argument for a format that has no kernel.
Packed packed_shape(const std::string &format, int64_t n, int64_t k);

// Packs tiles [from, to) of `shape` from rows of `row_bytes` bytes. Rows past `rows` become zeros.
void pack_tiles(const std::string &format, const uint8_t *source, int64_t rows, int64_t row_bytes, int64_t k, const Packed &shape,
                int64_t from, int64_t to, uint8_t *out);

} // namespace tailrace
