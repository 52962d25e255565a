"""From a checkpoint to a model that runs."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from tailrace.models.checkpoint import Checkpoint
from tailrace.models.decoder import Binder, Model, ModelConfig
from tailrace.models.fields import Fields
from tailrace.models.rope import build_rope, rope_factors
from tailrace.terms import ModelError

if TYPE_CHECKING:
    from tailrace.models.bert import EncoderModel

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""The file that knows each `model_type`; only that one is imported."""
ENCODERS = {"bert": "bert", "roberta": "bert", "xlm-roberta": "bert"}
"""The same of encoders, which embed or compare texts and generate none."""


def architecture_of(checkpoint: Checkpoint) -> ModuleType:
    """The file that knows the checkpoint's architecture. Raises ModelError when there is none."""
    kind = checkpoint.config.get("model_type")
    if kind in ENCODERS:
        raise ModelError(
            f"{checkpoint.path}: {kind} models are encoders: they embed or compare texts, and generate none"
        )
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        latent = " (latent attention: kv_lora_rank)" if checkpoint.config.get("kv_lora_rank") else ""
        raise ModelError(
            f"{checkpoint.path}: model_type {kind!r} is not supported{latent}; supported are "
            f"{', '.join((*ARCHITECTURES, *ENCODERS))}"
        )
    return importlib.import_module(f"tailrace.models.{ARCHITECTURES[kind]}")


def is_encoder(checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint's model is one of `ENCODERS`."""
    return checkpoint.config.get("model_type") in ENCODERS


def load_encoder(checkpoint: Checkpoint, pooling: str | None = None) -> EncoderModel:
    """Binds an encoder's weights. `pooling` overrides what the folder says of it. Raises ModelError naming the tensor,
    field or file that is missing, wrong or not supported."""
    from tailrace.models.pooling import read_output

    architecture = importlib.import_module(f"tailrace.models.{ENCODERS[checkpoint.config['model_type']]}")
    model: EncoderModel = architecture.load(checkpoint, read_output(checkpoint.path, checkpoint.config, pooling))
    return model


def model_config(checkpoint: Checkpoint) -> ModelConfig:
    """The shape of the checkpoint's model. Raises ModelError naming the field that is wrong or not supported."""
    fields = Fields(_where(checkpoint), checkpoint.config)
    config: ModelConfig = architecture_of(checkpoint).configure(fields)
    return config


def load_model(checkpoint: Checkpoint, *, max_context: int | None = None) -> Model:
    """Binds the checkpoint's weights to its architecture. `max_context` is the served context in tokens (None: the
    model's own), from which a rope that grows with length takes its base, once. Raises ModelError naming the tensor or
    field that is missing, wrong or not supported."""
    config = model_config(checkpoint)
    architecture = architecture_of(checkpoint)
    binder = Binder(checkpoint)
    embedding = binder.take("model.embed_tokens.weight", config.vocab, config.hidden)
    layers = tuple(architecture.bind(binder, config, index) for index in range(config.layers))
    norm = binder.take("model.norm.weight", config.hidden)
    head = binder.head(config, embedding)
    binder.finish()
    factors = rope_factors(checkpoint.path, checkpoint.tensors, config.head_dim)
    if factors is not None and checkpoint.source_format != "GGUF":
        raise ModelError(f"{checkpoint.path}: tensor rope_freqs.weight belongs in a GGUF file, not here")
    return Model(
        config=config,
        rope=build_rope(config.rope, config.head_dim, max_context or config.max_context, factors),
        embedding=embedding,
        layers=layers,
        norm=norm,
        head=head,
        layer_forward=architecture.layer_forward,
    )


def _where(checkpoint: Checkpoint) -> str:
    if checkpoint.source_format == "GGUF":
        return str(checkpoint.path)
    return str(checkpoint.path / "config.json")
