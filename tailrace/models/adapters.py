"""LoRA adapters as PEFT keeps them: a directory with `adapter_config.json` and `adapter_model.safetensors`.

An adapter adds scale * B (A x) to products of a model with some of its weights, where scale is lora_alpha / r, or
lora_alpha / sqrt(r) with `use_rslora` (arXiv:2106.09685, arXiv:2312.03732). What would change the numbers in any other
way is refused by name. Files are read whole, never mapped: whoever rewrites one while it is read spoils this adapter,
and not the process.
"""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailrace.backends import Adapter, LowRank
from tailrace.backends.reference.dequantize import dequantize
from tailrace.models.decoder import Model
from tailrace.models.fields import Fields
from tailrace.models.files.jsons import parse_object
from tailrace.models.files.mapped import MappedWeight
from tailrace.models.files.safetensors import parse_safetensors
from tailrace.terms import ModelError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_RANK = 512
"""More than any adapter has; each rank is computed for every token."""
MAX_BYTES = 4 << 30
"""Of the file of weights: it is read whole."""

PREFIX = "base_model.model."
"""What PEFT puts before the names of the model's own modules."""
HALVES = {".lora_A.weight": "A", ".lora_B.weight": "B"}
PROJECTIONS = {
    **dict.fromkeys(("q", "k", "v", "o"), "self_attn"),
    **dict.fromkeys(("gate", "up", "down"), "mlp"),
}
"""The weights of a layer that an adapter can be of, by their names in `decoder.Layer`, with the part of the layer in
which Hugging Face has them."""

READ = ("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")
"""Fields that say what is computed."""
SILENT = (
    *("auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config"),
    *("exclude_modules", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform"),
    *("loftq_config", "lora_dropout", "lora_ga_config", "megatron_core", "peft_version", "qalora_group_size"),
    *("revision", "runtime_config", "target_modules", "task_type"),
)
"""Fields that say how it was trained, or what its tensors say too."""
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of init_lora_weights with which the base model's own weights were changed before training."""


@dataclass(frozen=True, eq=False)
class ReadAdapter:
    """An adapter, the SHA-256 of its files, and its largest rank."""

    adapter: Adapter
    digest: str
    rank: int


def read_adapter(folder: Path, model: Model) -> ReadAdapter:
    """Reads an adapter of this model. Raises ModelError naming the file, and the field or tensor, that is wrong."""
    if not folder.is_dir():
        raise ModelError(f"{folder}: there is no such directory; an adapter is one with {CONFIG} and {WEIGHTS}")
    config, weights = _bytes_of(folder / CONFIG), _bytes_of(folder / WEIGHTS)
    digest = hashlib.sha256(hashlib.sha256(config).digest() + hashlib.sha256(weights).digest()).hexdigest()
    fields = Fields(str(folder / CONFIG), parse_object(folder / CONFIG, config))
    _check(fields)
    tensors = parse_safetensors(folder / WEIGHTS, weights)
    weights_of = {
        f"model.layers.{number}.{block}.{name}_proj": getattr(layer, name)
        for number, layer in enumerate(model.layers)
        for name, block in PROJECTIONS.items()
    }
    parts = {}
    for module, halves in sorted(_by_module(folder / WEIGHTS, tensors).items()):
        weight = weights_of.get(module)
        if weight is None:
            raise ModelError(
                f"{folder / WEIGHTS}: the adapter is of {module}, which is not supported: it can be of the projections "
                f"of a layer's attention and MLP ({', '.join(f'{name}_proj' for name in PROJECTIONS)}) that this model "
                "has"
            )
        parts[weight.name] = _part(fields, folder / WEIGHTS, module, halves, weight.shape)
    if not parts:
        raise ModelError(f"{folder / WEIGHTS}: there are no tensors, so the adapter changes nothing")
    return ReadAdapter(Adapter(parts), digest, max(len(part.a) for part in parts.values()))


def _bytes_of(path: Path) -> bytes:
    """A whole file. Only a regular one is read: a named pipe or a device might never end, nor even open."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ModelError(f"{path}: not a regular file, as those of an adapter have to be")
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file; an adapter has {CONFIG} and {WEIGHTS}") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror or error})") from error
    if len(raw) > MAX_BYTES:
        raise ModelError(f"{path}: larger than {MAX_BYTES >> 30} GiB, which no adapter here is")
    return raw


def _check(fields: Fields) -> None:
    """Refuses what is not a plain LoRA adapter, and fields that nobody knows here unless they are off."""
    fields.text("peft_type")
    fields.only("peft_type", "LORA")
    fields.only("bias", "none")
    fields.absent(name for name in fields.values if name not in {*READ, *SILENT, "bias"})
    init = fields.values.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(CHANGES_BASE):
        raise fields.refuse(
            "init_lora_weights",
            f"is {init!r}: the adapter belongs to a base model that was changed with it; save it converted to plain "
            "LoRA (PEFT: path_initial_model_for_weight_conversion)",
        )


def _by_module(path: Path, tensors: dict[str, MappedWeight]) -> dict[str, dict[str, MappedWeight]]:
    """Each module's halves, "A" and "B"."""
    modules: dict[str, dict[str, MappedWeight]] = {}
    for name, tensor in tensors.items():
        for suffix, half in HALVES.items():
            if name.startswith(PREFIX) and name.endswith(suffix):
                module = name.removeprefix(PREFIX).removesuffix(suffix)
                modules.setdefault(module, {})[half] = tensor
                break
        else:
            raise ModelError(
                f"{path}: tensor {name} is not supported; an adapter's are {PREFIX}MODULE.lora_A.weight and "
                "...lora_B.weight"
            )
    return modules


def _part(fields: Fields, path: Path, module: str, halves: dict[str, MappedWeight], shape: tuple[int, ...]) -> LowRank:
    rank = int(_patterned(fields, "rank_pattern", module, fields.count("r", most=MAX_RANK), most=MAX_RANK))
    alpha = _patterned(fields, "alpha_pattern", module, fields.number("lora_alpha", zero=True))
    scale = alpha / (sqrt(rank) if fields.flag("use_rslora", False) else rank)
    values = []
    for half, wanted in (("A", (rank, shape[1])), ("B", (shape[0], rank))):
        name = f"{PREFIX}{module}.lora_{half}.weight"
        tensor = halves.get(half)
        if tensor is None:
            raise ModelError(f"{path}: tensor {name} is missing")
        if tensor.shape != wanted:
            raise ModelError(
                f"{path}: tensor {name} has the shape {list(tensor.shape)}; the model and {CONFIG} say {list(wanted)}"
            )
        values.append(_finite(path, name, tensor))
    return LowRank(values[0], values[1], scale)


def _finite(path: Path, name: str, tensor: MappedWeight) -> NDArray[np.float32]:
    values = dequantize(tensor).astype(np.float32)
    if not np.isfinite(values).all():
        raise ModelError(f"{path}: tensor {name} has values that are not finite")
    return values


def _patterned(fields: Fields, field: str, module: str, default: float, *, most: int | None = None) -> float:
    """What a pattern says of a module: the value of the first name in it that is the module's, or the end of it. PEFT
    takes regular expressions there; names do for what it writes itself, and cannot take for ever to match."""
    pattern: Any = fields.values.get(field) or {}
    if not isinstance(pattern, dict):
        raise fields.refuse(field, f"is {type(pattern).__name__}; expected an object")
    own = Fields(f"{fields.where}: {field}", pattern)
    plains = {name: name.removeprefix("^").removesuffix("$").replace("\\.", ".") for name in pattern}
    for name, plain in plains.items():
        if not plain.replace(".", "").replace("_", "").isalnum():
            raise fields.refuse(field, f"has the regular expression {name[:60]!r}; only names are supported")
    for name, plain in plains.items():
        if module == plain or (not name.startswith("^") and module.endswith(f".{plain}")):
            return own.count(name, most=most) if most is not None else own.number(name, zero=True)
    return default
