"""Building the core of an engine that embeds or scores texts: of an encoder, or of a decoder whose rows are pooled."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from tailrace.backends import PAGE_SIZE
from tailrace.backends.encoding import EncoderBackend
from tailrace.engine.encoder import EncoderCore
from tailrace.engine.process import Loaded
from tailrace.engine.spec import EngineSpec
from tailrace.terms import InvalidInput, ModelError

if TYPE_CHECKING:
    from tailrace.engine.assets import Opened
    from tailrace.models.bert import EncoderModel

KV_SETTINGS = ("kv_tokens", "kv_pin", "kv_events", "kv_disk", "kv_valkey")
"""Of no use where nothing is generated."""
DEFAULT_CONTEXT = 8192
"""Most tokens of a text that a decoder reads, unless more is asked for: pages for one are kept."""

Lap = Callable[[str], None]


def check(spec: EngineSpec) -> None:
    """Raises InvalidInput where the settings ask for what only models that generate have."""
    plain = EngineSpec(spec.model)
    for name in KV_SETTINGS:
        if getattr(spec, name) != getattr(plain, name):
            raise InvalidInput(
                f"--{name.replace('_', '-')} is about the KV cache, which a server for embeddings does not have",
                param=name,
            )
    if spec.adapters:
        raise InvalidInput("--lora is for models that generate, which a server for embeddings does not", param="lora")


def load(spec: EngineSpec, opened: Opened, phases: dict[str, float], lap: Lap) -> Loaded:
    """The core of an opened checkpoint. Raises InvalidInput or ModelError where it cannot be served as asked."""
    from tailrace.models.load import is_encoder

    check(spec)
    return (_encoder if is_encoder(opened.checkpoint) else _decoder)(spec, opened, phases, lap)


def _encoder(spec: EngineSpec, opened: Opened, phases: dict[str, float], lap: Lap) -> Loaded:
    from tailrace.models.load import load_encoder

    if spec.quantize is not None:
        raise InvalidInput("--quantize is for models that generate, not for encoders", param="quantize")
    model = load_encoder(opened.checkpoint, spec.pooling)
    config = model.config
    if config.labels > 1:
        raise ModelError(f"{spec.model}: the classifier has {config.labels} labels; one that ranks texts has one")
    if config.labels and spec.pooling is not None:
        raise InvalidInput("--pooling is for embeddings; this model scores pairs of texts", param="pooling")
    positions = config.positions - config.first
    if spec.max_context is not None and spec.max_context > positions:
        raise ModelError(
            f"texts of {spec.max_context} tokens are more than this model can read ({positions}): give a --max-context "
            "of at most that"
        )
    if spec.max_context is not None:
        output = dataclasses.replace(config.output, longest=spec.max_context)
        config = dataclasses.replace(config, output=output)
        model = dataclasses.replace(model, config=config)
    lap("model")
    backend = encoder_backend(spec, model)
    lap("backend")
    core = EncoderCore(
        backend,
        vocab=min(len(opened.table), model.vocab),
        kinds=model.kinds,
        longest=model.longest,
        step_tokens=spec.step_tokens,
        max_waiting=spec.max_waiting,
    )
    loaded = _loaded(core, backend, model.longest, model.vocab, phases)
    return dataclasses.replace(
        loaded,
        task="rank" if config.labels else "embed",
        dimensions=() if config.labels else config.output.dimensions,
        unit=config.output.unit,
        sigmoid=config.sigmoid,
    )


def encoder_backend(spec: EngineSpec, model: EncoderModel) -> EncoderBackend:
    """The backend that `spec` names."""
    if spec.backend == "reference":
        from tailrace.backends.reference.encoder import ReferenceEncoder

        return ReferenceEncoder(model)
    from tailrace.backends.cpu.encoder import CpuEncoder

    return CpuEncoder(model, threads=spec.threads, kernels=spec.kernels)


def _decoder(spec: EngineSpec, opened: Opened, phases: dict[str, float], lap: Lap) -> Loaded:
    from tailrace.backends.groups import page_groups
    from tailrace.backends.pooled import PooledDecoder
    from tailrace.engine.loading import as_asked, build_backend, check_context
    from tailrace.models.hidden import HiddenModel
    from tailrace.models.load import load_model, model_config
    from tailrace.models.pooling import read_output

    checkpoint = opened.checkpoint
    shape = model_config(checkpoint)
    check_context(spec, shape)
    if shape.window is not None:
        raise ModelError(f"{spec.model}: models whose layers have windows cannot be pooled")
    longest = spec.max_context or min(shape.max_context, DEFAULT_CONTEXT)
    output = read_output(checkpoint.path, checkpoint.config, spec.pooling)
    model = as_asked(spec, load_model(checkpoint, max_context=longest))
    lap("model")
    pages = max(-(-longest // PAGE_SIZE), -(-spec.step_tokens // PAGE_SIZE) + spec.max_running)
    decoder = build_backend(
        spec,
        HiddenModel(model),
        pages=pages,
        context=longest,
        vocab=model.hidden,
        groups=page_groups(shape.attentions, longest),
    )
    vocab = min(len(opened.table), model.vocab)
    backend = PooledDecoder(
        decoder,
        width=model.hidden,
        vocab=vocab,
        longest=longest,
        pooling=output.pooling,
        unit=output.unit,
        step_tokens=spec.step_tokens,
        max_running=spec.max_running,
        threads=getattr(decoder, "threads", 1),
    )
    lap("backend")
    core = EncoderCore(
        backend,
        vocab=vocab,
        kinds=1,
        longest=longest,
        step_tokens=spec.step_tokens,
        max_waiting=spec.max_waiting,
    )
    loaded = _loaded(core, backend, longest, vocab, phases)
    return dataclasses.replace(loaded, dimensions=output.dimensions, unit=output.unit, kv_bytes=decoder.kv_bytes)


def _loaded(core: EncoderCore, backend: EncoderBackend, longest: int, vocab: int, phases: dict[str, float]) -> Loaded:
    return Loaded(
        core=core,
        max_context=longest,
        kv_tokens=0,
        page_size=PAGE_SIZE,
        kernels=backend.kernels,
        threads=backend.threads,
        weight_bytes=backend.weight_bytes,
        kv_bytes=0,
        warm_tokens=(0, min(64, vocab)),
        phases=phases,
        task="embed",
        width=backend.width,
    )
