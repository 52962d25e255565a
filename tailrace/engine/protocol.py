"""All that ever crosses between the API process and the engine process (msgspec msgpack; see `wire`).

API to engine: `Submit`, `Encode`, `Abort`, `Control`, `LoadAdapter`, `UnloadAdapter`. Engine to API: `Ready`,
`Tokens`, `Heartbeat`, `Spans`, `Adapted`, `Fatal`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from tailrace.engine.spec import AdapterSpec
from tailrace.terms import Event
from tailrace.text.grammar import Grammar

FinishReason = Literal["stop", "length", "abort", "error", "timeout"]
Task = Literal["generate", "embed", "rank"]
"""What an engine's model does: goes on from prompts, embeds texts, or scores pairs of texts."""


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a request's tokens are chosen. Every value has been checked by `api`; `engine` trusts it.

    Order of application: the grammar's mask; repetition, presence and frequency penalties; logit bias; temperature;
    then the filters min-p, top-k, top-p; then a Gumbel-max draw whose noise depends on (seed, position, token) alone.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int = 0  # always set: api draws one where the caller gave none
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    continues: bool = False  # the text goes on from the prompt's, so that a space with which it begins is part of it
    include_stop: bool = False  # keep the stop string in the text
    shown: tuple[int, ...] = ()  # control tokens that are part of the text: tags of tool calls and reasoning
    logprobs: int = -1  # -1: none; 0: of the chosen token; n: of the n likeliest too
    prompt_logprobs: int = -1  # the same for the prompt's tokens (completions' echo)
    grammar: Grammar | None = None  # what the text must match; it ends (finish "stop") when nothing can follow
    predicted: list[int] = []  # what the caller expects to be drawn: a guess, which changes no token

    @property
    def penalised(self) -> bool:
        """Whether a token's distribution depends on how often tokens have been seen."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def guessable(self) -> bool:
        """Whether a token's distribution depends on nothing but the tokens before it and its position."""
        return self.grammar is None and self.min_tokens == 0 and not self.penalised


class Submit(msgspec.Struct, frozen=True, tag=True):
    """A request, checked and tokenized. `request` is unique for ever; `tenant` salts the prefix cache."""

    request: str
    prompt: list[int]
    params: SamplingParams
    tenant: str = ""
    priority: int = 0  # lower goes first
    deadline: float = 0.0  # monotonic seconds; 0 is none
    adapter: int = 0  # the id of its adapter; 0 is none


class Encode(msgspec.Struct, frozen=True, tag=True):
    """Texts to be read, checked and tokenized; each gives a row of numbers. `tokens` are the texts' ids one after the
    other, int32 in the machine's order; `second` says of each text where the second of a pair begins (empty: no pairs,
    or a model that does not tell them apart)."""

    request: str
    tokens: bytes
    lengths: list[int]
    second: list[int] = []
    tenant: str = ""
    priority: int = 0  # lower goes first
    deadline: float = 0.0  # monotonic seconds; 0 is none


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Its client has left: free what it holds. Unknown or finished ids are ignored."""

    requests: list[str]


class Control(msgspec.Struct, frozen=True, tag=True):
    """Administration. `drain`: finish what is held and take no more; `stop`: end now; `reset_prefix`: forget all
    cached prefixes that no request holds; `sleep`: store what tiers below the pool do not have yet, and end;
    `log_level`: of this process's own log; `profile`: send `Spans` until `profile_end`, or for so many `steps` (0: no
    bound)."""

    verb: Literal["drain", "stop", "reset_prefix", "sleep", "log_level", "profile", "profile_end"]
    level: str = ""  # debug, info, warning or error
    steps: int = 0


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Read this adapter, beside the steps; `Adapted` answers. Requests may have it from then on."""

    adapter: AdapterSpec


class UnloadAdapter(msgspec.Struct, frozen=True, tag=True):
    """No later request has it. Its memory is free when those before have ended. Unknown ids are ignored."""

    adapter: int


class Adapted(msgspec.Struct, frozen=True, tag=True):
    """What has become of an adapter that was to be loaded: the SHA-256 of its files, its largest rank and its bytes in
    memory, or `error`."""

    id: int
    digest: str = ""
    rank: int = 0
    bytes: int = 0
    error: str = ""


class KvPool(msgspec.Struct, frozen=True, array_like=True):
    """The pool of one group of layers: its window (0 is full attention), its pages, and their bytes."""

    window: int
    pages: int
    bytes: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine has loaded and warmed up both phases. Seconds of each start-up phase, and the sizes it serves."""

    phases: dict[str, float]
    max_context: int
    kv_tokens: int
    page_size: int
    max_running: int
    max_waiting: int
    step_tokens: int
    kernels: str
    threads: int
    weight_bytes: int
    kv_bytes: int
    kv_pools: list[KvPool] = []
    task: Task = "generate"
    width: int = 0  # numbers that a text gives, where it generates nothing
    dimensions: list[int] = []  # prefixes of an embedding that are embeddings too, besides all of it
    unit: bool = False  # embeddings have length one
    sigmoid: bool = False  # scores are to be turned into 0..1
    adapters: list[Adapted] = []  # what has become of the spec's
    parity: float = 0.0  # tokens of context at which attention to them is as much work as the rest; 0: not known


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probability of a token, and of the likeliest ones at its position (most likely first)."""

    token: int
    logprob: float
    top: list[tuple[int, float]] = []


class Output(msgspec.Struct, frozen=True, array_like=True):
    """What one step gave one request."""

    request: str
    tokens: list[int] = []
    logprobs: list[TokenLogprob] = []
    finish: FinishReason | None = None
    stop: str | int | None = None  # the stop string or id that matched
    cached: int = 0  # prompt tokens taken from the prefix cache; set with the first token and with finish
    prompt_logprobs: list[TokenLogprob | None] = []  # once, with the first token, when asked for
    error: str = ""  # with finish "error": a code, a colon, and what was wrong
    predicted: tuple[int, int] = (0, 0)  # with finish: tokens of the prediction that were tried: accepted, and rejected
    vectors: bytes = b""  # with finish "stop" of an `Encode`: float32 [texts, width], in the machine's order


class TierGauges(msgspec.Struct, frozen=True, array_like=True):
    """A tier below the pool. The first four and `up` are its state now, the rest counts from the engine's start. Counts
    are of pages, but for `hits` (prompt tokens), `loads` and `declined` (loads), and of lookups."""

    pages: int = 0
    bytes: int = 0
    writable: bool = True
    queued: int = 0  # wait to be stored
    hits: int = 0
    loaded: int = 0
    stored: int = 0
    evicted: int = 0
    dropped: int = 0  # not stored: the queue was full
    declined: int = 0  # not loaded: computing was expected to be quicker
    loads: int = 0
    load_seconds: float = 0.0
    predicted_seconds: float = 0.0
    misses: dict[str, int] = {}  # by cause
    page_bytes: int = 0  # of a page's content
    computing_seconds: float = 0.0  # that what was loaded should have taken to compute
    requeued: int = 0  # loaded while they still waited to be stored
    up: bool = True  # it answers
    refused: int = 0  # not stored: it did not take them
    lookups: int = 0
    lookup_seconds: float = 0.0
    late_lookups: int = 0  # for which a request has waited in vain


class WindowGauges(msgspec.Struct, frozen=True, array_like=True):
    """The pool of a sliding group of layers, as `Gauges` has that of full attention."""

    window: int
    pages: int
    used_pages: int
    cached_pages: int
    pinned_pages: int


class Gauges(msgspec.Struct, frozen=True, array_like=True):
    """State of the scheduler after a step. `cached_pages` are held by the prefix index alone (evictable),
    `pinned_pages` are kept for good; `used_pages` are the rest of those that are not free."""

    running: int = 0
    waiting: int = 0
    pages: int = 0
    used_pages: int = 0
    cached_pages: int = 0
    prefix_queries: int = 0  # prompt tokens looked up, ever
    prefix_hits: int = 0  # prompt tokens found, ever
    preemptions: int = 0
    steps: int = 0
    pinned_pages: int = 0
    evictions: list[int] = []  # pages forgotten, ever, by cause (`kv.prefix.CAUSES`)
    kv_batches: int = 0  # batches of KV events published, ever
    kv_batches_dropped: int = 0  # and dropped, for lack of room
    tiers: dict[str, TierGauges] = {}  # below the pool, nearest first
    resumed: list[int] = []  # tokens of preempted requests, ever: found in the pool, loaded from tiers, computed again
    windows: list[WindowGauges] = []
    adapters: dict[int, tuple[int, int]] = {}  # requests that run and that wait, by the id of their adapter
    drafts: list[int] = []  # ever: drafts of tokens that were likely to follow, their tokens, and those that did


class Tokens(msgspec.Struct, frozen=True, tag=True):
    """The whole batch's news, one message a step."""

    outputs: list[Output]
    events: list[Event]
    gauges: Gauges


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Sent at least once a second, also when idle, by a thread beside the one that works.

    `progress` grows with every token computed: a request that is held while progress stands still means a hung engine.
    `work` grows within a step (`Backend.work`; -1: it cannot be told), `turns` with every turn of the loop between
    steps, and `busy` says that the loop is not waiting for news: one that is busy, and has added to none of the three
    since the last heartbeat, is in the midst of something that takes long, or will not end."""

    at: float
    progress: int
    gauges: Gauges
    work: int = -1
    turns: int = 0
    busy: bool = False


class Span(msgspec.Struct, frozen=True, array_like=True):
    """What was done from `begin` to `end` (monotonic seconds). `track` is "steps" (what the backend did) or "loop"
    (what the engine's thread did, one within the other); `facts` are counts, or seconds by kind of operation
    (`kernel_...`)."""

    track: str
    name: str
    begin: float
    end: float
    facts: dict[str, float] = {}


class Spans(msgspec.Struct, frozen=True, tag=True):
    """A piece of a profile, in the order in which things ended. `done`: the last piece; `cut`: it got too long."""

    spans: list[Span]
    done: bool = False
    cut: bool = False


class Fatal(msgspec.Struct, frozen=True, tag=True):
    """The engine is about to end because of this. `invalid`: what it was told to do cannot be (InvalidInput)."""

    error: str
    invalid: bool = False


ToEngine = Submit | Encode | Abort | Control | LoadAdapter | UnloadAdapter
FromEngine = Ready | Tokens | Heartbeat | Spans | Adapted | Fatal
