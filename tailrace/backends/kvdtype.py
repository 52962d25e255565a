"""How keys and values are kept: the names of `--kv-dtype`, and the bytes that they take.

A vector is one token's key or value of one head. Two bytes a number; or rounded to 8 bits, with a float16 scale for
each vector; or rotated and rounded to 4 bits, with a float16 scale and minimum for each GROUP dimensions. The layouts
are in native/kernels.h.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass

from tailrace.terms import InvalidInput, ModelError

LANES = 16
"""Values are padded to whole lanes of the kernels."""
GROUP = 32
"""Dimensions that share a scale and a minimum where they are of 4 bits; values are padded to whole groups."""


class Kept(enum.StrEnum):
    """What a vector's numbers are kept as. F32 is known to the reference backend only."""

    BF16 = "bf16"
    F16 = "fp16"
    I8 = "int8"
    I4 = "int4"
    F32 = "f32"


_SHORT = {"bf16": Kept.BF16, "fp16": Kept.F16, "f16": Kept.F16, "int8": Kept.I8, "int4": Kept.I4, "f32": Kept.F32}
_BITS = {"16": Kept.BF16, "8": Kept.I8, "4": Kept.I4}
_NAMES = {kept: bits for bits, kept in _BITS.items()}
FORMS = "bf16, fp16, int8, int4, or the bits of keys and of values, each 16, 8 or 4, as in k8v4"


def key_bytes(kept: Kept, head_dim: int) -> int:
    """Bytes of one token's key of one head, with what it is multiplied with."""
    match kept:
        case Kept.F32:
            return 4 * head_dim
        case Kept.I8:
            return head_dim + 2
        case Kept.I4:
            return head_dim // 2 + 4 * -(-head_dim // GROUP)
        case _:
            return 2 * head_dim


def value_bytes(kept: Kept, head_dim: int) -> int:
    """Bytes of one token's value of one head. Other than the rest, bf16 is counted (and leaves the pool) without
    padding."""
    padded, groups = -(-head_dim // LANES) * LANES, -(-head_dim // GROUP)
    match kept:
        case Kept.F32:
            return 4 * head_dim
        case Kept.F16:
            return 2 * padded
        case Kept.I8:
            return padded + 2
        case Kept.I4:
            return groups * (GROUP // 2 + 4)
        case _:
            return 2 * head_dim


@dataclass(frozen=True)
class KvDtype:
    """How the layers of a model keep keys and values. Layers in `skip` keep both as bf16."""

    key: Kept = Kept.BF16
    value: Kept = Kept.BF16
    skip: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """As --kv-dtype has it, with the layers that are left out: `k8v4`, or `k8v4 but 0,29`."""
        kind = str(self.key) if self.key == self.value else f"k{_NAMES[self.key]}v{_NAMES[self.value]}"
        return f"{kind} but {','.join(map(str, self.skip))}" if self.skip else kind

    def of(self, layer: int) -> tuple[Kept, Kept]:
        """What a layer keeps its keys and its values as."""
        return (Kept.BF16, Kept.BF16) if layer in self.skip else (self.key, self.value)

    def check(self, layers: int) -> None:
        """Raises ModelError where a layer is left out that the model does not have."""
        if self.skip and self.skip[-1] >= layers:
            raise ModelError(f"--kv-dtype-skip names layer {self.skip[-1]}, but the model's are 0 .. {layers - 1}")

    def layer_bytes(self, layer: int, kv_heads: int, head_dim: int) -> int:
        """Bytes of keys and values that one token adds in one layer."""
        key, value = self.of(layer)
        return kv_heads * (key_bytes(key, head_dim) + value_bytes(value, head_dim))

    def pool_bytes(self, layer: int, kv_heads: int, head_dim: int) -> int:
        """Bytes of memory that one token takes in one layer's pages: there values of bf16 are padded too."""
        padding = -head_dim % LANES if self.of(layer)[1] is Kept.BF16 else 0
        return self.layer_bytes(layer, kv_heads, head_dim) + 2 * kv_heads * padding

    def token_bytes(self, layers: Iterable[int], kv_heads: int, head_dim: int) -> int:
        """Bytes of keys and values that one token adds in all these layers."""
        return sum(self.layer_bytes(layer, kv_heads, head_dim) for layer in layers)


BF16 = KvDtype()


def parse(name: str, skip: str = "") -> KvDtype:
    """What --kv-dtype and --kv-dtype-skip mean: a name (see FORMS), and layers as in `0,1,28-29`. InvalidInput for
    anything else."""
    found = re.fullmatch(r"k(16|8|4)v(16|8|4)", name)
    if found:
        key, value = _BITS[found[1]], _BITS[found[2]]
    elif name in _SHORT:
        key = value = _SHORT[name]
    else:
        raise InvalidInput(f"--kv-dtype must be {FORMS}, not {name!r}", param="kv_dtype")
    layers = _layers(skip) if skip else ()
    if layers and key == value == Kept.F32:
        raise InvalidInput("--kv-dtype-skip leaves layers as bf16, which is less than f32", param="kv_dtype_skip")
    return KvDtype(key, value, () if key == value == Kept.BF16 else layers)


def _layers(text: str) -> tuple[int, ...]:
    layers: set[int] = set()
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d{1,4})(?:-(\d{1,4}))?\s*", part)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if last < first:
            raise InvalidInput(
                f"--kv-dtype-skip has layers with commas, counted from 0, as in 0,1 or 0-3,29; not {text!r}",
                param="kv_dtype_skip",
            )
        layers.update(range(first, last + 1))
    return tuple(sorted(layers))
