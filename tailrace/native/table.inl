// One build of every kernel. The including file defines TR_NS, the instruction set, and TR_TABLE (the function that
// returns the table) and TR_NAME.
#include "kernels.h"
#include "simd.h"

#include "gemm.inl"

#include "rows.inl"

#include "attention.inl"

#include "sample.inl"

#include "ceilings.inl"

namespace tailrace {

const Kernels *TR_TABLE() {
    static const Kernels table{
        TR_NAME,         TR_NS::enter, TR_NS::leave, TR_NS::ACTIVATION_BYTES, TR_NS::PANEL, TR_NS::gemm_int, TR_NS::row_int, TR_NS::STREAMS, TR_NS::gemm_float, TR_NS::add_low, TR_NS::embed,    TR_NS::quantise, TR_NS::widen,
        TR_NS::place,    TR_NS::gate_block, TR_NS::rms_norm, TR_NS::rotate,    TR_NS::store_kv, TR_NS::silu_mul,
        TR_NS::attend,   TR_NS::attend_pieces, TR_NS::merge_pieces, TR_NS::sample,
        TR_NS::PEAKS,    TR_NS::PEAK_COUNT, TR_NS::read_all,
    };
    return &table;
}

} // namespace tailrace
