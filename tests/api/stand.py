"""A stand-in model for tests of the server: an engine core over the fake backend, and a text of bytes.

What it says can be told: a prompt whose payload ends with the SAY token is repeated token by token, then comes EOS; any
other prompt gets the fake backend's hash. Some tokens make the engine misbehave.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tailrace.backends import PAGE_SIZE, Batch, Result, Sampling
from tailrace.engine.config import EngineConfig
from tailrace.engine.constrain import Grammars
from tailrace.engine.core import EngineCore
from tailrace.engine.loading import open_publisher, open_transfers
from tailrace.engine.process import Loaded
from tailrace.engine.spec import EngineSpec
from tailrace.kv.cost import LoadCost
from tailrace.terms import InvalidInput, ModelError
from tailrace.text import Text, TokenBytes
from tailrace.text.answer.formats import LAYOUTS, TOOL_FORMATS, Layout, ToolFormat
from tailrace.text.grammar import Compiler
from tailrace.text.infill import Infill
from tests.fakes import Eager, FakeBackend

BOS, EOS, ROLE, SAY, HANG, CRASH, RAISE = range(7)
SPECIALS = ("<bos>", "<eos>", "<role>", "<say>", "<hang>", "<crash>", "<raise>")
TAG, TAG_SIGN = 7, "\ue007"
"""A control token that begins tool calls, and what users write to have it said."""
FIRST_BYTE = 8
VOCAB = 512
PADDED = 500
"""Ids from here on are rows of the model without a token."""
CLOSE = PADDED - 1
"""The token that ends reasoning."""


class Parrot(FakeBackend):
    """The fake backend, with a voice of its own where it is told what to say, and `pause` seconds a step."""

    pause = 0.0

    def run(self, batch: Batch) -> Result:
        if self.pause:
            time.sleep(self.pause)
        tokens = set(batch.tokens.tolist())
        if CRASH in tokens:
            os._exit(3)
        if HANG in tokens:
            time.sleep(3600)
        if RAISE in tokens:
            raise RuntimeError("the backend was told to raise")
        return super().run(batch)

    def _draw(self, sampling: Sampling, row: int, sequence: bytes, position: int) -> int:
        tokens = np.frombuffer(sequence, np.int32).tolist()
        start, stop = int(sampling.bias_start[row]), int(sampling.bias_start[row + 1])
        if SAY not in tokens or stop > start:
            token = super()._draw(sampling, row, sequence, position)
            free = sampling.masks is None or sampling.masks.row[row] < 0
            return token if not free or FIRST_BYTE <= token < PADDED else FIRST_BYTE + token % 256
        said = tokens.index(SAY)
        allowed = allowed_tokens(sampling, row)
        payload = tokens[max((at for at in range(said) if tokens[at] == ROLE), default=-1) + 1 : said]
        at = len(tokens) - said - 1
        token = payload[at] if at < len(payload) else EOS
        return token if allowed is None or token in allowed else super()._draw(sampling, row, sequence, position)


def allowed_tokens(sampling: Sampling, row: int) -> set[int] | None:
    """What the row's mask lets it draw; None where it has none."""
    masks = sampling.masks
    if masks is None or masks.row[row] < 0:
        return None
    bits = masks.bits[masks.row[row]]
    return {token for token in range(32 * len(bits)) if bits[token // 32] >> np.uint32(token % 32) & 1}


class Slow(Parrot):
    """20 ms a step, of one token a request: no drafts."""

    pause = 0.02


def table() -> TokenBytes:
    """Specials, the 256 bytes, and a few words."""
    spelled = [name.encode() for name in SPECIALS] + [b"[TOOL_CALLS]"]
    spelled += [bytes([value]) for value in range(256)]
    spelled += [f" w{index}".encode() for index in range(CLOSE - len(spelled))]
    spelled.append(b"</think>")
    return TokenBytes.build(spelled, range(FIRST_BYTE))


def compiler() -> Compiler:
    """Compiles grammars over the stand-in's vocabulary."""
    return Compiler(table(), vocab=PADDED, eos_ids=(EOS,), encode=StandText().encode_inside)


def build(spec: EngineSpec, kind: type[Parrot], cost: LoadCost | None = None) -> Loaded:
    kv_tokens = spec.kv_tokens or 8192
    backend = kind(kv_tokens // PAGE_SIZE, VOCAB)
    config = EngineConfig(
        kv_tokens=kv_tokens,
        max_context=spec.max_context or 2048,
        step_tokens=spec.step_tokens,
        draft_tokens=0 if kind.pause else spec.draft_tokens,
        max_running=spec.max_running,
        max_waiting=spec.max_waiting,
        prefix_cache=spec.prefix_cache,
        kv_policy=spec.kv_policy,
        kv_ttl=spec.kv_ttl,
        kv_tenant_share=spec.kv_tenant_share,
        kv_pin=spec.kv_pin,
        tenants=spec.tenants,
    )
    core = EngineCore(
        backend,
        config,
        eos_ids=(EOS,),
        vocab_size=PADDED,
        token_bytes=table(),
        identity=b"stand",
        publisher=open_publisher(spec),
        transfers=open_transfers(spec, backend, cost),
        grammars=Grammars(compiler),
    )
    return Loaded(
        core=core,
        max_context=config.max_context,
        kv_tokens=config.kv_tokens,
        page_size=PAGE_SIZE,
        kernels="python",
        threads=1,
        weight_bytes=0,
        kv_bytes=0,
        warm_tokens=(FIRST_BYTE, 64),
        phases={"build": 0.0},
    )


def load(spec: EngineSpec) -> Loaded:
    """A quick engine."""
    return build(spec, Parrot)


def load_slow(spec: EngineSpec) -> Loaded:
    """A slow one, so that tests can act while it works."""
    return build(spec, Slow)


def load_eager(spec: EngineSpec) -> Loaded:
    """One that loads from the tiers below the pool all that is there."""
    return build(spec, Parrot, Eager())


def load_late(spec: EngineSpec) -> Loaded:
    """One that takes its time to load."""
    time.sleep(1.5)
    return build(spec, Parrot)


def load_nothing(spec: EngineSpec) -> Loaded:
    """An engine that cannot start."""
    raise ModelError("this model is not a model")


def load_wrongly(spec: EngineSpec) -> Loaded:
    """One that cannot do what it is told."""
    raise InvalidInput("nobody can do that")


def load_and_die(spec: EngineSpec) -> Loaded:
    """One that ends without a word."""
    os._exit(3)


class StandText:
    """Bytes to ids and back; a chat is the tools, ROLE and content for each message, then SAY and what the template
    says of reasoning (the model goes on from there)."""

    vocab_size = PADDED
    eos_ids = (EOS,)
    supports_tools = True
    short_call_ids = False
    tool_format = TOOL_FORMATS["hermes"]
    reasoning_format = None
    template_variables = frozenset({"enable_thinking"})
    reasoning_opened = Text.reasoning_opened

    def __init__(self, *, broken_template: bool = False, infill: bool = False) -> None:
        self.infill = Infill(ROLE, ROLE, SAY) if infill else None
        self._table = table()
        self._broken_template = broken_template

    def encode(self, text: str, *, add_bos: bool = True, parse_special: bool = False) -> list[int]:
        ids = [BOS] if add_bos else []
        text = text.removeprefix("<bos>") if add_bos else text
        for part in re.split("(" + "|".join(SPECIALS) + ")", text) if parse_special else [text]:
            if parse_special and part in SPECIALS:
                ids.append(SPECIALS.index(part))
            else:
                for at, piece in enumerate(part.split(TAG_SIGN)):
                    ids += [TAG] if at else []
                    ids += [FIRST_BYTE + value for value in piece.encode()]
        return ids

    def control_tags(self, texts: Sequence[str]) -> dict[str, int]:
        return {"[TOOL_CALLS]": TAG} if "[TOOL_CALLS]" in texts else {}

    def tag_id(self, text: str) -> int | None:
        return {"[TOOL_CALLS]": TAG, "</think>": CLOSE}.get(text)

    def tool_layout(self, form: ToolFormat) -> Layout:
        return LAYOUTS[form.name]

    def encode_inside(self, text: str) -> list[int]:
        return self.encode(text, add_bos=False)

    def encode_infill(self, before: str, after: str) -> list[int]:
        return [BOS, ROLE, *self.encode_inside(before), ROLE, *self.encode_inside(after), SAY]

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> list[int]:
        ids = [BOS]
        if tools is not None:
            ids += [ROLE, *self.encode(json.dumps(tools), add_bos=False)]
        for message in messages:
            body = message["content"] + "".join(repr(call) for call in message.get("tool_calls", ()))
            ids += [ROLE, *self.encode(body, add_bos=False)]
        if not add_generation_prompt:
            return ids
        thinking = (template_args or {}).get("enable_thinking")
        opened = {True: "<think>\n", False: "<think>\n\n</think>\n\n"}.get(thinking, "")
        return [*ids, SAY, *self.encode(opened, add_bos=False)]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        kept = (i for i in ids if not (skip_special and self._table.is_special(i)))
        return b"".join(self._table[i] for i in kept).decode("utf-8", "replace")

    def min_tokens(self, text: str) -> int:
        return len(text) // 5

    def token_bytes(self) -> TokenBytes:
        return self._table

    def warm(self) -> None:
        if self._broken_template:
            raise InvalidInput("chat template, line 1: broken", param="messages")
