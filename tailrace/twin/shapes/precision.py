"""Bytes of weights: formats with their scales, and which tensors a checkpoint has in which.

A scheme is read from `quantization_config` (or the `hf_quant_config.json` beside a configuration), or made of a
format's name. Tensors that a scheme does not name stay in the checkpoint's own type; embeddings, heads, norms,
routers and biases do unless it names them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from tailrace.terms import InvalidInput, ModelError
from tailrace.twin.shapes.names import matches
from tailrace.twin.shapes.tensors import Part, Tensor


@dataclass(frozen=True)
class Format:
    """How numbers are stored: `bits` a value; `group_bits` for each `group` values of a row (scale, zero point);
    `tile_bytes` for each tile of `tile` rows and columns; `row_bytes` a row; `tensor_bytes` a tensor."""

    name: str
    bits: int
    group: int = 0
    group_bits: int = 0
    tile: tuple[int, int] | None = None
    tile_bytes: int = 0
    row_bytes: int = 0
    tensor_bytes: int = 0
    column_bytes: int = 0
    """Of what a column needs (the order of act-order)."""
    pads: bool = False
    """Whether engines pad what does not divide into whole groups, instead of refusing it."""

    def bytes(self, tensor: Tensor) -> int:
        """Of all `times` tensors, scales included."""
        rows, columns = tensor.rows, tensor.columns
        total = -(-rows * columns * self.bits // 8) + rows * self.row_bytes + columns * self.column_bytes
        total += self.tensor_bytes
        if self.group:
            total += -(-rows * -(-columns // self.group) * self.group_bits // 8)
        if self.tile:
            total += -(-rows // self.tile[0]) * -(-columns // self.tile[1]) * self.tile_bytes
        return tensor.times * total

    def whole(self, rows: int, columns: int) -> bool:
        """Whether a part of a tensor holds whole groups and tiles."""
        if self.group and columns % self.group:
            return False
        return not self.tile or not (rows % self.tile[0] or columns % self.tile[1])


BF16 = Format("bf16", 16)
FORMATS: dict[str, Format] = {
    form.name: form
    for form in (
        Format("fp32", 32),
        BF16,
        Format("fp16", 16),
        Format("fp8", 8, row_bytes=4),
        Format("fp8-tensor", 8, tensor_bytes=4),
        Format("fp8-block", 8, tile=(128, 128), tile_bytes=4),
        Format("int8", 8, row_bytes=4),
        Format("int4", 4, group=128, group_bits=16),
        Format("mxfp8", 8, group=32, group_bits=8),
        Format("mxfp4", 4, group=32, group_bits=8, pads=True),
        Format("nvfp4", 4, group=16, group_bits=8, tensor_bytes=4),
    )
}
"""By name. Scales: fp8 and int8 one in float32 a row; fp8-block one for each 128 x 128 (DeepSeek-V3, section 3.3);
int4 one in 16 bits for each 128; mxfp8 and mxfp4 one in 8 bits for each 32 (OCP Microscaling 1.0); nvfp4 one in 8
bits for each 16, and one in float32 a tensor."""

DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "half": "fp16", "float": "fp32"}


@dataclass(frozen=True)
class Rule:
    """Tensors whose names match one of `only` (all linear ones where it is empty) and none of `but` have a format."""

    form: Format
    only: tuple[str, ...] = ()
    but: tuple[str, ...] = ()
    parts: tuple[Part, ...] = ()

    def covers(self, layer: int | None, tensor: Tensor) -> bool:
        if tensor.columns == 1 or tensor.looked_up:
            return False
        if self.parts and tensor.part not in self.parts:
            return False
        if self.only:
            return matches(self.only, layer, tensor.name) and not matches(self.but, layer, tensor.name)
        return tensor.rounded and not matches(self.but, layer, tensor.name)


@dataclass(frozen=True)
class Scheme:
    """What each tensor is stored in: the first rule that covers it, else `own`."""

    name: str
    own: Format
    rules: tuple[Rule, ...] = ()
    unmatched: tuple[str, ...] = field(default=())

    def of(self, layer: int | None, tensor: Tensor) -> Format:
        for rule in self.rules:
            if rule.covers(layer, tensor):
                return rule.form
        return self.own

    def bytes(self, layer: int | None, tensor: Tensor) -> int:
        return self.of(layer, tensor).bytes(tensor)


def scheme_of(config: dict[str, Any] | None, dtype: str | None, name: str, weights: str | None = None) -> Scheme:
    """The scheme of a checkpoint with this `quantization_config` and type; or the one that `weights` names, as if the
    checkpoint were stored so (linear layers; the rest in 16 bits). Raises ModelError for what is not understood,
    InvalidInput for a name that is not known."""
    if weights is not None:
        if weights not in FORMATS:
            raise InvalidInput(f"--weights {weights!r} is not known; known are {', '.join(FORMATS)}", param="weights")
        form = FORMATS[weights]
        if form.bits >= 16:
            return Scheme(weights, form)
        return Scheme(weights, BF16, (Rule(form),))
    if dtype is not None and dtype not in DTYPES:
        raise ModelError(f"{name}: dtype is {dtype[:40]!r}; known are {', '.join(DTYPES)}")
    if config is None:
        if dtype is None:
            raise ModelError(f"{name}: dtype (torch_dtype) is missing, so bytes are not known; say --weights bf16")
        return Scheme(DTYPES[dtype], FORMATS[DTYPES[dtype]])
    own = FORMATS[DTYPES[dtype]] if dtype else BF16  # what is quantised is 16 bits elsewhere
    return _read(config, replace(own) if own.bits <= 16 else BF16, name)


def _read(config: dict[str, Any], own: Format, name: str) -> Scheme:
    method = str(
        config.get("quant_method") or ("modelopt" if "quant_algo" in config or "config_groups" in config else "")
    )
    reader = METHODS.get(method)
    if reader is None:
        raise ModelError(
            f"{name}: quantization_config.quant_method is {method[:40]!r}; known are "
            f"{', '.join(METHODS)}: say --weights"
        )
    try:
        rules = tuple(reader(config))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(
            f"{name}: quantization_config of {method} is not understood ({error!r:.80}): say --weights"
        ) from None
    names = list(dict.fromkeys(rule.form.name for rule in rules))
    return Scheme(f"{method} ({', '.join(names)})" if names else method, own, rules)


def _skipped(config: dict[str, Any]) -> tuple[str, ...]:
    found = [config.get(key) for key in ("modules_to_not_convert", "ignore", "exclude_modules", "ignored_layers",
                                         "llm_int8_skip_modules")]  # fmt: skip
    return tuple(str(one) for each in found for one in each or ())


def _fp8(config: dict[str, Any]) -> Iterator[Rule]:
    """Fine-grained or per tensor; experts in FP4 where the file says so (DeepSeek V4), or by layers (NVFP4)."""
    yield from _layers(config)
    if config.get("expert_dtype") == "fp4":
        yield Rule(FORMATS["mxfp4"], parts=(Part.EXPERTS,))
    block = config.get("weight_block_size")
    form = (
        FORMATS["fp8-tensor"]
        if not block
        else Format("fp8-block", 8, tile=(int(block[0]), int(block[1])), tile_bytes=4)
    )
    yield Rule(form, but=_skipped(config) if not config.get("quantized_layers") else ())


def _mxfp4(config: dict[str, Any]) -> Iterator[Rule]:
    yield Rule(FORMATS["mxfp4"], but=_skipped(config), parts=(Part.EXPERTS,))


def _gptq(config: dict[str, Any]) -> Iterator[Rule]:
    """A scale in 16 bits and a zero point for each group of a column, and the order of columns in 32 bits."""
    bits, group = int(config["bits"]), int(config["group_size"])
    lasting = ("lm_head",) if config.get("lm_head") else ()
    form = Format(f"gptq-int{bits}", bits, group=group if group > 0 else 1 << 40, group_bits=16 + bits, column_bytes=4)
    yield Rule(form, but=_skipped(config))
    if lasting:
        yield Rule(form, lasting)


def _awq(config: dict[str, Any]) -> Iterator[Rule]:
    bits = int(config.get("bits") or config["w_bit"])
    group = int(config.get("group_size") or config["q_group_size"])
    zero = bits if config.get("zero_point", True) else 0
    yield Rule(Format(f"awq-int{bits}", bits, group=group, group_bits=16 + zero), but=_skipped(config))


def _compressed(config: dict[str, Any]) -> Iterator[Rule]:
    """compressed-tensors: groups of layers, each with a type of weights."""
    skipped = _skipped(config)
    for group in config["config_groups"].values():
        weights = group["weights"]
        form = _weights(weights)
        targets = tuple(str(one) for one in group.get("targets") or ("Linear",))
        only = () if any(one in ("Linear", "Linear4bit") for one in targets) else targets
        yield Rule(form, only, skipped)


def _weights(said: dict[str, Any]) -> Format:
    """A format of its bits, type and strategy."""
    bits, kind, group = int(said["num_bits"]), said["type"], said.get("group_size")
    strategy = said.get("strategy") or ("group" if group else "tensor")
    if kind == "float" and bits == 4 and group:
        return FORMATS["mxfp4"] if int(group) == 32 else FORMATS["nvfp4"]
    name = f"{'fp' if kind == 'float' else 'int'}{bits}"
    if kind not in ("float", "int") or bits not in (4, 8):
        raise ValueError(f"{kind} of {bits} bits")
    if strategy == "block":
        rows, columns = said["block_structure"]
        return Format(f"{name}-block", bits, tile=(int(rows), int(columns)), tile_bytes=4)
    if strategy == "channel":
        return Format(f"{name}-channel", bits, row_bytes=4 if kind == "float" else 2)
    if strategy == "tensor":
        return Format(f"{name}-tensor", bits, tensor_bytes=4)
    zero = 0 if said.get("symmetric", True) else bits
    return Format(f"{name}-group", bits, group=int(said["group_size"]), group_bits=16 + zero)


def _modelopt(config: dict[str, Any]) -> Iterator[Rule]:
    """NVIDIA's ModelOpt: one algorithm with exceptions, or one for each layer."""
    if config.get("quantized_layers"):
        yield from _layers(config)
        return
    algorithm = str(config.get("quant_algo") or "")
    if algorithm in ALGORITHMS:
        yield Rule(ALGORITHMS[algorithm], but=_skipped(config))
    else:
        yield from _compressed(config)


ALGORITHMS = {
    "NVFP4": FORMATS["nvfp4"], "NVFP4_AWQ": FORMATS["nvfp4"], "W4A16_NVFP4": FORMATS["nvfp4"],
    "W4A8_MXFP4_FP8": FORMATS["mxfp4"], "MXFP4": FORMATS["mxfp4"], "MXFP8": FORMATS["mxfp8"],
    "FP8": FORMATS["fp8-tensor"], "FP8_PER_CHANNEL_PER_TOKEN": FORMATS["fp8"], "FP8_PB_WO": FORMATS["fp8-block"],
    "W4A16_AWQ": FORMATS["int4"], "W8A16": FORMATS["int8"], "INT8_SQ": FORMATS["int8"],
}  # fmt: skip


def _layers(config: dict[str, Any]) -> Iterator[Rule]:
    """Algorithms by layer: one rule for each, since there are few."""
    by_algorithm: dict[str, list[str]] = {}
    for layer, said in (config.get("quantized_layers") or {}).items():
        by_algorithm.setdefault(str(said["quant_algo"]), []).append(str(layer))
    for algorithm, layers in by_algorithm.items():
        if algorithm not in ALGORITHMS:
            raise ValueError(f"quant_algo {algorithm}")
        yield Rule(ALGORITHMS[algorithm], only=tuple(layers))


def _bitsandbytes(config: dict[str, Any]) -> Iterator[Rule]:
    """LLM.int8 with a scale in 32 bits a row; 4 bits with one for each 64, itself in 8 bits where it is quantised."""
    if config.get("load_in_8bit"):
        yield Rule(FORMATS["int8"], but=_skipped(config) or ("lm_head",))
    elif config.get("load_in_4bit"):
        scale = 8 if config.get("bnb_4bit_use_double_quant") else 32
        yield Rule(Format("bnb-4bit", 4, group=64, group_bits=scale), but=_skipped(config) or ("lm_head",))
    else:
        raise ValueError("neither load_in_8bit nor load_in_4bit")


METHODS: dict[str, Callable[[dict[str, Any]], Iterator[Rule]]] = {
    "fp8": _fp8, "mxfp4": _mxfp4, "gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed,
    "modelopt": _modelopt, "modelopt_fp4": _modelopt, "modelopt_mixed": _modelopt, "bitsandbytes": _bitsandbytes,
}  # fmt: skip

KV_FORMATS = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "fp32": 4.0}
"""Bytes of a value of KV as serving engines keep it (FP8 with one scale a layer, which is nothing). Tailrace's own
types have a scale a token and are in `tailrace info`."""
