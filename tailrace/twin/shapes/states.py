"""Rules for mixers that keep a state of fixed size: linear attention, state spaces, short convolutions."""

from __future__ import annotations

from dataclasses import dataclass

from tailrace.twin.shapes.parts import State
from tailrace.twin.shapes.reading import Reader
from tailrace.twin.shapes.rules import HEADS, HIDDEN, Switch, switched
from tailrace.twin.shapes.tensors import Part, Split, Tensor, vector

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


def rows(name: str, count: int, columns: int, units: int) -> Tensor:
    """A product whose outputs are of so many heads (or groups of them, which ranks share where they are fewer)."""
    return Tensor(Part.STATE, name, count, columns, Split.KV, units=units)


def columns(name: str, count: int, columns: int, units: int) -> Tensor:
    """A product whose inputs are."""
    return Tensor(Part.STATE, name, count, columns, Split.COLUMNS, units=units)


def each(name: str, count: int, units: int) -> Tensor:
    """A vector that is."""
    return vector(Part.STATE, name, count, Split.KV, units)


def delta(reader: Reader, layer: int, layers: int) -> State:
    """Gated DeltaNet (Yang 2024) with Qwen3-Next's fields: keys of `k` heads shared by `v` heads of values, a short
    convolution over queries, keys and values, and a state of [head of keys, head of values] for each head of values."""
    hidden = reader.count(HIDDEN)
    k, v = reader.count("linear_num_key_heads"), reader.count("linear_num_value_heads")
    dk, dv = reader.count("linear_key_head_dim"), reader.count("linear_value_head_dim")
    kernel = reader.count("linear_conv_kernel_dim")
    if v % k:
        raise reader.refuse("linear_num_value_heads", f"is {v}, not a multiple of {k} heads of keys")
    keys, values = 2 * k * dk, v * dv
    parts = (
        rows("linear_attn.in_proj_qkv", keys, hidden, k), rows("linear_attn.in_proj_qkv", values, hidden, v),
        rows("linear_attn.in_proj_z", values, hidden, v), rows("linear_attn.in_proj_b", v, hidden, v),
        rows("linear_attn.in_proj_a", v, hidden, v), columns("linear_attn.out_proj", hidden, values, v),
        each("linear_attn.conv1d", keys * kernel, k), each("linear_attn.conv1d", values * kernel, v),
        each("linear_attn.dt_bias", v, v), each("linear_attn.A_log", v, v), vector(Part.STATE, "linear_attn.norm", dv),
    )  # fmt: skip
    recurrent = state_type(reader, "mamba_ssm_dtype") * v * dk * dv
    kept = CONV_BYTES * (kernel - 1)
    return State(parts, ((v, recurrent + kept * values), (k, kept * keys)))


def kimi_delta(reader: Reader, layer: int, layers: int) -> State:
    """Kimi Delta Attention (Kimi Linear, section 3): a delta rule whose decay is one a channel."""
    hidden = reader.count(HIDDEN)
    fields = reader.child("linear_attn_config")
    if fields is None:  # as newer files have it
        fields, names = reader, ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
    else:
        names = ("num_heads", "head_dim", "short_conv_kernel_size")
        fields.pass_over("kda_layers", "full_attn_layers")
        reader.pass_over("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim", "layer_types")
    heads, dim, kernel = (fields.count(name) for name in names)
    wide = heads * dim
    low = (Tensor(Part.STATE, "self_attn.g_a_proj", dim, hidden), rows("self_attn.g_b_proj", wide, dim, heads))
    gate = (rows("self_attn.g_proj", wide, hidden, heads),) if fields.flag("use_full_rank_gate", False) else low
    parts = (
        *(rows(f"self_attn.{name}_proj", wide, hidden, heads) for name in "qkv"), *gate,
        Tensor(Part.STATE, "self_attn.f_a_proj", dim, hidden), rows("self_attn.f_b_proj", wide, dim, heads),
        rows("self_attn.b_proj", heads, hidden, heads), columns("self_attn.o_proj", hidden, wide, heads),
        each("self_attn.conv1d", 3 * wide * kernel, heads), each("self_attn.dt_bias", wide, heads),
        each("self_attn.A_log", heads, heads), vector(Part.STATE, "self_attn.o_norm", dim),
    )  # fmt: skip
    return State(parts, ((heads, CONV_BYTES * 3 * wide * (kernel - 1) + 4 * heads * dim * dim),))


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
        hidden, heads, dim = reader.count(HIDDEN), reader.count(self.heads), self._head_dim(reader)
        groups, states, kernel = reader.count(self.groups), reader.count(self.state), reader.count(self.kernel)
        reader.pass_over(*self.expand.split("|"))  # heads and their size say it
        if heads % groups:
            raise reader.refuse(self.groups, f"is {groups}, which does not divide {heads} heads")
        inner, shared, name = heads * dim, 2 * groups * states, self.name
        wide = kernel + switched(reader, self.conv_bias)
        parts = [
            rows(f"{name}.in_proj", 2 * inner + heads, hidden, heads), rows(f"{name}.in_proj", shared, hidden, groups),
            columns(f"{name}.out_proj", hidden, inner, heads), each(f"{name}.conv1d", inner * wide, heads),
            each(f"{name}.conv1d", shared * wide, groups), each(f"{name}.ssm", 3 * heads, heads),
        ]  # fmt: skip
        if switched(reader, self.normed):
            parts.append(each(f"{name}.norm", inner, heads))
        if switched(reader, self.bias):
            parts += [each(f"{name}.bias", 2 * inner + heads, heads), each(f"{name}.bias", shared, groups)]
        if switched(reader, self.out_bias):
            parts.append(vector(Part.STATE, f"{name}.out_proj.bias", hidden))
        recurrent = state_type(reader, self.dtype) * heads * dim * states
        kept = CONV_BYTES * (kernel - 1)
        return State(tuple(parts), ((heads, recurrent + kept * inner), (groups, kept * shared)))

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
        hidden, name = reader.count(HIDDEN), self.name
        inner = reader.count(self.inner) if self.inner else reader.count(self.expand) * hidden
        states, kernel = reader.count(self.states), reader.count(self.kernel)
        rank = -(-hidden // 16) if reader.raw(self.rank) in (None, "auto") else reader.count(self.rank)
        parts = [
            rows(f"{name}.in_proj", 2 * inner, hidden, inner),
            columns(f"{name}.x_proj", rank + 2 * states, inner, inner),
            rows(f"{name}.dt_proj", inner, rank, inner), columns(f"{name}.out_proj", hidden, inner, inner),
            each(f"{name}.conv1d", inner * (kernel + switched(reader, self.conv_bias)), inner),
            each(f"{name}.ssm", inner * (states + 2), inner),
        ]  # fmt: skip
        if self.normed:
            parts.append(vector(Part.STATE, f"{name}.norms", rank + 2 * states))
        if switched(reader, self.bias):
            parts += [each(f"{name}.bias", 2 * inner, inner), vector(Part.STATE, f"{name}.out_proj.bias", hidden)]
        return State(tuple(parts), ((inner, CONV_BYTES * inner * (kernel - 1) + 4 * inner * states),))


def short_convolution(reader: Reader, layer: int, layers: int) -> State:
    """LFM2's gated short convolution."""
    hidden, kernel, biased = reader.count(HIDDEN), reader.count("conv_L_cache"), reader.flag("conv_bias", False)
    parts = [
        rows("conv.in_proj", 3 * hidden, hidden, hidden), columns("conv.out_proj", hidden, hidden, hidden),
        each("conv.conv", hidden * (kernel + biased), hidden),
    ]  # fmt: skip
    if biased:
        parts += [each("conv.bias", 3 * hidden, hidden), vector(Part.STATE, "conv.out_proj.bias", hidden)]
    return State(tuple(parts), ((hidden, CONV_BYTES * hidden * (kernel - 1)),))


def lightning(reader: Reader, layer: int, layers: int) -> State:
    """Lightning attention (MiniMax-01, section 2.2): a state of [head, head] for each head, gated."""
    hidden, heads = reader.count(HIDDEN), reader.count(HEADS)
    dim = reader.count("head_dim", hidden // heads)
    wide = heads * dim
    parts = (
        rows("self_attn.qkv_proj", 3 * wide, hidden, heads), rows("self_attn.output_gate", wide, hidden, heads),
        columns("self_attn.out_proj", hidden, wide, heads), each("self_attn.norm", wide, heads),
    )  # fmt: skip
    return State(parts, ((heads, 4 * heads * dim * dim),))
