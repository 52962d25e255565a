"""What a checkpoint is, for people: shapes, parameters, bytes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path

from tailrace.backends import Format
from tailrace.backends.kvdtype import BF16, KvDtype
from tailrace.models.checkpoint import Checkpoint
from tailrace.models.decoder import ModelConfig
from tailrace.models.files.mapped import stored_bytes
from tailrace.models.load import load_model
from tailrace.models.quantise import quantise, rounded


@dataclass(frozen=True)
class ModelInfo:
    """What a model is, for people. Bytes are exact; KV is per sequence, keys and values of every layer, and a
    layer with a window never needs more than that window."""

    name: str
    path: Path
    source_format: str
    config: ModelConfig
    parameters: int
    active_parameters: int
    """Parameters that one token is multiplied with. All of a dense model's, the embedding counted once."""
    weight_bytes: int
    """Of the weights as they are computed with."""
    stored_bytes: int
    """Of the weights in the model's files: what `weight_bytes` is, unless some are quantised at load."""
    quantised: int
    """Matrices that are quantised at load."""
    kv_dtype: str
    """How keys and values are kept."""
    kv_bytes_per_token: int
    kv_bytes_per_context: int
    formats: dict[Format, tuple[int, int]]
    """Tensors and bytes of each format that is computed with, most bytes first."""


def describe(checkpoint: Checkpoint, quantize: str | None = None, kv_dtype: KvDtype = BF16) -> ModelInfo:
    """What `tailrace info` prints, of the model as it is stored or with its float matrices quantised (`int8`, `int4`),
    and its KV kept so. Raises ModelError as `load_model`, `quantise` and `KvDtype.check` do."""
    stored = load_model(checkpoint)
    model = quantise(stored, quantize) if quantize else stored
    config = model.config
    tensors: Counter[Format] = Counter()
    sizes: Counter[Format] = Counter()
    parameters = 0
    for weight in model.weights():
        parameters += prod(weight.shape)
        tensors[weight.format] += 1
        sizes[weight.format] += stored_bytes(weight.format, weight.shape)
    kv_dtype.check(config.layers)
    each = [kv_dtype.layer_bytes(layer, config.kv_heads, config.head_dim) for layer in range(config.layers)]
    kept = [min(config.max_context, window or config.max_context) for window in config.windows]
    return ModelInfo(
        name=checkpoint.name,
        path=checkpoint.path,
        source_format=checkpoint.source_format,
        config=config,
        parameters=parameters,
        active_parameters=parameters,
        weight_bytes=sizes.total(),
        stored_bytes=sum(stored_bytes(weight.format, weight.shape) for weight in stored.weights()),
        quantised=sum(1 for _ in rounded(model)),
        kv_dtype=kv_dtype.name,
        kv_bytes_per_token=sum(each),
        kv_bytes_per_context=sum(size * tokens for size, tokens in zip(each, kept, strict=True)),
        formats={kind: (tensors[kind], size) for kind, size in sizes.most_common()},
    )
