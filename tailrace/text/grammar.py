"""Structured output: what a grammar allows next, token by token. Through llguidance, imported on first use.

`check` says whether a grammar can be served, without a tokenizer. A `Compiler` knows one model's vocabulary, and makes
a `Matcher` of a grammar for each request.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from tailrace.terms import InvalidInput, TailraceError

if TYPE_CHECKING:
    import numpy as np
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer
    from numpy.typing import NDArray

    from tailrace.text.tokens import TokenBytes

JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON on one line, as most of what models have read is written. With free white space a model can go on writing that
for ever, and next to nothing is forced."""
COMPILED = 64
"""Grammars that are kept compiled."""
MAX_MESSAGE = 300
NOTHING_FOLLOWS = "NoExtensionBias"
"""How llguidance's message begins where no token can follow and the text is not complete."""
TERSE = "<non-verbose/>"
"""What ends its messages where it is asked for no details."""


class Grammar(msgspec.Struct, frozen=True):
    """What a text must match: a JSON schema, a regular expression (of the whole text), or a Lark grammar as llguidance
    reads it. `lenient`: keywords of a schema that cannot be enforced are left to the model, rather than refused."""

    kind: Literal["json", "regex", "lark"]
    text: str
    lenient: bool = False


class GrammarError(TailraceError):
    """A grammar that was accepted cannot be followed: it takes more than one step may take."""


def choice(options: Sequence[str]) -> Grammar:
    """One of these texts."""
    return Grammar("lark", "start: " + " | ".join(json.dumps(option, ensure_ascii=False) for option in options))


def check(grammar: Grammar) -> str:
    """What is wrong with a grammar; "" where nothing is. Takes as long as it is large, at most a second or so for the
    largest that the API takes: bounded by `limits`, and by what llguidance refuses by itself (nesting above 128)."""
    from llguidance import LLMatcher

    try:
        failed, messages = LLMatcher.validate_grammar_with_warnings(_source(grammar), limits=limits())
    except ValueError as error:  # no JSON, or nested too deeply
        failed, messages = True, [str(error)]
    return _in_our_words(messages[0]) if failed else ""


def _in_our_words(message: str) -> str:
    """llguidance's message, but where it would send its reader to an option which no request has, or tell nothing."""
    message = _short(message.removesuffix(TERSE))
    if message.startswith(NOTHING_FOLLOWS):
        return "no text matches it, or none that begins so: it refers to itself without an end, or contradicts itself"
    if message.startswith("oneOf constraints"):
        return "the alternatives of a oneOf overlap, or may: make them exclude each other, or say anyOf"
    return message


def limits() -> LLParserLimits:
    """What compiling a grammar, and a step, may cost: some tens of milliseconds at most."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        step_lexer_fuel=100_000,
        step_max_items=20_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )


def _source(grammar: Grammar) -> str:
    """The grammar as llguidance takes it. Raises ValueError for a schema that is no JSON."""
    from llguidance import LLMatcher

    match grammar.kind:
        case "json":
            style: Any = {**JSON_STYLE, "lenient": grammar.lenient}
            return LLMatcher.grammar_from_json_schema(grammar.text, overrides=style)
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "lark":
            return LLMatcher.grammar_from_lark(grammar.text)


def _short(message: str) -> str:
    message = message.strip()
    return message if len(message) <= MAX_MESSAGE else message[:MAX_MESSAGE] + "..."


class Compiler:
    """Grammars over one vocabulary. Making it takes some hundred milliseconds, a grammar some milliseconds.

    `table`: what each id spells; `vocab`: ids below this can be drawn; `eos_ids` end a text; `encode`: how the model's
    tokenizer cuts text that goes on from other text. One thread at a time may call `compile`.
    """

    def __init__(
        self, table: TokenBytes, *, vocab: int, eos_ids: Iterable[int], encode: Callable[[str], list[int]]
    ) -> None:
        ends = [token for token in eos_ids if 0 <= token < vocab]
        self.vocab = vocab
        # A model without an end of text gets one that is never drawn: llguidance needs to know one.
        spelled = [table[token] for token in range(vocab)] + ([] if ends else [b""])
        special = [token for token in range(vocab) if table.is_special(token)]
        self._tokenizer = _tokenizer(spelled, special, ends or [vocab], encode)
        self._words = -(-len(spelled) // 32)
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()

    def known(self, grammar: Grammar) -> Matcher | None:
        """A matcher of a grammar that is compiled already. Any thread may call it."""
        compiled = self._compiled.get(grammar)
        return None if compiled is None else Matcher(compiled.deep_copy(), self.vocab, self._words)

    def compile(self, grammar: Grammar) -> Matcher:
        """A matcher at the beginning of a text. Raises InvalidInput where the grammar cannot be compiled."""
        from llguidance import LLMatcher

        compiled = self._compiled.get(grammar)
        if compiled is None:
            try:
                compiled = LLMatcher(self._tokenizer, _source(grammar), log_level=0, limits=limits())
            except ValueError as error:
                raise InvalidInput(f"the grammar cannot be compiled: {_in_our_words(str(error))}") from None
            if not compiled.is_error():
                compiled.compute_bitmask()  # the first one takes the longest, and copies know it
            if compiled.is_error():
                raise InvalidInput(f"the grammar cannot be compiled: {_in_our_words(compiled.get_error())}")
            self._compiled[grammar] = compiled
            while len(self._compiled) > COMPILED:
                self._compiled.popitem(last=False)
        else:
            self._compiled.move_to_end(grammar)
        return Matcher(compiled.deep_copy(), self.vocab, self._words)


class Matcher:
    """Where one text stands in its grammar. What it allows depends on the tokens taken in alone."""

    def __init__(self, matcher: LLMatcher, vocab: int, words: int) -> None:
        self._matcher = matcher
        self._vocab = vocab
        self.words = words  # of 32 bits, of a mask

    @property
    def ended(self) -> bool:
        """Nothing can follow: the text is complete."""
        return self._matcher.is_stopped()

    def take(self, token: int) -> None:
        """The text goes on with this token. Raises GrammarError where it cannot."""
        if not self._matcher.consume_token(token):
            raise GrammarError(_in_our_words(self._matcher.get_error()) or f"token {token} is not in the grammar")

    def forced(self) -> list[int]:
        """Takes in the tokens that must follow, if any, and returns them, as the tokenizer cuts them."""
        tokens = [token for token in self._matcher.compute_ff_tokens() if 0 <= token < self._vocab]
        tokens = tokens[: self._matcher.validate_tokens(tokens)] if tokens else tokens
        for token in tokens:
            self.take(token)
        return tokens

    def fill(self, bits: NDArray[np.uint32]) -> None:
        """Writes the mask of the next token: uint32 [words], bit t % 32 of word t // 32 for token t. Raises
        GrammarError where finding it takes more than a step may take."""
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if self._matcher.is_error():
            raise GrammarError(f"the grammar cannot be followed: {_in_our_words(self._matcher.get_error())}")
        if not bits.any():
            raise GrammarError("no token of the vocabulary can follow")


class _Wrapped:
    """The tokenizer as llguidance wants to be told of it."""

    def __init__(self, tokens: list[bytes], special: list[int], eos: int, encode: Callable[[str], list[int]]) -> None:
        self.tokens = tokens
        self.special_token_ids = special
        self.eos_token_id = eos
        self.bos_token_id = None
        self._encode = encode

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("text, not bytes")  # llguidance asks which of them is taken
        try:
            return self._encode(text)
        except TailraceError:  # then it is drawn token by token
            return []


def _tokenizer(
    tokens: list[bytes], special: list[int], ends: list[int], encode: Callable[[str], list[int]]
) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    wrapped = TokenizerWrapper(_Wrapped(tokens, special, ends[0], encode))
    return LLTokenizer(wrapped, n_vocab=len(tokens), eos_token=ends)
