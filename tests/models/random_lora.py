"""LoRA adapters with random numbers, as PEFT writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tailrace.models import Model

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
WHERE = {name: "self_attn" if name in ATTENTION else "mlp" for name in ALL}


def bf16(values: np.ndarray) -> np.ndarray:
    """The same numbers, cut to what bfloat16 can hold."""
    return (values.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def tensors(
    model: Model, seed: int, *, rank: int = 8, targets: Sequence[str] = ALL, ranks: Mapping[str, int] | None = None
) -> dict[str, np.ndarray]:
    """A and B of every target in every layer, large enough to change what the model says; float32 of bfloat16s."""
    rng = np.random.default_rng(seed)
    made = {}
    for number, layer in enumerate(model.layers):
        for name in targets:
            out, inputs = getattr(layer, name.removesuffix("_proj")).shape
            own = (ranks or {}).get(name, rank)
            module = f"base_model.model.model.layers.{number}.{WHERE[name]}.{name}"
            made[f"{module}.lora_A.weight"] = bf16(rng.standard_normal((own, inputs)) * inputs**-0.5)
            made[f"{module}.lora_B.weight"] = bf16(rng.standard_normal((out, own)) * own**-0.5)
    return made


def config(*, rank: int = 8, targets: Sequence[str] = ALL, **more: Any) -> dict[str, Any]:
    """What PEFT's `LoraConfig` writes, as far as it matters, and some of what does not."""
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "somewhere/else", "revision": None,
        "r": rank, "lora_alpha": 2 * rank, "lora_dropout": 0.05, "bias": "none", "fan_in_fan_out": False,
        "target_modules": list(targets), "modules_to_save": None, "use_dora": False, "use_rslora": False,
        "rank_pattern": {}, "alpha_pattern": {}, "init_lora_weights": True, "megatron_core": "megatron.core",
        "loftq_config": {}, "inference_mode": True, **more,
    }  # fmt: skip


def write(folder: Path, tensors: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> Path:
    """Makes the directory."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    return folder


def make(folder: Path, model: Model, seed: int, **options: Any) -> Path:
    """A directory with an adapter of this model. Options are those of `tensors`."""
    rank = options.get("rank", 8)
    return write(
        folder, tensors(model, seed, **options), config(rank=rank, rank_pattern=dict(options.get("ranks") or {}))
    )
