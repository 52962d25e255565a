"""Building the core of an engine process from a model: sizes chosen from memory, every phase timed."""

from __future__ import annotations

import logging
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tailrace.backends import PAGE_SIZE, Backend, Pages
from tailrace.backends.groups import PageGroup, affordable_pages, page_groups, pages_for, pool_bytes
from tailrace.backends.kvdtype import Kept, KvDtype, parse
from tailrace.engine.process import Loaded
from tailrace.engine.protocol import Adapted, KvPool
from tailrace.engine.spec import EngineSpec
from tailrace.terms import InvalidInput, ModelError

if TYPE_CHECKING:
    from tailrace.engine.adapters import Adapters
    from tailrace.engine.publisher import Publisher
    from tailrace.engine.transfer import Transfers
    from tailrace.kv.cost import LoadCost
    from tailrace.kv.tiers import Tier
    from tailrace.models.adapters import ReadAdapter
    from tailrace.models.decoder import Model, ModelConfig
    from tailrace.models.hidden import HiddenModel
    from tailrace.text.grammar import Compiler as GrammarCompiler
    from tailrace.text.tokens import TokenBytes

_log = logging.getLogger("tailrace")

POOL_CONTEXTS = 4
"""The default pool holds this many requests of the longest context..."""
POOL_SHARE = 0.25
"""...but takes at most this share of the memory that is free."""


def kv_dtype(spec: EngineSpec, layers: int) -> KvDtype:
    """How the model's layers keep keys and values. Raises InvalidInput or ModelError where `spec` asks for what cannot
    be."""
    made = parse(spec.kv_dtype, spec.kv_dtype_skip)
    made.check(layers)
    if spec.backend != "reference" and Kept.F32 in (made.key, made.value):
        raise ModelError("f32 is for the reference backend: the cpu backend keeps KV in 16 bits or less")
    return made


def pool_sizes(spec: EngineSpec, shape: ModelConfig, free: int) -> tuple[int, int]:
    """(tokens of the pool, served context). Both are multiples of a page or come from the caller; the served context
    never exceeds what one request alone can hold. Sliding groups of layers have pools of their own beside that one
    (`backends.groups`). Raises ModelError where what was asked for cannot be."""
    context = spec.max_context or shape.max_context
    kept, groups = kv_dtype(spec, shape.layers), page_groups(shape.attentions, context)
    token_bytes = kept.token_bytes(range(shape.layers), shape.kv_heads, shape.head_dim)
    if spec.kv_tokens is not None:
        tokens = spec.kv_tokens
    else:
        affordable = affordable_pages(groups, int(free * POOL_SHARE), context, spec.step_tokens, kept) * PAGE_SIZE
        tokens = min(max(context * POOL_CONTEXTS, 2 * spec.step_tokens), affordable)
    tokens = tokens // PAGE_SIZE * PAGE_SIZE
    if tokens < 2 * PAGE_SIZE:
        raise ModelError(
            f"a KV pool of {tokens} tokens is too small to serve anything: at least {2 * PAGE_SIZE} are needed "
            f"({token_bytes} bytes each); raise --kv-tokens or free memory"
        )
    if context > tokens:
        if spec.max_context is not None and spec.kv_tokens is None:
            needed = pool_bytes(groups, pages_for(context), context, spec.step_tokens, kept)
            raise ModelError(
                f"a context of {context} tokens needs {needed >> 20} MiB of KV, more than "
                f"{POOL_SHARE:.0%} of the free memory ({free >> 20} MiB): give --kv-tokens to insist, or a smaller "
                "--max-context"
            )
        context = tokens
    return tokens, context


def check_context(spec: EngineSpec, shape: ModelConfig) -> None:
    """Raises ModelError where more context is asked for than the model's position encoding reaches."""
    asked, most = spec.max_context, shape.extended_context
    if asked is not None and asked > most:
        raise ModelError(
            f"a context of {asked} tokens is more than this model can serve ({most}): give a --max-context of at most "
            f"{most}, or none for its own {shape.max_context}"
        )


def check_pins(spec: EngineSpec, vocab: int) -> None:
    """Raises ModelError where a pinned prefix has a token id that the model does not have."""
    largest = max((max(prefix, default=0) for prefix in spec.kv_pin), default=0)
    if largest >= vocab:
        raise ModelError(
            f"a pinned prefix (--kv-pin) has the token id {largest}, but the model's are 0 .. {vocab - 1}: was the "
            "file made for another model?"
        )


def attention_parity(shape: ModelConfig) -> float:
    """Tokens over which attention takes a layer as many multiply-adds as its products with weights: two for each
    channel of its heads and token before (Q K and P V), against one for each weight."""
    width = shape.heads * shape.head_dim
    weights = shape.hidden * (2 * width + 2 * shape.kv_heads * shape.head_dim + 3 * shape.intermediate)
    return weights / (2 * width)


def cache_root(spec: EngineSpec) -> Path | None:
    """The root of the model cache; None is the default one."""
    return Path(spec.cache_dir) if spec.cache_dir is not None else None


def build_backend(
    spec: EngineSpec,
    model: Model | HiddenModel,
    *,
    pages: Pages,
    context: int,
    vocab: int,
    groups: tuple[PageGroup, ...] | None = None,
) -> Backend:
    """The backend that `spec` names, with a pool for each of the `groups` of layers; `vocab` is the number of ids that
    have a token (the head may have more rows). Raises ModelError where it cannot run here, or not as asked."""
    kept = kv_dtype(spec, len(model.attentions))
    if spec.backend == "reference":
        from tailrace.backends.reference import ReferenceBackend

        return ReferenceBackend(model, pages=pages, kv_dtype=kept, vocab_limit=vocab, groups=groups)
    from tailrace.backends.cpu import CpuBackend
    from tailrace.models.entry import prepared_dir

    return CpuBackend(
        model,
        pages=pages,
        max_context=context,
        step_tokens=spec.step_tokens,
        max_running=spec.max_running,
        threads=spec.threads,
        kernels=spec.kernels,
        kv_dtype=kept,
        cache_dir=prepared_dir(Path(spec.model), cache_root(spec)),
        variant=model.variant,
        vocab_limit=vocab,
        groups=groups,
    )


def as_asked(spec: EngineSpec, model: Model) -> Model:
    """The model with its weights as `spec` wants them. Where it has none to quantise that is a warning, and it serves
    all the same."""
    if spec.quantize is None:
        return model
    from tailrace.backends.cpu.threads import usable_cores
    from tailrace.models.quantise import quantise, unchanged

    made = quantise(model, spec.quantize, threads=spec.threads or usable_cores())
    if not made.variant:
        _log.warning("tailrace: %s", unchanged(spec.quantize, spec.model))
    return made


def identity(spec: EngineSpec, backend: Backend, context: int, variant: str = "") -> bytes:
    """What a cached page's numbers depend on besides its tokens: the model's files, what was done to its weights since
    they were read (`Model.variant`), and how they are computed with. Where pages outlive the process, the very build
    counts too; where other machines use them, what is in the files, and not where they lie."""
    from tailrace.models.entry import prepared_dir

    if spec.kv_valkey is not None:
        from tailrace.models.prepared import content_digest

        files = content_digest(Path(spec.model), root=cache_root(spec))
    else:
        files = prepared_dir(Path(spec.model), cache_root(spec)).name
    kept = parse(spec.kv_dtype, spec.kv_dtype_skip).name
    outlives = spec.kv_disk is not None or spec.kv_valkey is not None
    computed = backend.numerics if outlives else backend.kernels
    return f"{files} {variant or 'stored'} {backend.name} {computed} {kept} {context}".encode()


def open_transfers(spec: EngineSpec, backend: Backend, cost: LoadCost | None = None) -> Transfers | None:
    """What moves pages between the pool and the tiers below it, where `spec` names any. `cost` says when loading is
    quicker than computing; without one, what was measured does. Raises InvalidInput where a tier cannot be used; a
    server that is not there is no such thing."""
    tiers: list[Tier] = []
    key_file = Path(spec.kv_key_file).expanduser() if spec.kv_key_file else None
    numerics, page_bytes = backend.numerics, backend.page_bytes
    if spec.kv_disk is not None:
        from tailrace.kv.tiers.disk import DiskTier

        disk = DiskTier(
            Path(spec.kv_disk).expanduser(),
            spec.kv_disk_bytes,
            numerics=numerics,
            page_bytes=page_bytes,
            page_tokens=PAGE_SIZE,
            key_file=key_file,
        )
        _tell_if_only_read(Path(spec.kv_disk).expanduser())
        tiers.append(disk)
    if spec.kv_valkey is not None:
        from tailrace.kv.tiers.seal import Seal, read_secret
        from tailrace.kv.tiers.valkey import ValkeyTier, read_password

        if key_file is None:
            raise InvalidInput("pages in Valkey need a key that all replicas have", param="kv_key_file")
        seal = Seal(read_secret(key_file), numerics=numerics, page_bytes=page_bytes, page_tokens=PAGE_SIZE)
        password = read_password(spec.kv_valkey_password_file)
        tiers.append(ValkeyTier(spec.kv_valkey, seal, ttl=spec.kv_valkey_ttl, password=password))
    if not tiers:
        return None
    from tailrace.engine.transfer import Transfers

    return Transfers(tiers, backend, cost=cost)


def _tell_if_only_read(directory: Path) -> None:
    """One line in the log where nothing can be written there: pages are found all the same, which may be what is
    wanted, and stored by nobody, which seldom is."""
    import tempfile

    try:
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        print(
            f"tailrace: {directory} cannot be written ({error.strerror or error}): KV pages are read from it, and none "
            "are stored",
            file=sys.stderr,
            flush=True,
        )


def open_publisher(spec: EngineSpec) -> Publisher | None:
    """What publishes KV events, where `spec` asks for it, already bound. InvalidInput, ModelError where that fails."""
    if spec.kv_events is None:
        return None
    from tailrace.engine import subscribers
    from tailrace.engine.publisher import Publisher

    keys = subscribers.read_keys(spec.kv_events_key) if spec.kv_events_key is not None else None
    return Publisher(spec.kv_events, spec.kv_events_replay, keys)


def open_compiler(spec: EngineSpec, table: TokenBytes, vocab: int) -> GrammarCompiler:
    """What compiles grammars over the model's vocabulary; loads its tokenizer, which nothing else here needs. Raises
    ModelError."""
    from tailrace.engine.assets import open_text
    from tailrace.text.grammar import Compiler
    from tailrace.text.tokenizer import load_text

    assets, rows, _, _ = open_text(Path(spec.model), cache_root(spec))
    text = load_text(assets, vocab=rows, token_bytes=table)
    return Compiler(table, vocab=vocab, eos_ids=text.eos_ids, encode=text.encode_inside)


def open_adapters(spec: EngineSpec, backend: Backend, model: Model) -> tuple[Adapters, list[Adapted]]:
    """What holds the model's adapters, with those of `spec` loaded, and what has become of each. Raises ModelError for
    one that cannot be loaded and is wanted."""
    from tailrace.engine.adapters import Adapters

    def read(folder: Path) -> ReadAdapter:
        from tailrace.models.adapters import read_adapter

        return read_adapter(folder, model)

    adapters = Adapters(backend, read, spec.max_loras, seconds=spec.lora_seconds)
    told = adapters.load_now(spec.adapters)
    for news in told:
        if news.error and spec.adapters_wanted:
            raise ModelError(f"an adapter (--lora) cannot be served: {news.error}")
    return adapters, told


def load(spec: EngineSpec) -> Loaded:
    """The built-in loader. Raises ModelError where the model cannot be served as asked."""
    phases: dict[str, float] = {}
    last = time.monotonic()

    def lap(name: str) -> None:
        nonlocal last
        now = time.monotonic()
        phases[name] = now - last
        last = now

    from tailrace.engine.assets import open_model
    from tailrace.engine.config import EngineConfig
    from tailrace.engine.constrain import Grammars
    from tailrace.engine.core import EngineCore
    from tailrace.models.load import is_encoder, load_model, model_config

    lap("imports")
    publisher = open_publisher(spec)  # before the model: what is refused is refused at once
    opened = open_model(Path(spec.model), cache_root(spec), tokenizer=False)
    checkpoint = opened.checkpoint
    lap("open")
    if spec.pooling is not None or is_encoder(checkpoint):
        from tailrace.engine import encoder_loading

        return encoder_loading.load(spec, opened, phases, lap)
    shape = model_config(checkpoint)
    kept = kv_dtype(spec, shape.layers)
    check_context(spec, shape)
    from tailrace.backends.cpu.memory import available_memory

    kv_tokens, context = pool_sizes(spec, shape, available_memory())
    groups = page_groups(shape.attentions, context)
    config = EngineConfig(
        kv_tokens=kv_tokens,
        max_context=context,
        step_tokens=spec.step_tokens,
        draft_tokens=spec.draft_tokens,
        max_running=spec.max_running,
        max_waiting=spec.max_waiting,
        prefix_cache=spec.prefix_cache,
        kv_policy=spec.kv_policy,
        kv_ttl=spec.kv_ttl,
        attention_parity=attention_parity(shape),
        kv_tenant_share=spec.kv_tenant_share,
        kv_pin=spec.kv_pin,
        tenants=spec.tenants,
        windows=tuple(group.window for group in groups if group.window is not None),
    )
    model = as_asked(spec, load_model(checkpoint, max_context=context))
    vocab = min(len(opened.table), model.vocab)
    check_pins(spec, vocab)
    lap("model")
    pages = (config.pages, *config.sliding_pages)
    backend = build_backend(spec, model, pages=pages, groups=groups, context=context, vocab=vocab)
    lap("backend")
    adapters, adapted = open_adapters(spec, backend, model)
    if adapted:
        lap("adapters")
    core = EngineCore(
        backend,
        config,
        eos_ids=checkpoint.text.eos_ids,
        vocab_size=vocab,
        token_bytes=opened.table,
        identity=identity(spec, backend, context, model.variant),
        publisher=publisher,
        transfers=open_transfers(spec, backend),
        grammars=Grammars(partial(open_compiler, spec, opened.table, vocab)),
        adapters=adapters,
    )
    lap("core")
    return Loaded(
        core=core,
        max_context=config.max_context,
        kv_tokens=config.kv_tokens,
        page_size=PAGE_SIZE,
        kernels=backend.kernels,
        threads=getattr(backend, "threads", spec.threads or os.cpu_count() or 1),
        weight_bytes=backend.weight_bytes,
        kv_bytes=backend.kv_bytes,
        warm_tokens=(max(0, min(256, vocab - 64)), min(64, vocab)),
        phases=phases,
        kv_pools=tuple(
            KvPool(group.window or 0, count, count * group.page_bytes(kept))
            for group, count in zip(groups, pages, strict=True)
        ),
        adapters=tuple(adapted),
        parity=config.attention_parity,
    )
