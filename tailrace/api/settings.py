"""Everything that one replica can be told, with the defaults that a person gets who tells it nothing.

Standard library only: the command line imports this before anything heavy, so that the engine process starts first.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from tailrace.engine.spec import AdapterSpec, EngineSpec
from tailrace.kv.retention import check_policy
from tailrace.terms import InvalidInput

LOOPBACK = ("127.0.0.1", "::1", "localhost")
"""Addresses that only this machine reaches: no key is asked for there unless one is configured."""
MOST_LORAS = 256
"""No server needs more adapters at a time."""
THREADS_PER_CORE = 4
"""More compute threads than this for each core are a mistake."""


@dataclass(frozen=True)
class Limits:
    """What one request may ask for, and what all of them together may hold. Anything past a limit is refused with the
    number it broke."""

    connections: int = 8192
    """Most connections at once, fewer where the system gives fewer descriptors; whoever comes then gets 503."""
    body_bytes: int = 16 << 20
    """Largest request body; more is 413."""
    choices: int = 128
    """Most completions of one request: n times prompts."""
    prompts: int = 128
    """Most prompts of one completions request."""
    messages: int = 4096
    """Most messages of one chat request."""
    stop_strings: int = 16
    """Most stop strings, and most stop token ids."""
    stop_chars: int = 1024
    """Longest stop string, in characters."""
    logprobs: int = 20
    """Most likeliest tokens at a position."""
    logit_bias: int = 1024
    """Most entries of `logit_bias`."""
    tools: int = 128
    """Most tools of one request."""
    tools_bytes: int = 256 << 10
    """Longest JSON of all its tools."""
    tools_depth: int = 32
    """Most levels of nesting of a tool."""
    grammar_bytes: int = 256 << 10
    """Longest JSON schema, regular expression or grammar."""
    grammar_choices: int = 4096
    """Most texts to choose from."""
    inputs: int = 2048
    """Most texts of one embeddings request, most documents of a rerank request, most pairs of a score request."""
    input_tokens: int = 300_000
    """Most tokens of all texts of one such request."""
    in_flight: int = 2048
    """Most engine requests (choices) held at once, whatever their state; more get 429."""
    file_bytes: int = 64 << 20
    """Largest file that is uploaded; more is 413."""
    batch_lines: int = 50_000
    """Most requests of one batch."""
    batches: int = 32
    """Most batches of one tenant that are not done."""
    batch_parallel: int = 8
    """Most requests that run, whosever they are, when another one of a batch begins."""
    bodies_bytes: int = 128 << 20
    """Most bytes of all request bodies of more than 64 KiB that are being read or looked at; more get 503, and so does
    a caller that has half of them and sends another."""


@dataclass(frozen=True)
class Timeouts:
    """Bounds in seconds."""

    request: float = 0.0
    """Longest that a request may take in the engine, queueing included; 0 is no bound. Past it: finish "timeout"."""
    header: float = 30.0
    """Longest that a client may take to send a request's line and headers, and to begin with them once connected."""
    body: float = 30.0
    """Longest that a client may take to send its body."""
    send: float = 30.0
    """Longest that a client may take next to nothing of what waits for it before it is dropped."""
    keep_alive: int = 30
    """Idle time after which a kept-alive connection is closed."""
    drain: float = 60.0
    """Longest that running requests may take after SIGTERM before they are cut off."""
    heartbeat: float = 3.0
    """A heartbeat older than this means a dead engine process."""
    stuck: float = 4.0
    """A step that gives no sign of work for this long means a stuck engine. Where steps' pieces have taken long before,
    four times the longest of them if that is more."""
    hang: float = 30.0
    """No progress for this long while requests are held means a hung engine."""
    start: float = 300.0
    """Longest that the engine may take from its spawn until it is ready."""
    wake: float = 60.0
    """Longest that a request waits for a server that wakes up for it."""
    lora: float = 60.0
    """Longest that reading an adapter may take."""
    sleep_after: float = 0.0
    """Idle time after which the server goes to sleep by itself; 0 is never."""


@dataclass(frozen=True)
class Settings:
    """One replica. `model` is a path (the command line has resolved aliases); everything else has a default."""

    model: str
    """Path of a .gguf file, or of a directory with config.json and safetensors."""
    served_names: tuple[str, ...] = ()
    """Names that clients may ask for; the first is the one answers carry. Empty: the file's or directory's name."""
    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes a free port (the printed URL says which)."""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """Accepted bearer keys, each a prefix-cache tenant of its own. These, or `keys`, are needed when `host` is not
    loopback."""
    admin_keys: tuple[str, ...] = field(default=(), repr=False)
    """Bearer keys for the admin endpoints, and for nothing else."""
    keys: str | None = None
    """File of keys with tenants, scopes, limits and an end (`api.access.store`), followed while the server runs."""
    tls_cert: str | None = None
    """File with the server's certificate (PEM); None serves plain HTTP. SIGHUP reads it and its key again."""
    tls_key: str | None = None
    """File with the certificate's private key (PEM, without a password)."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose web pages may use the API; "*" is any."""

    kv_tokens: int | None = None
    """Tokens of the KV pool; None chooses from the memory that is free (see `engine.process`)."""
    max_context: int | None = None
    """Longest prompt plus output; None is the model's own, at most what the pool holds."""
    step_tokens: int = 512
    """Token budget of one engine step: prefill chunks are cut to it."""
    draft_tokens: int = 7
    """Most tokens of a request that a step computes because they are likely to follow; 0 turns that off."""
    max_running: int = 32
    """Most requests in one step."""
    max_waiting: int = 1024
    """Most requests in the engine's queue; more are refused with 429."""
    threads: int | None = None
    """Compute threads; None is every core."""
    kernels: str | None = None
    """Instruction path ("portable", "avx2", "avx512"...); None is the best that this machine has."""
    kv_dtype: str = "bf16"
    """How keys and values are kept: see `backends.kvdtype.FORMS`."""
    kv_dtype_skip: str = ""
    """Layers that keep them as bf16 all the same, as in "0,1" or "0-3,29"; empty: none."""
    quantize: str | None = None
    """"int8" or "int4": float matrices are rounded to it as they are loaded; None serves weights as they are stored."""
    pooling: str | None = None
    """"mean", "cls" or "last": how a text's rows become its embedding; also turns a model that generates into one that
    embeds. None: as an encoder's folder says."""
    backend: str = "cpu"
    """"cpu" (native) or "reference" (numpy, slow, the oracle)."""
    prefix_cache: bool = True
    kv_policy: str = "lru"
    """Which cached KV page goes first where room is needed: "lru", "lfu", "ttl" or "cost"."""
    kv_ttl: float | None = None
    """Seconds after which the policy "ttl" forgets a page that nobody uses; None with the other policies."""
    kv_tenant_share: float = 1.0
    """Most of the KV pool that one key's cached pages may be."""
    kv_pin: tuple[tuple[int, ...], ...] = ()
    """Token ids of prefixes whose pages are kept for good once computed, for each key."""
    kv_events: str | None = None
    """Address at which KV events are published ("tcp://127.0.0.1:5557"); None publishes none."""
    kv_events_replay: str | None = None
    """Address for requests for events that were missed, and for all that the cache holds."""
    kv_events_key: str | None = None
    """File with the server's key, and those of who may follow KV events. Needed where an address is not loopback."""
    kv_disk: str | None = None
    """Directory where KV pages are kept beyond the pool and this process; None keeps none."""
    kv_disk_bytes: int = 4 << 30
    """Most bytes of it."""
    kv_valkey: str | None = field(default=None, repr=False)
    """URL of a Valkey server in which replicas share KV pages, possibly with a password; None shares none."""
    kv_valkey_ttl: float = 86400.0
    """Seconds after which that server forgets a page; 0 is never."""
    kv_valkey_password_file: str | None = None
    """File with the password for it."""
    kv_key_file: str | None = None
    """File with the key that pages outside the process are authenticated with; None: one in the directory, made at the
    first start. Needed with `kv_valkey`: all replicas have the same."""
    content_store: str | None = field(default=None, repr=False)
    """URL of the database for what callers ask to be stored (`api.content`), possibly with a password; None stores
    nothing."""
    content_retention: float = 30 * 86400.0
    """Seconds after which it is deleted; 0 is never."""
    content_bytes: int = 1 << 30
    """Most bytes of it."""
    ledger: str | None = field(default=None, repr=False)
    """Path or URL of the database in which every request is accounted for (`ledger`); None: in none."""
    ledger_spool: str | None = None
    """Directory where what the ledger lacks waits for it; None: beside its file, or where a user's data lies."""
    ledger_retention: float = 90 * 86400.0
    """Seconds after which a request's row is deleted; its sums stay. 0 is never."""
    ledger_rows: int = 1_000_000
    """Most rows; the oldest go. 0 is no bound."""
    ledger_fingerprints: bool = True
    """Whether rows say which prompts began alike (`ledger.fingerprints`)."""
    slo: str = ""
    """Bounds that every request is judged by, unless its headers have others: "ttft=0.5,tpot=0.05", in seconds."""
    usd_per_hour: float | None = None
    """What the machine costs an hour; None where that is not known."""
    loras: tuple[tuple[str, str], ...] = ()
    """Adapters that are loaded at the start: each one's name, by which requests ask for it, and its directory."""
    lora_dir: str | None = None
    """Directory from below which an operator may have others loaded while the server runs; None: none."""
    max_loras: int = 8
    """Most adapters at a time."""
    cache_dir: str | None = None
    """Root of the model cache, where repacked weights are kept; None is the default one."""
    loader: str = ""
    """Dotted "module:function" that builds the engine core instead of the built-in one: tests and experiments."""

    limits: Limits = field(default_factory=Limits)
    timeouts: Timeouts = field(default_factory=Timeouts)
    log_requests: bool = True
    """One JSON line a request on standard error: its timeline and sizes, never its text."""
    quiet: bool = False
    """Print no start-up report."""
    log_prompts: bool = False
    """The lines have the prompts too, as they were sent to the model."""
    unknown_parameters: str = "refuse"
    """"refuse": a body with a parameter that nobody knows is 400. "warn": it is passed over, and a header names it."""
    chat_template: str | None = None
    """Instead of the model's: a name of `text.templates`, or a file."""
    tool_parser: str = "auto"
    """Format in which the model writes tool calls: "auto" (what its chat template shows), a name of
    `text.answer.formats`, or "none"."""
    reasoning_parser: str = "auto"
    """Likewise for reasoning."""
    wake_on_request: str = "idle"
    """Which sleep a request ends: "idle" (one that began by itself, not an operator's), "always" or "never"."""
    template_args: bool = True
    """Accept `chat_template_kwargs` (values for the model's own template, such as enable_thinking) from clients."""

    @property
    def model_name(self) -> str:
        """The name that answers, metrics and logs carry."""
        if self.served_names:
            return self.served_names[0]
        name = self.model.rstrip("/").rsplit("/", 1)[-1]
        return name.removesuffix(".gguf") or "model"

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that a client may ask for."""
        return self.served_names or (self.model_name,)

    def exposed(self) -> str | None:
        """What whoever starts it should know of its being reached from other machines."""
        if self.host in LOOPBACK or self.tls_cert is not None:
            return None
        return (
            f"{self.host} can be reached from other machines, and keys, prompts and answers cross the network in the "
            "clear: give --tls-cert and --tls-key, or have something before this server that speaks TLS"
        )

    def check(self) -> None:
        """Raises InvalidInput, naming the setting and the remedy, where the settings contradict themselves."""
        self._check_access()
        if not 0 <= self.port <= 65535:
            raise InvalidInput(f"port {self.port} is outside 0..65535", param="port")
        for name in ("step_tokens", "max_running", "max_waiting"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name} must be at least 1, not {getattr(self, name)}", param=name)
        if self.draft_tokens < 0:
            raise InvalidInput(f"draft_tokens cannot be negative ({self.draft_tokens})", param="draft_tokens")
        for name in ("kv_tokens", "max_context", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidInput(f"{name} must be at least 1, not {value}", param=name)
        most = THREADS_PER_CORE * max(4, os.cpu_count() or 1)
        if self.threads is not None and self.threads > most:
            raise InvalidInput(
                f"threads is {self.threads}, this machine has {os.cpu_count()} cores; at most {most} are possible, and "
                "more than one a core is slower",
                param="threads",
            )
        if (self.kv_dtype, self.kv_dtype_skip) != ("bf16", ""):
            from tailrace.backends import kvdtype  # with numpy, which this process does not need

            kvdtype.parse(self.kv_dtype, self.kv_dtype_skip)
        check_policy(self.kv_policy, self.kv_ttl or 0.0)
        if not 0.0 < self.kv_tenant_share <= 1.0:
            raise InvalidInput(
                f"--kv-tenant-share must be above 0 and at most 1, not {self.kv_tenant_share}", param="kv_tenant_share"
            )
        if any(given is not None for given in (self.kv_events, self.kv_events_replay, self.kv_events_key)):
            from tailrace.engine import subscribers

            subscribers.check(self.kv_events, self.kv_events_replay, self.kv_events_key, prefix_cache=self.prefix_cache)
        self._check_tiers()
        self._check_parsers()
        if self.chat_template is not None:
            from tailrace.text import templates

            templates.source_of(self.chat_template)
        self._check_content()
        self._check_adapters()
        self._check_ledger()
        if self.backend not in ("cpu", "reference"):
            raise InvalidInput(f'backend must be "cpu" or "reference", not "{self.backend}"', param="backend")

    def _check_tiers(self) -> None:
        """Raises InvalidInput where those below the KV pool cannot be had so."""
        if self.kv_key_file is not None and self.kv_disk is None and self.kv_valkey is None:
            raise InvalidInput("--kv-key-file is of use only with --kv-disk or --kv-valkey", param="kv_key_file")
        for name, value in (("kv_disk", self.kv_disk), ("kv_valkey", self.kv_valkey)):
            flag = "--" + name.replace("_", "-")
            if value is not None and not value.strip():
                raise InvalidInput(f"{flag} is empty: say where, or leave it out", param=name)
            if value is not None and not self.prefix_cache:
                raise InvalidInput(f"{flag} keeps pages of the prefix cache, which is off", param=name)
            if value is not None and self.kv_policy == "ttl":
                raise InvalidInput(
                    f"--kv-policy ttl promises to forget prompts, and {flag} keeps them: choose one", param="kv_policy"
                )
        if self.kv_disk_bytes < 1:
            raise InvalidInput(f"--kv-disk-bytes must be at least 1, not {self.kv_disk_bytes}", param="kv_disk_bytes")
        if self.kv_disk is None and self.kv_disk_bytes != Settings.kv_disk_bytes:
            raise InvalidInput("--kv-disk-bytes goes with --kv-disk, which is not given", param="kv_disk_bytes")
        if self.kv_valkey is None and self.kv_valkey_ttl != Settings.kv_valkey_ttl:
            raise InvalidInput("--kv-valkey-ttl goes with --kv-valkey, which is not given", param="kv_valkey_ttl")
        if not 0 <= self.kv_valkey_ttl < 1e9:
            raise InvalidInput(
                f"--kv-valkey-ttl is a number of seconds, or 0 for no end, not {self.kv_valkey_ttl}",
                param="kv_valkey_ttl",
            )
        if self.kv_valkey is None:
            if self.kv_valkey_password_file is not None:
                raise InvalidInput(
                    "--kv-valkey-password-file goes with --kv-valkey, which is not given",
                    param="kv_valkey_password_file",
                )
            return
        from tailrace.kv.tiers import valkey

        valkey.check(self.kv_valkey)
        if self.kv_key_file is None:
            raise InvalidInput(
                "--kv-valkey needs --kv-key-file: pages are authenticated with a key that all replicas have. Make one: "
                "head -c 32 /dev/urandom > FILE; chmod 600 FILE",
                param="kv_key_file",
            )

    def _check_adapters(self) -> None:
        if not 1 <= self.max_loras <= MOST_LORAS:
            raise InvalidInput(f"--max-loras must be 1 to {MOST_LORAS}, not {self.max_loras}", param="max_loras")
        if self.max_loras != Settings.max_loras and not self.loras and self.lora_dir is None:
            raise InvalidInput("--max-loras is of use only with --lora or --lora-dir", param="max_loras")
        if len(self.loras) > self.max_loras:
            raise InvalidInput(
                f"{len(self.loras)} adapters are more than --max-loras, {self.max_loras}", param="max_loras"
            )
        if self.loras:
            from tailrace.api.adapters import check_name

            for at, (name, _) in enumerate(self.loras):
                check_name(name, self)
                if name in dict(self.loras[:at]):
                    raise InvalidInput(f"two adapters have the name {name!r}", param="lora")
        if self.lora_dir is None:
            return
        if not os.path.isdir(os.path.expanduser(self.lora_dir)):
            raise InvalidInput(f"--lora-dir {self.lora_dir} is not a directory", param="lora_dir")
        if not self.admin_keys and self.keys is None:
            raise InvalidInput(
                "--lora-dir is for somebody who may load adapters: give --admin-key-file, or --keys with a key that "
                "has the scope admin",
                param="lora_dir",
            )

    def _check_content(self) -> None:
        if self.content_bytes < 1 << 16:
            raise InvalidInput(
                f"--content-bytes must be at least 65536, not {self.content_bytes}", param="content_bytes"
            )
        if not 0 <= self.content_retention < 1e9:
            raise InvalidInput("--content-retention is a time such as 30d, or 0 for no end", param="content_retention")
        if self.content_store is not None:
            from tailrace.api.content import database

            database.check(self.content_store)

    def _check_ledger(self) -> None:
        if self.slo:
            from tailrace.ledger import slo

            slo.parse(self.slo)
        if not 0 <= self.ledger_retention < 1e10:
            raise InvalidInput("--ledger-retention is a time such as 90d, or 0 for no end", param="ledger_retention")
        if self.ledger_rows < 0:
            raise InvalidInput(f"--ledger-rows cannot be negative ({self.ledger_rows})", param="ledger_rows")
        if self.ledger is not None:
            from tailrace.ledger import place

            place.ledger_file(self.ledger)

    def _check_access(self) -> None:
        if self.host not in LOOPBACK and not self.api_keys and self.keys is None:
            raise InvalidInput(
                f"host {self.host} can be reached from other machines, so an API key is needed: give --keys, "
                "--api-key-file, --api-key (or TAILRACE_API_KEY), or stay on 127.0.0.1",
                param="api_keys",
            )
        for name in ("api_keys", "admin_keys"):
            if any(not key or not key.isascii() or key != key.strip() for key in getattr(self, name)):
                raise InvalidInput("an API key must be non-empty ASCII without surrounding blanks", param=name)
        if self.keys is not None:
            self._key_tenants()
        if (self.tls_cert is None) != (self.tls_key is None):
            missing = "tls_key" if self.tls_key is None else "tls_cert"
            raise InvalidInput(
                f"--tls-cert and --tls-key need each other: --{missing.replace('_', '-')} is missing", param=missing
            )
        if self.cors_origins:
            from tailrace.api import cors

            cors.check(self.cors_origins)
        if self.unknown_parameters not in ("refuse", "warn"):
            raise InvalidInput(
                f'unknown_parameters must be "refuse" or "warn", not "{self.unknown_parameters}"',
                param="unknown_parameters",
            )
        if self.wake_on_request not in ("idle", "always", "never"):
            raise InvalidInput(
                f'wake_on_request must be "idle", "always" or "never", not "{self.wake_on_request}"',
                param="wake_on_request",
            )
        if self.timeouts.sleep_after and self.wake_on_request == "never" and not (self.admin_keys or self.keys):
            raise InvalidInput(
                "--sleep-after with --wake-on-request never needs somebody who can wake the server: give "
                "--admin-key-file, or --keys with a key that has the scope admin",
                param="wake_on_request",
            )
        if self.log_prompts and not self.log_requests:
            raise InvalidInput("--log-prompts is of use only with --log-requests", param="log_prompts")
        for name, value in vars(self.limits).items():
            if value < 1:
                raise InvalidInput(f"the limit {name} must be at least 1, not {value}", param="limits")

    def _key_tenants(self) -> int:
        """Tenants of the keys file as it is now. Raises InvalidInput where that is wrong."""
        from pathlib import Path

        from tailrace.api.access import store

        assert self.keys is not None
        keys = store.read(Path(self.keys).expanduser()).keys
        return len({key.tenant or key.digest for key in keys if key.revoked is None and "inference" in key.scopes})

    def _check_parsers(self) -> None:
        if (self.tool_parser, self.reasoning_parser) == ("auto", "auto"):
            return
        from tailrace.text.answer.formats import REASONING_PARSERS, TOOL_PARSERS

        for name, known in (("tool_parser", TOOL_PARSERS), ("reasoning_parser", REASONING_PARSERS)):
            if getattr(self, name) not in known:
                raise InvalidInput(
                    f"--{name.replace('_', '-')} is one of {', '.join(known)}, not {getattr(self, name)}", param=name
                )

    def engine(self) -> EngineSpec:
        """What the engine process needs to know of all this."""
        tenants = len(set(self.api_keys))
        if self.kv_pin and self.keys is not None:  # only pinned prefixes need to know
            tenants += self._key_tenants()
        return EngineSpec(
            model=self.model,
            backend=self.backend,
            kv_tokens=self.kv_tokens,
            max_context=self.max_context,
            step_tokens=self.step_tokens,
            draft_tokens=self.draft_tokens,
            max_running=self.max_running,
            max_waiting=self.max_waiting,
            threads=self.threads,
            kernels=self.kernels,
            kv_dtype=self.kv_dtype,
            kv_dtype_skip=self.kv_dtype_skip,
            quantize=self.quantize,
            pooling=self.pooling,
            prefix_cache=self.prefix_cache,
            kv_policy=self.kv_policy,
            kv_ttl=self.kv_ttl or 0.0,
            kv_tenant_share=self.kv_tenant_share,
            kv_pin=self.kv_pin,
            tenants=max(1, tenants),
            kv_events=self.kv_events,
            kv_events_replay=self.kv_events_replay,
            kv_events_key=self.kv_events_key,
            kv_disk=self.kv_disk,
            kv_disk_bytes=self.kv_disk_bytes,
            kv_valkey=self.kv_valkey,
            kv_valkey_ttl=self.kv_valkey_ttl,
            kv_valkey_password_file=self.kv_valkey_password_file,
            kv_key_file=self.kv_key_file,
            adapters=tuple(
                AdapterSpec(number, name, os.path.abspath(os.path.expanduser(path)))
                for number, (name, path) in enumerate(self.loras, 1)
            ),
            max_loras=self.max_loras,
            lora_seconds=self.timeouts.lora,
            cache_dir=self.cache_dir,
            loader=self.loader,
        )
