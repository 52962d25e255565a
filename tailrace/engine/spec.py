"""What an engine process is told at its start. Standard library only, since it is built before anything else loads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AdapterSpec:
    """An adapter that is to be loaded. `id` is never another's as long as the server runs."""

    id: int
    name: str
    path: str


@dataclass(frozen=True)
class EngineSpec:
    """Crosses to the process as its first message (JSON); holds no secrets but those of a URL. None means "choose" (see
    `process`)."""

    model: str
    backend: str = "cpu"
    kv_tokens: int | None = None
    max_context: int | None = None
    step_tokens: int = 512
    draft_tokens: int = 7
    max_running: int = 32
    max_waiting: int = 1024
    threads: int | None = None
    kernels: str | None = None
    kv_dtype: str = "bf16"
    kv_dtype_skip: str = ""
    quantize: str | None = None
    pooling: str | None = None  # embeddings of this kind, also of a model that could generate
    prefix_cache: bool = True
    kv_policy: str = "lru"
    kv_ttl: float = 0.0
    kv_tenant_share: float = 1.0
    kv_pin: tuple[tuple[int, ...], ...] = ()
    tenants: int = 1
    kv_events: str | None = None
    kv_events_replay: str | None = None
    kv_events_key: str | None = None  # the file
    kv_disk: str | None = None
    kv_disk_bytes: int = 4 << 30
    kv_valkey: str | None = None
    kv_valkey_ttl: float = 86400.0
    kv_valkey_password_file: str | None = None
    kv_key_file: str | None = None
    adapters: tuple[AdapterSpec, ...] = ()
    adapters_wanted: bool = True  # it does not start without all of them
    max_loras: int = 8
    lora_seconds: float = 60.0  # longest that reading one may take
    cache_dir: str | None = None
    loader: str = ""
    warm_up: bool = True
