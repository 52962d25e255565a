"""Endpoints of models that read texts: embeddings, rerank, score. Imported when the first such request comes.

A model that embeds ranks by the cosine of two embeddings; a cross-encoder reads the two texts as a pair.
"""

from __future__ import annotations

import asyncio
import base64
import math
import time
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Raw, UnsetType

from tailrace.api import schema
from tailrace.api.accounts import fresh_name
from tailrace.api.endpoints import read
from tailrace.api.exchange import Exchange
from tailrace.api.generation import Choice, Delta, Generation
from tailrace.api.params import INT_BOUNDS, Asked, bounded_int, check_ids, refuse_unserved
from tailrace.api.priority import permitted
from tailrace.api.prompts import INLINE_CHARS, most_text, refuse_long
from tailrace.api.service import Plan, Service
from tailrace.engine.protocol import Encode, Output, Ready, SamplingParams
from tailrace.terms import InvalidInput
from tailrace.text.detokenize import Detokenizer

if TYPE_CHECKING:
    from tailrace.text import Text

INLINE_NUMBERS = 20_000
"""Numbers that are turned into JSON in a few milliseconds."""
NOTHING = SamplingParams(max_tokens=0)


class Common(schema.Body, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What all share. `truncate_prompt_tokens`: texts are cut to so many tokens (-1: to what the model reads)."""

    model: str | None = None
    user: str | None = None
    priority: int | None = None
    truncate_prompt_tokens: int | None = None


class Embeddings(Common, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/embeddings."""

    input: Raw | UnsetType = UNSET
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None


class Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A document as an object."""

    text: str


class Rerank(Common, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /rerank, as the clients of Cohere and Jina have it."""

    unserved: ClassVar[Mapping[str, schema.Only]] = {
        "rank_fields": schema.Only(),
        "max_chunks_per_doc": schema.Only(),
    }
    query: str
    documents: list[str | Document]
    top_n: int | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: int | None = None
    rank_fields: Raw | UnsetType = UNSET
    max_chunks_per_doc: Raw | UnsetType = UNSET


class Score(Common, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /score."""

    text_1: str | list[str]
    text_2: str | list[str]


EMBEDDINGS = msgspec.json.Decoder(Embeddings)
RERANK = msgspec.json.Decoder(Rerank)
SCORE = msgspec.json.Decoder(Score)


@dataclass(frozen=True)
class Texts:
    """Ids of each text as the model reads it; `second`: where the second text of a pair begins (empty: no pairs)."""

    ids: list[list[int]]
    second: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(map(len, self.ids))


@dataclass(eq=False, kw_only=True)
class Reading(Choice):
    """The engine request that reads the texts; its `vectors` are what they gave, float32 [texts, width]."""

    texts: Texts
    vectors: bytes = b""

    def message(self, tenant: str, priority: int, deadline: float) -> Encode:
        """What the engine is sent."""
        texts = self.texts
        tokens = array("i", self.prompt).tobytes()
        lengths = list(map(len, texts.ids))
        return Encode(self.request, tokens, lengths, texts.second, tenant, priority, deadline)

    def absorb(self, output: Output) -> Delta:
        """Numbers, not tokens."""
        self.vectors = output.vectors
        self.finish = output.finish
        return Delta("", finish=output.finish)


# --- the endpoints


async def embeddings(service: Service, exchange: Exchange) -> None:
    """POST /v1/embeddings."""
    service.need()
    body = await read(service, exchange, EMBEDDINGS)
    text, ready = _checked(service, exchange, body, "embed")
    if body.model is None:
        raise InvalidInput("missing parameter: model", param="model", code="missing_required_parameter")
    width = _width(body.dimensions, ready)
    inputs = read_inputs(body.input, service.settings.limits.inputs, ready.max_context, text.vocab_size)
    longest = _longest(body.truncate_prompt_tokens, ready.max_context)
    texts = await _in_thread(_size(inputs), lambda: _singles(service, text, inputs, "input", longest))
    choice = await _encode(service, exchange, body, texts, "embeddings", "input")
    if choice is None:
        return
    vectors = choice.vectors

    def compose() -> bytes:
        rows = _rows(vectors, ready.width)
        if width < ready.width:
            rows = [_unit(row[:width]) if ready.unit else row[:width] for row in rows]
        shown = map(_base64, rows) if body.encoding_format == "base64" else map(_floats, rows)
        data = b",".join(
            b'{"object":"embedding","index":%d,"embedding":%b}' % (at, one) for at, one in enumerate(shown)
        )
        rest = {"model": body.model, "usage": _usage(texts)}
        return b'{"object":"list","data":[' + data + b"]," + msgspec.json.encode(rest)[1:]

    await exchange.answer(200, await _in_thread(len(texts.ids) * width, compose, INLINE_NUMBERS))


async def rerank(service: Service, exchange: Exchange) -> None:
    """POST /rerank."""
    service.need()
    body = await read(service, exchange, RERANK)
    text, ready = _checked(service, exchange, body, "embed", "rank")
    documents = [one if isinstance(one, str) else one.text for one in body.documents]
    _some(documents, service.settings.limits.inputs, "documents")
    if body.top_n is not None:
        bounded_int(body.top_n, 1, (1 << 31) - 1, "top_n")
    if body.max_tokens_per_doc is not None:
        bounded_int(body.max_tokens_per_doc, 1, (1 << 31) - 1, "max_tokens_per_doc")
    pairs = Pairs([body.query], documents, ("query", "documents"), body.max_tokens_per_doc)
    scored = await _scored(service, exchange, body, text, ready, pairs, "rerank")
    if scored is None:
        return
    scores, texts, name = scored
    order = sorted(range(len(scores)), key=lambda at: (-scores[at], at))[: body.top_n]
    rows: list[dict[str, Any]] = [{"index": at, "relevance_score": scores[at]} for at in order]
    if body.return_documents:
        rows = [{**row, "document": {"text": documents[row["index"]]}} for row in rows]
    answer = {"id": name, "model": _model(service, body), "results": rows, "usage": _usage(texts)}
    await exchange.answer(200, msgspec.json.encode(answer))


async def score(service: Service, exchange: Exchange) -> None:
    """POST /score: of each pair; one text on the left is compared with all on the right."""
    service.need()
    body = await read(service, exchange, SCORE)
    text, ready = _checked(service, exchange, body, "embed", "rank")
    left, right = ([one] if isinstance(one, str) else one for one in (body.text_1, body.text_2))
    for name, texts_given in (("text_1", left), ("text_2", right)):
        _some(texts_given, service.settings.limits.inputs, name)
    if len(left) not in (1, len(right)):
        raise InvalidInput(
            f"text_1 has {len(left)} texts and text_2 has {len(right)}: give one on the left, or as many",
            param="text_1",
        )
    scored = await _scored(service, exchange, body, text, ready, Pairs(left, right, ("text_1", "text_2")), "score")
    if scored is None:
        return
    scores, texts, name = scored
    rows = [{"index": at, "object": "score", "score": one} for at, one in enumerate(scores)]
    answer = {
        "id": name,
        "object": "list",
        "created": int(time.time()),
        "model": _model(service, body),
        "data": rows,
        "usage": _usage(texts),
    }
    await exchange.answer(200, msgspec.json.encode(answer))


ENDPOINTS: dict[str, Callable[[Service, Exchange], Awaitable[None]]] = {
    "embeddings": embeddings,
    "rerank": rerank,
    "score": score,
}


# --- what was asked for


def _checked(
    service: Service, exchange: Exchange, body: Common, *tasks: Literal["embed", "rank"]
) -> tuple[Text, Ready]:
    """What serving needs, and the parameters that all share. Raises HttpError and InvalidInput."""
    text, ready = service.need()
    if body.model is not None:
        service.need_model(body.model)
    service.need_task(ready, *tasks)
    refuse_unserved(body)
    if body.user is not None and len(body.user) > 512:
        raise InvalidInput("user can have at most 512 characters", param="user")
    bounded_int(body.priority or 0, *INT_BOUNDS["priority"], "priority")
    permitted(body.priority, exchange.least_priority)
    return text, ready


def _width(dimensions: int | None, ready: Ready) -> int:
    """Numbers of an embedding. Raises InvalidInput for a length that is no embedding of this model."""
    if dimensions is None or dimensions == ready.width:
        return ready.width
    if dimensions in ready.dimensions:
        return dimensions
    known = [one for one in ready.dimensions if one < ready.width]
    also = f", or one of {', '.join(map(str, known))}" if known else ": it was not trained to be cut"
    raise InvalidInput(
        f"dimensions is {dimensions}; this model's embeddings have {ready.width}{also}", param="dimensions"
    )


def _longest(truncate: int | None, longest: int) -> int | None:
    """Tokens that texts are cut to; None where they are refused instead."""
    if truncate is None:
        return None
    if truncate == -1:
        return longest
    bounded_int(truncate, 1, longest, "truncate_prompt_tokens")
    return truncate


def _some(texts: Sequence[Any], most: int, param: str) -> None:
    if not texts:
        raise InvalidInput(f"{param} is empty: give at least one", param=param)
    if len(texts) > most:
        raise InvalidInput(f"{param} has {len(texts)} entries; at most {most} are possible", param=param)


def read_inputs(value: Raw | UnsetType, most: int, longest: int, vocab: int) -> list[str] | list[list[int]]:
    """The texts of an embeddings request, or the ids of texts. Raises InvalidInput, before anything is decoded where
    there are absurdly many."""
    data = b"" if isinstance(value, UnsetType) else bytes(value)
    if data in (b"", b"null"):
        raise InvalidInput("input is missing", param="input", code="missing_required_parameter")
    if data[:1] == b"[" and b'"' not in data and data.count(b",") > most * longest:
        raise InvalidInput(f"input has far more than {most} times {longest} token ids", param="input")
    decoded: Any = schema.raw(Raw(data), str | list[str | int | list[int]], "input", max_bytes=len(data))
    if isinstance(decoded, str) or (decoded and all(isinstance(one, int) for one in decoded)):
        decoded = [decoded]
    _some(decoded, most, "input")
    if len({type(one) for one in decoded}) > 1 or isinstance(decoded[0], int):
        raise InvalidInput("input mixes texts and token ids: give one kind", param="input", code="invalid_type")
    for at, one in enumerate(decoded):
        if not one:
            raise InvalidInput(f"input[{at}] is empty", param="input")
        if isinstance(one, list):
            check_ids(one, vocab, "input")
    inputs: list[str] | list[list[int]] = decoded
    return inputs


# --- texts to ids


def _size(texts: Sequence[str] | Sequence[list[int]]) -> int:
    return sum(map(len, texts))


def _singles(
    service: Service, text: Text, texts: Sequence[str] | Sequence[list[int]], param: str, cut: int | None
) -> Texts:
    """Each text as the model reads it alone. Ids of callers are taken as they are."""
    ready = service.need()[1]
    prefix, suffix = text.affixes
    found: list[list[int]] = []
    total = 0
    for at, one in enumerate(texts):
        ids = one
        if isinstance(one, str):
            refuse_long(len(one), most_text(service, text, ready.max_context), f"{param}[{at}]")
            ids = text.encode(one)
        assert isinstance(ids, list)
        if cut is not None and len(ids) > cut:
            keep = cut - len(suffix) if isinstance(one, str) else cut
            if keep <= len(prefix) and isinstance(one, str):
                raise InvalidInput(
                    f"truncate_prompt_tokens is {cut}; the model puts {len(prefix) + len(suffix)} tokens around a text",
                    param="truncate_prompt_tokens",
                )
            ids = ids[:keep] + (suffix if isinstance(one, str) else [])
        if len(ids) > ready.max_context:
            raise _too_long(f"{param}[{at}]", len(ids), ready.max_context)
        if not ids:
            raise InvalidInput(f"{param}[{at}] has no tokens", param=param)
        total += len(ids)
        _bound(service, total, param)
        found.append(ids)
    return Texts(found)


@dataclass(frozen=True)
class Pairs:
    """Texts on the left, one or as many as on the right; `names` are the parameters. `document`: most tokens of a text
    on the right."""

    left: list[str]
    right: list[str]
    names: tuple[str, str]
    document: int | None = None

    @property
    def size(self) -> int:
        return _size(self.left) + _size(self.right)


def _paired(service: Service, text: Text, pairs: Pairs, cut: int | None) -> Texts:
    """Each pair as a cross-encoder reads it. What is cut is the end of the second text."""
    ready = service.need()[1]
    form, most = text.pair_form, ready.max_context if cut is None else cut
    limit = most_text(service, text, ready.max_context)
    lefts = []
    for at, one in enumerate(pairs.left):
        refuse_long(len(one), limit, pairs.names[0])
        lefts.append(text.encode(one, add_bos=False))
        if form.size + len(lefts[-1]) >= most:
            raise _too_long(_entry(pairs, 0, at), form.size + len(lefts[-1]), most)
    found, second = [], []
    total = 0
    for at, one in enumerate(pairs.right):
        refuse_long(len(one), limit, _entry(pairs, 1, at))
        left, right = lefts[at if len(lefts) > 1 else 0], text.encode(one, add_bos=False)[: pairs.document]
        size = form.size + len(left)
        if cut is not None:
            right = right[: cut - size]
        if size + len(right) > ready.max_context:
            raise _too_long(_entry(pairs, 1, at), size + len(right), ready.max_context)
        ids = [*form.prefix, *left, *form.middle, *right, *form.suffix]
        second.append(len(form.prefix) + len(left) + len(form.middle))
        total += len(ids)
        _bound(service, total, pairs.names[1])
        found.append(ids)
    return Texts(found, second if form.told_apart else [])


def _entry(pairs: Pairs, side: int, at: int) -> str:
    return pairs.names[side] if pairs.names[side] == "query" else f"{pairs.names[side]}[{at}]"


def _too_long(param: str, tokens: int, longest: int) -> InvalidInput:
    return InvalidInput(
        f"{param} has {tokens} tokens, special ones included; this model reads at most {longest}. Shorten it, or give "
        "truncate_prompt_tokens (-1 cuts to what the model reads)",
        param=param,
        code="context_length_exceeded",
    )


def _bound(service: Service, tokens: int, param: str) -> None:
    most = service.settings.limits.input_tokens
    if tokens > most:
        raise InvalidInput(f"{param} has more than {most} tokens in all: send several requests", param=param)


async def _in_thread(size: int, work: Callable[[], Any], inline: int = INLINE_CHARS) -> Any:
    """Runs work; in a thread where it takes long."""
    return work() if size <= inline else await asyncio.to_thread(work)


# --- reading them


async def _scored(
    service: Service, exchange: Exchange, body: Common, text: Text, ready: Ready, pairs: Pairs, endpoint: str
) -> tuple[list[float], Texts, str] | None:
    """The score of each pair, what was read, and the request's id; None where the client has left."""
    cut = _longest(body.truncate_prompt_tokens, ready.max_context)
    if ready.task == "rank":
        texts = await _in_thread(pairs.size, lambda: _paired(service, text, pairs, cut))
        choice = await _encode(service, exchange, body, texts, endpoint, pairs.names[1])
        if choice is None:
            return None
        raw = [row[0] for row in _rows(choice.vectors, 1)]
        return ([_sigmoid(one) for one in raw] if ready.sigmoid else raw), texts, choice.request

    def singles() -> Texts:
        left = _singles(service, text, pairs.left, pairs.names[0], cut)
        most = pairs.document
        right = _singles(service, text, pairs.right, pairs.names[1], cut if most is None else min(most, cut or most))
        _bound(service, left.tokens + right.tokens, pairs.names[1])
        return Texts(left.ids + right.ids)

    texts = await _in_thread(pairs.size, singles)
    choice = await _encode(service, exchange, body, texts, endpoint, pairs.names[1])
    if choice is None:
        return None
    found = choice.vectors

    def cosines() -> list[float]:
        rows = [_unit(row) for row in _rows(found, ready.width)]
        lefts, rights = rows[: len(pairs.left)], rows[len(pairs.left) :]
        return [_dot(lefts[at if len(lefts) > 1 else 0], right) for at, right in enumerate(rights)]

    return await _in_thread(len(found) // 4, cosines, INLINE_NUMBERS), texts, choice.request


async def _encode(
    service: Service, exchange: Exchange, body: Common, texts: Texts, endpoint: str, source: str
) -> Reading | None:
    """Has the engine read the texts, which came with the parameter `source`; None where the client has left. Raises
    HttpError."""
    text, _ = service.need()
    generation = Generation(stream=False, source=source)
    name = fresh_name("embd-" if endpoint == "embeddings" else f"{endpoint}-")
    prompt = [token for ids in texts.ids for token in ids]
    decoder = Detokenizer(service.table(text))
    choice = Reading(generation, 0, name, prompt, NOTHING, decoder, None, texts=texts)
    generation.add(choice)
    plan = Plan(generation, _asked(body), name, int(time.time()))
    service.submit(plan, exchange, endpoint)
    with service.attended(plan, exchange):
        await generation.started()
        await generation.whole()
        service.settle_lease(plan, exchange)
        if generation.gone:
            exchange.status = 499
            return None
    return choice


def _asked(body: Common) -> Asked:
    """As for a generation that generates nothing."""
    return Asked(
        params=NOTHING,
        max_tokens=0,
        n=1,
        stream=False,
        include_usage=False,
        continuous_usage=False,
        echo=False,
        logprobs=False,
        timeline=False,
        token_times=False,
        parse_special=False,
        priority=body.priority or 0,
        user=body.user,
        metadata=None,
        form=None,
    )


# --- numbers


def _rows(vectors: bytes, width: int) -> list[array[float]]:
    """Each text's numbers."""
    step = 4 * width
    return [array("f", vectors[at : at + step]) for at in range(0, len(vectors), step)]


def _unit(row: array[float]) -> array[float]:
    """The row divided by its length."""
    length = math.sqrt(math.fsum(one * one for one in row)) or 1.0
    return array("f", [one / length for one in row])


def _dot(a: array[float], b: array[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0 else math.exp(x) / (1.0 + math.exp(x))


def _base64(row: array[float]) -> bytes:
    """As OpenAI has it: little-endian float32."""
    return b'"' + base64.b64encode(row.tobytes()) + b'"'


def _floats(row: array[float]) -> bytes:
    """Nine digits: enough for any float32."""
    return b"[" + ",".join(map("{:.9g}".format, row)).encode() + b"]"


def _usage(texts: Texts) -> dict[str, int]:
    return {"prompt_tokens": texts.tokens, "total_tokens": texts.tokens}


def _model(service: Service, body: Common) -> str:
    return body.model or service.settings.model_name
