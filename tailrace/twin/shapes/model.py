"""A model's shape: what its configuration amounts to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from tailrace.terms import ModelError
from tailrace.twin.shapes.caches import Cache
from tailrace.twin.shapes.families import FAMILIES
from tailrace.twin.shapes.family import Family
from tailrace.twin.shapes.parts import Attention, Experts, Latent, Layer
from tailrace.twin.shapes.reading import Reader
from tailrace.twin.shapes.tensors import Part, Tensor, vector
from tailrace.twin.shapes.towers import TOWERS

BESIDE = (Part.VISION, Part.AUDIO, Part.MTP)
"""Parts that are counted apart from the language model."""


@dataclass(frozen=True)
class ModelShape:
    """What a model is. `model_type` is the language model's; `towers` and `mtp` are beside it (encoders of images,
    layers that predict a token further). `assumed` are fields that the file leaves to the architecture's own defaults,
    `unsized` parts that are known to be there and are not counted. `dtype` is None where the file does not say."""

    name: str
    model_type: str
    hidden: int
    vocab: int
    tied: bool
    context: int | None
    layers: tuple[Layer, ...]
    outside: tuple[Tensor, ...]
    towers: tuple[Tensor, ...]
    mtp: tuple[Tensor, ...]
    dtype: str | None
    quantization: dict[str, Any] | None
    assumed: dict[str, Any]
    unsized: tuple[str, ...]

    @cached_property
    def located(self) -> tuple[tuple[int | None, Tensor], ...]:
        """Every tensor of the language model, with its layer (None: outside of them)."""
        inside = ((index, tensor) for index, layer in enumerate(self.layers) for tensor in layer.tensors(self.hidden))
        return (*((None, tensor) for tensor in self.outside), *inside)

    def tensors(self, *, beside: bool = True) -> Iterator[tuple[int | None, Tensor]]:
        """The language model's tensors and those of encoders, with their layers. Multi-token prediction is not in it:
        engines load it for speculation only."""
        yield from self.located
        if beside:
            yield from ((None, tensor) for tensor in self.towers)

    @property
    def text_parameters(self) -> int:
        """Of the language model."""
        return sum(tensor.parameters for _, tensor in self.located)

    @property
    def parameters(self) -> int:
        """Of the language model and its encoders."""
        return self.text_parameters + sum(tensor.parameters for tensor in self.towers)

    @property
    def active(self) -> int:
        """Parameters of the language model less the experts that one token does not use: what "A3B" stands for."""
        return sum(tensor.active for _, tensor in self.located)

    @property
    def multiplied(self) -> int:
        """Parameters that one token is multiplied with: the active ones less the embedding, of which it reads a row."""
        return sum(tensor.active for _, tensor in self.located if not tensor.looked_up)

    @property
    def by_part(self) -> dict[Part, int]:
        """Parameters of each part, towers and multi-token prediction too."""
        sums: Counter[Part] = Counter()
        for tensor in (*(tensor for _, tensor in self.located), *self.towers, *self.mtp):
            sums[tensor.part] += tensor.parameters
        return dict(sums.most_common())

    @cached_property
    def caches(self) -> tuple[tuple[int, Cache], ...]:
        """What each layer keeps of a request."""
        return tuple((index, cache) for index, layer in enumerate(self.layers) for cache in layer.caches())

    def kv_bytes_per_token(self, value_bytes: float = 2) -> float:
        """Bytes that one more token adds in all layers while no window is full: what engines call KV a token. States
        add nothing."""
        return sum(cache.token_bytes(value_bytes) for _, cache in self.caches)

    def kv_bytes(self, context: int, value_bytes: float = 2, tp: int = 1) -> float:
        """Bytes of one request with so many tokens, windows and states as they are, on the fullest of `tp` ranks."""
        return sum(cache.request_bytes(context, value_bytes, tp) for _, cache in self.caches)

    @property
    def attentions(self) -> tuple[Attention | Latent, ...]:
        """Every attention, layer by layer."""
        return tuple(m for layer in self.layers for m in layer.mixers if isinstance(m, Attention | Latent))

    @property
    def experts(self) -> tuple[Experts, ...]:
        """Every mixture of experts, layer by layer."""
        return tuple(layer.feed for layer in self.layers if isinstance(layer.feed, Experts))


def shape_of(config: dict[str, Any], name: str = "config.json", *, text_only: bool = False) -> ModelShape:
    """The shape that a configuration (`config.json`, parsed) describes. Raises ModelError, which names the field, for
    an architecture that is not known, for fields that are missing or wrong, and for fields that nobody here
    understands.

    `text_only` leaves encoders of images and sounds out."""
    whole = Reader(name, config)
    text, kind = _text(whole)
    family = FAMILIES.get(kind)
    if family is None:
        raise ModelError(
            f"{name}: the architecture {kind!r} is not known, so what its fields mean is not; known are "
            f"{', '.join(sorted(FAMILIES))}"
        )
    unsized: list[str] = []
    layers = family.stack(text)
    if text is not whole and whole.raw("tie_word_embeddings") is not None:
        text.values["tie_word_embeddings"] = whole.raw("tie_word_embeddings")
    outside = family.outside(text)
    mtp = tuple(_mtp(family, text, layers, unsized))
    towers = () if text_only else tuple(_towers(whole, text.count("hidden_size"), unsized))
    quantization = whole.raw("quantization_config") or text.raw("quantization_config")
    if quantization and text.raw("expert_dtype") is not None:
        quantization = {**quantization, "expert_dtype": text.text("expert_dtype")}
    if text_only:
        whole.pass_over("vision_config", "audio_config")
    whole.pass_over("tie_word_embeddings", "compression_config")
    if unread := whole.unread():
        raise ModelError(
            f"{name}: {', '.join(unread)[:300]} {'is' if len(unread) == 1 else 'are'} not understood for {kind} "
            "models, and might change sizes"
        )
    context = text.raw("max_position_embeddings|max_seq_len|n_positions|model_max_length")
    return ModelShape(
        name=name,
        model_type=kind,
        hidden=text.count("hidden_size"),
        vocab=text.count("vocab_size"),
        tied=not any(tensor.part is Part.HEAD for tensor in outside),
        context=context if type(context) is int else None,
        layers=layers,
        outside=outside,
        towers=towers,
        mtp=mtp,
        dtype=_dtype(whole, text),
        quantization=quantization,
        assumed=whole.assumptions(),
        unsized=tuple(unsized),
    )


WHOLES = {
    "qwen3_vl": "qwen3_vl_text", "qwen3_vl_moe": "qwen3_vl_moe_text", "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text", "qwen2_vl": "qwen2", "qwen2_5_vl": "qwen2", "gemma3": "gemma3_text",
    "gemma4": "gemma4_text", "llama4": "llama4_text", "mistral3": "mistral", "llava": "llama", "kimi_k25": "kimi_k2",
    "kimi_k3": "kimi_linear", "minimax_m3_vl": "minimax_m3_vl_text", "step3p7": "step3p5",
}  # fmt: skip
"""Multimodal models, and the language model in them where their text's configuration does not name it."""

ALIASES = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "step3p7_text": "step3p5"}
"""Text models that are another by a new name."""


def _text(whole: Reader) -> tuple[Reader, str]:
    """The language model's part of the configuration, and its architecture."""
    kind = whole.text("model_type")
    text = whole.child("text_config") or whole.child("llm_config")
    if text is None:
        inner = kind if kind in FAMILIES else WHOLES.get(kind, kind)
        return whole, ALIASES.get(inner, inner)
    inner = text.text("model_type", WHOLES.get(kind, kind))
    return text, ALIASES.get(inner, inner)


def _towers(whole: Reader, text_width: int, unsized: list[str]) -> Iterator[Tensor]:
    """Encoders of images. A kind that is not known is an error, since it has weights."""
    kind = whole.text("model_type")
    vision = whole.child("vision_config")
    if vision is None and kind == "llama4":
        vision = Reader(f"{whole.where}: vision_config", {"model_type": "llama4_vision_model"})
        whole.assumed["vision_config"] = "Llama 4's own"
    if vision is not None:
        named = vision.text("model_type", kind) or kind
        tower = TOWERS.get(named)
        if tower is None:
            raise ModelError(
                f"{whole.where}: the vision tower {named!r} is not known, so its weights cannot be counted; leave "
                "it out with --text-only"
            )
        yield from tower.tensors(vision, text_width)
    audio = whole.child("audio_config")
    if audio is not None:
        raise ModelError(
            f"{whole.where}: the audio tower {audio.text('model_type', kind)!r} is not known, so its weights cannot be "
            "counted; leave it out with --text-only"
        )
    whole.pass_over(
        "projector_hidden_act", "vision_feature_layer", "vision_feature_select_strategy", "multimodal_projector_bias",
        "spatial_merge_size", "projector_bias", "language_model_only",
    )  # fmt: skip


def _mtp(family: Family, reader: Reader, layers: tuple[Layer, ...], unsized: list[str]) -> Iterator[Tensor]:
    """Layers that predict a token further: as the last one, behind a projection of two inputs (DeepSeek-V3, 2.2)."""
    others = "mtp_num_hidden_layers|num_nextn_predict_layers|num_mtp_modules|num_mtp_layers"
    if not family.mtp:
        found = [reader.raw(name) for name in others.split("|") if reader.raw(name)]
        if found:
            unsized.append(f"{found[0]} layers of multi-token prediction")
        return
    hidden = reader.count("hidden_size")
    for _ in range(reader.size(family.mtp, 0)):
        for tensor in layers[-1].tensors(hidden):
            yield replace(tensor, part=Part.MTP)
        yield Tensor(Part.MTP, "eh_proj", hidden, 2 * hidden)
        yield vector(Part.MTP, "norms", 3 * hidden)


def _dtype(whole: Reader, text: Reader) -> str | None:
    for reader in (whole, text):
        found = reader.raw("dtype|torch_dtype")
        if isinstance(found, str):
            return found.removeprefix("torch.")
    return None
