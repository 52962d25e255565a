"""Rules for mixers that keep a state of fixed size: linear attention, state spaces, short convolutions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tailrace.twin.shapes.parts import State
from tailrace.twin.shapes.reading import Reader
from tailrace.twin.shapes.rules import HEADS, HIDDEN, Size, Switch, sized, switched

TYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def state_type(reader: Reader, field: str) -> int:
    """Bytes of a value of the recurrent state: what the field says; float32, as the published kernels keep it, where
    there is none."""
    name = reader.text(field, "float32")
    if name not in TYPE_BYTES:
        raise reader.refuse(field, f"is {name[:40]!r}; known are {', '.join(TYPE_BYTES)}")
    if reader.raw(field) is None:
        reader.assumed[field] = name
    return TYPE_BYTES[name]


CONV_BYTES = 2
"""Of a value of a convolution's state, which is kept in the model's own type of 16 bits."""


def delta(reader: Reader, layer: int, layers: int) -> State:
    """Gated DeltaNet (Yang 2024) with Qwen3-Next's fields: keys of `k` heads shared by `v` heads of values, a short
    convolution over queries, keys and values, and a state of [head of keys, head of values] for each head of values."""
    k, v = reader.count("linear_num_key_heads"), reader.count("linear_num_value_heads")
    dk, dv = reader.count("linear_key_head_dim"), reader.count("linear_value_head_dim")
    kernel = reader.count("linear_conv_kernel_dim")
    if v % k:
        raise reader.refuse("linear_num_value_heads", f"is {v}, not a multiple of {k} heads of keys")
    mixed = 2 * k * dk + v * dv
    state = CONV_BYTES * mixed * (kernel - 1) + state_type(reader, "mamba_ssm_dtype") * v * dk * dv
    return State(
        "linear_attn", v, v * dv,
        (("in_proj_qkv", mixed, 0), ("in_proj_z", v * dv, 0), ("in_proj_b", v, 0), ("in_proj_a", v, 0)),
        (("conv1d", mixed * kernel), ("dt_bias", v), ("A_log", v), ("norm", dv)),
        state, groups=k,
    )  # fmt: skip


def kimi_delta(reader: Reader, layer: int, layers: int) -> State:
    """Kimi Delta Attention (Kimi Linear, section 3): a delta rule whose decay is one a channel."""
    fields = reader.child("linear_attn_config")
    if fields is None:
        raise reader.refuse("linear_attn_config", "is missing")
    fields.pass_over("kda_layers", "full_attn_layers")
    heads, dim, kernel = fields.count("num_heads"), fields.count("head_dim"), fields.count("short_conv_kernel_size")
    full_rank = fields.flag("use_full_rank_gate", False)
    wide = heads * dim
    gate: tuple[tuple[str, int, int], ...] = (("g_a_proj", dim, 0), ("g_b_proj", wide, dim))
    if full_rank:
        gate = (("g_proj", wide, 0),)
    inputs = tuple((f"{name}_proj", wide, 0) for name in "qkv")
    decay = (("f_a_proj", dim, 0), ("f_b_proj", wide, dim), ("b_proj", heads, 0))
    state = CONV_BYTES * 3 * wide * (kernel - 1) + 4 * heads * dim * dim
    vectors = (("conv1d", 3 * wide * kernel), ("dt_bias", wide), ("A_log", heads), ("o_norm", dim))
    return State("self_attn", heads, wide, inputs + decay + gate, vectors, state)


@dataclass(frozen=True)
class Mamba2:
    """Mamba-2 (Dao and Gu 2024, section 7): heads of a state space, `groups` of which share B and C."""

    heads: str = "mamba_num_heads|mamba_n_heads"
    head: str = "mamba_head_dim|mamba_d_head"
    groups: str = "n_groups|mamba_n_groups"
    state: str = "ssm_state_size|mamba_d_state"
    kernel: str = "conv_kernel|mamba_d_conv"
    expand: str = "expand|mamba_expand"
    bias: Switch = "use_bias"
    conv_bias: Switch = "use_conv_bias=true"
    out_bias: Switch = "use_bias"
    normed: Switch = True
    dtype: str = "mamba_ssm_cache_dtype"
    name: str = "mixer"
    inner: str = ""

    def __call__(self, reader: Reader, layer: int, layers: int) -> State:
        heads, dim = reader.count(self.heads), self._head_dim(reader)
        groups, states, kernel = reader.count(self.groups), reader.count(self.state), reader.count(self.kernel)
        reader.pass_over(*self.expand.split("|"))  # heads and their size say it
        inner = heads * dim
        if heads % groups:
            raise reader.refuse(self.groups, f"is {groups}, which does not divide {heads} heads")
        mixed = inner + 2 * groups * states
        into = inner + mixed + heads
        vectors = [("conv1d", mixed * (kernel + switched(reader, self.conv_bias)))]
        vectors += [("dt_bias", heads), ("A_log", heads), ("D", heads)]
        if switched(reader, self.normed):
            vectors.append(("norm", inner))
        if switched(reader, self.bias):
            vectors.append(("in_proj.bias", into))
        state = CONV_BYTES * mixed * (kernel - 1) + state_type(reader, self.dtype) * heads * dim * states
        return State(self.name, heads, inner, (("in_proj", into, 0),), tuple(vectors), state,
                     switched(reader, self.out_bias), groups)  # fmt: skip

    def _head_dim(self, reader: Reader) -> int:
        """A head's size; "auto" is what makes the heads as wide as the mixer."""
        if reader.raw(self.head) != "auto":
            return reader.count(self.head)
        inner = reader.count(self.inner) if self.inner else reader.count(self.expand) * reader.count(HIDDEN)
        return inner // reader.count(self.heads)


@dataclass(frozen=True)
class Mamba1:
    """Mamba (Gu and Dao 2023, section 3): a state of `states` for each channel. Jamba norms dt, B and C too."""

    states: str = "mamba_d_state|state_size|ssm_state_size"
    kernel: str = "mamba_d_conv|conv_kernel"
    expand: str = "mamba_expand|expand"
    rank: str = "mamba_dt_rank|time_step_rank"
    inner: str = ""
    bias: Switch = "mamba_proj_bias|use_bias"
    conv_bias: Switch = "mamba_conv_bias=true"
    normed: bool = False
    name: str = "mamba"

    def __call__(self, reader: Reader, layer: int, layers: int) -> State:
        hidden = reader.count(HIDDEN)
        inner = reader.count(self.inner) if self.inner else reader.count(self.expand) * hidden
        states, kernel = reader.count(self.states), reader.count(self.kernel)
        rank = -(-hidden // 16) if reader.raw(self.rank) in (None, "auto") else reader.count(self.rank)
        biased = switched(reader, self.bias)
        matrices = (("in_proj", 2 * inner, 0), ("x_proj", rank + 2 * states, inner), ("dt_proj", inner, rank))
        vectors = [("conv1d", inner * (kernel + switched(reader, self.conv_bias)))]
        vectors += [("dt_proj.bias", inner), ("A_log", inner * states), ("D", inner)]
        if self.normed:
            vectors.append(("norms", rank + 2 * states))
        if biased:
            vectors.append(("in_proj.bias", 2 * inner))
        state = CONV_BYTES * inner * (kernel - 1) + 4 * inner * states
        return State(self.name, inner, inner, matrices, tuple(vectors), state, biased)


def short_convolution(reader: Reader, layer: int, layers: int) -> State:
    """LFM2's gated short convolution."""
    hidden, kernel, biased = reader.count(HIDDEN), reader.count("conv_L_cache"), reader.flag("conv_bias", False)
    reader.pass_over("conv_dim", "conv_dim_out")
    vectors = (("conv", hidden * (kernel + biased)), *((("in_proj.bias", 3 * hidden),) if biased else ()))
    return State("conv", hidden, hidden, (("in_proj", 3 * hidden, 0),), vectors, CONV_BYTES * hidden * kernel, biased)


def lightning(reader: Reader, layer: int, layers: int) -> State:
    """Lightning attention (MiniMax-01, section 2.2): a state of [head, head] for each head, gated."""
    heads = reader.count(HEADS)
    dim = reader.count("head_dim", reader.count(HIDDEN) // heads)
    wide = heads * dim
    matrices = (("qkv_proj", 3 * wide, 0), ("output_gate", wide, 0))
    return State("self_attn", heads, wide, matrices, (("norm", wide),), 4 * heads * dim * dim)


