"""Configurations that the tests of the twin share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tailrace.twin.shapes.model import ModelShape, shape_of
from tailrace.twin.shapes.precision import scheme_of
from tailrace.twin.shapes.split import Weights

CONFIGS = Path(__file__).parent / "configs"
PUBLISHED = sorted(path.stem for path in CONFIGS.glob("*.json"))

LLAMA_8B, LLAMA_405B = "meta-llama--Meta-Llama-3.1-8B", "meta-llama--Meta-Llama-3.1-405B"
V3, V32, GPT_OSS = "deepseek-ai--DeepSeek-V3", "deepseek-ai--DeepSeek-V3.2", "openai--gpt-oss-120b"
MIXTRAL, SCOUT = "mistralai--Mixtral-8x7B-v0.1", "meta-llama--Llama-4-Scout-17B-16E-Instruct"

MISTRAL_7B: dict[str, Any] = {
    "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 32768,
    "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
"""mistralai/Mistral-7B-Instruct-v0.2."""

TINYLLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
    "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000,
    "max_position_embeddings": 2048, "tie_word_embeddings": False,
    "torch_dtype": "float16",
}  # fmt: skip
"""TinyLlama/TinyLlama-1.1B-Chat-v1.0."""

QWEN3_4B: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip
"""Qwen/Qwen3-4B, whose heads are not of 2560 / 32."""


def config(name: str) -> dict[str, Any]:
    """A published configuration."""
    read: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    return read


def shape(name: str | dict[str, Any], **changes: Any) -> ModelShape:
    """The shape of a published configuration, or of one of the above, with other values for some fields."""
    given = config(name) if isinstance(name, str) else name
    return shape_of({**given, **changes}, name if isinstance(name, str) else "model")


def weights(name: str | dict[str, Any], form: str | None = None) -> Weights:
    """A model, stored as its file says or in a format."""
    made = shape(name)
    return Weights(made, scheme_of(made.quantization, made.dtype, made.name, form))
