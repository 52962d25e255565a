"""What a checkpoint is, for people: shapes, parameters, bytes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path

from tailrace.backends import PAGE_SIZE, Format
from tailrace.backends.groups import PageGroup, most_pages, page_groups, pool_bytes
from tailrace.backends.kvdtype import BF16, KvDtype
from tailrace.models.checkpoint import Checkpoint
from tailrace.models.decoder import ModelConfig
from tailrace.models.files.mapped import stored_bytes
from tailrace.models.load import load_model
from tailrace.models.quantise import quantise, rounded

STEP_TOKENS = 512
"""Tokens of a step, as `tailrace serve` has them unless told otherwise."""


@dataclass(frozen=True)
class ModelInfo:
    """What a model is, for people. Bytes are exact; KV is keys and values of every layer."""

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
    kept: KvDtype
    """How keys and values are kept."""
    kv_bytes_per_token: int
    kv_bytes_per_context: int
    """The most that a request of the whole context holds at a time, in whole pages; in layers with a window it holds
    the window and what a step of `STEP_TOKENS` computes."""
    groups: tuple[PageGroup, ...]
    """Layers whose pages live equally long, for the whole context."""
    formats: dict[Format, tuple[int, int]]
    """Tensors and bytes of each format that is computed with, most bytes first."""

    @property
    def kv_dtype(self) -> str:
        """The name of that."""
        return self.kept.name

    def pool_bytes(self, tokens: int, context: int | None = None) -> int:
        """Bytes of the KV pools that `tailrace serve --kv-tokens` makes for so many tokens, of this served context."""
        pages = tokens // PAGE_SIZE
        context = min(context or self.config.max_context, pages * PAGE_SIZE)
        return pool_bytes(page_groups(self.config.attentions, context), pages, context, STEP_TOKENS, self.kept)


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
    groups = page_groups(config.attentions, config.max_context)
    held = [
        most_pages(group.window, config.max_context, STEP_TOKENS)
        * sum(kv_dtype.layer_bytes(spec.layer, spec.kv_heads, spec.head_dim) for spec in group.layers)
        for group in groups
    ]
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
        kept=kv_dtype,
        kv_bytes_per_token=kv_dtype.token_bytes(range(config.layers), config.kv_heads, config.head_dim),
        kv_bytes_per_context=PAGE_SIZE * sum(held),
        groups=groups,
        formats={kind: (tensors[kind], size) for kind, size in sizes.most_common()},
    )
