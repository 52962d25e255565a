"""What a checkpoint is, for people: shapes, parameters, bytes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path

from tailrace.backends import Format
from tailrace.models.checkpoint import Checkpoint
from tailrace.models.decoder import ModelConfig
from tailrace.models.files.mapped import stored_bytes
from tailrace.models.load import load_model


@dataclass(frozen=True)
class ModelInfo:
    """What a model is, for people. Bytes are exact; KV is per sequence, keys and values of every layer in bf16, and a
    layer with a window never needs more than that window."""

    name: str
    path: Path
    source_format: str
    config: ModelConfig
    parameters: int
    active_parameters: int
    """Parameters that one token is multiplied with. All of a dense model's, the embedding counted once."""
    weight_bytes: int
    kv_bytes_per_token: int
    kv_bytes_per_context: int
    formats: dict[Format, tuple[int, int]]
    """Tensors and bytes of each stored format, most bytes first."""


def describe(checkpoint: Checkpoint) -> ModelInfo:
    """What `tailrace info` prints. Raises ModelError as `load_model` does."""
    model = load_model(checkpoint)
    config = model.config
    tensors: Counter[Format] = Counter()
    stored: Counter[Format] = Counter()
    parameters = 0
    for weight in model.weights():
        parameters += prod(weight.shape)
        tensors[weight.format] += 1
        stored[weight.format] += stored_bytes(weight.format, weight.shape)
    layer_bytes = 2 * config.kv_heads * config.head_dim * 2
    kept = [min(config.max_context, window or config.max_context) for window in config.windows]
    return ModelInfo(
        name=checkpoint.name,
        path=checkpoint.path,
        source_format=checkpoint.source_format,
        config=config,
        parameters=parameters,
        active_parameters=parameters,
        weight_bytes=stored.total(),
        kv_bytes_per_token=layer_bytes * config.layers,
        kv_bytes_per_context=layer_bytes * sum(kept),
        formats={kind: (tensors[kind], size) for kind, size in stored.most_common()},
    )
