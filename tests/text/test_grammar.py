"""What grammars allow, over a vocabulary of bytes and a few words."""

import json
from collections.abc import Sequence

import numpy as np
import pytest

from tailrace.terms import InvalidInput
from tailrace.text import TokenBytes
from tailrace.text.grammar import Compiler, Grammar, GrammarError, Matcher, check, choice

EOS = 0
WORDS = [b'{"', b'": ', b", ", b"name", b"true"]
SPELLED = [b"<eos>", *(bytes([value]) for value in range(256)), *WORDS]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "good": {"type": "boolean"}},
    "required": ["name", "good"],
    "additionalProperties": False,
}


def encode(text: str) -> list[int]:
    """Words where they fit, else bytes."""
    ids, data = [], text.encode()
    while data:
        token = max((t for t in range(1, len(SPELLED)) if data.startswith(SPELLED[t])), key=lambda t: len(SPELLED[t]))
        ids.append(token)
        data = data[len(SPELLED[token]) :]
    return ids


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    table = TokenBytes.build(SPELLED, [EOS])
    return Compiler(table, vocab=len(SPELLED), eos_ids=[EOS], encode=encode)


def allowed(matcher: Matcher) -> set[int]:
    bits = np.zeros(matcher.words, np.uint32)
    matcher.fill(bits)
    return {token for token in range(len(SPELLED)) if bits[token // 32] >> np.uint32(token % 32) & 1}


def spell(tokens: Sequence[int]) -> bytes:
    return b"".join(SPELLED[token] for token in tokens)


def test_a_schema_forces_its_keys_and_ends_by_itself(compiler: Compiler) -> None:
    matcher = compiler.compile(Grammar("json", json.dumps(SCHEMA)))
    rest, forced = b'{"name": "Bob", "good": true}', 0
    while not matcher.ended:
        text = spell(matcher.forced())
        assert rest.startswith(text)
        rest = rest[len(text) :]
        forced += len(text)
        if rest and not matcher.ended:
            assert EOS not in allowed(matcher)
            assert 1 + rest[0] in allowed(matcher)
            matcher.take(1 + rest[0])
            rest = rest[1:]
    assert rest == b""
    assert forced > 15


def test_the_end_of_text_is_allowed_only_where_the_text_is_complete(compiler: Compiler) -> None:
    matcher = compiler.compile(Grammar("regex", "[ab]{2,4}"))
    for count in range(4):
        assert (EOS in allowed(matcher)) == (count >= 2)
        matcher.take(1 + ord("a"))
    assert matcher.ended


@pytest.mark.parametrize("options", [["a", "b"], ["a\nb", 'say "x"'], ["ü€", "\\d+", "😀", "/a/"], ["true", "truely"]])
def test_a_choice_is_one_of_its_texts_to_the_letter(compiler: Compiler, options: list[str]) -> None:
    assert check(choice(options)) == ""
    for option in options:
        matcher = compiler.compile(choice(options))
        left = spell(matcher.forced())
        rest = option.encode()
        assert rest.startswith(left)
        for byte in rest[len(left) :]:
            if matcher.ended:
                break
            assert 1 + byte in allowed(matcher)
            matcher.take(1 + byte)
        assert matcher.ended or EOS in allowed(matcher)


def test_a_token_that_the_grammar_does_not_have_raises(compiler: Compiler) -> None:
    matcher = compiler.compile(Grammar("regex", "a+"))
    with pytest.raises(GrammarError):
        matcher.take(1 + ord("b"))


def test_copies_of_a_grammar_do_not_know_of_each_other(compiler: Compiler) -> None:
    grammar = Grammar("regex", "(ab|cd)x")
    one = compiler.compile(grammar)
    other = compiler.known(grammar)
    assert other is not None
    one.take(1 + ord("a"))
    assert 1 + ord("c") in allowed(other)


def test_what_cannot_be_compiled_is_refused_with_a_reason(compiler: Compiler) -> None:
    with pytest.raises(InvalidInput, match="cannot be compiled"):
        compiler.compile(Grammar("regex", "["))


RECURSIVE = '{"$defs": {"x": {"$ref": "#/$defs/x"}}, "type": "array", "items": {"$ref": "#/$defs/x"}, "minItems": 1}'


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("lark", "start: start"),
        ("lark", "start: a\na: b\nb: a"),
        ("lark", 'start: start "a"'),
        ("json", '{"$ref": "#"}'),
        ("regex", r"[^\s\S]"),
    ],
)
def test_what_no_text_matches_is_refused_in_words(compiler: Compiler, kind: str, text: str) -> None:
    for _ in range(2):  # nothing of it is kept
        with pytest.raises(InvalidInput, match=r"cannot be compiled: no text matches it.* refers to itself") as refused:
            compiler.compile(Grammar(kind, text))
    assert "\n" not in str(refused.value)


def test_a_grammar_that_comes_to_where_nothing_follows_says_so(compiler: Compiler) -> None:
    matcher = compiler.compile(Grammar("json", RECURSIVE))
    assert matcher.forced()
    with pytest.raises(GrammarError, match=r"cannot be followed: no text matches it.* that begins so") as failed:
        allowed(matcher)
    assert "<" not in str(failed.value)


@pytest.mark.parametrize("text", ["", "a?"])
def test_a_text_may_be_empty(compiler: Compiler, text: str) -> None:
    assert EOS in allowed(compiler.compile(Grammar("regex", text)))


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("regex", "[", "unclosed character class"),
        ("regex", "(?<=a)b", "look-around"),
        ("regex", "(" * 5000 + "a" + ")" * 5000, ""),
        ("json", '{"type": "nonsense"}', ""),
        ("json", "{", "EOF"),
        ("json", '{"properties": ' * 2000 + "{}" + "}" * 2000, "recursion"),
        ("json", '{"$ref": "http://localhost:9/x"}', ""),
        ("json", '{"type": "string", "pattern": "(?=a)b"}', "look-around"),
        ("json", '{"type": "string", "minLength": 5, "maxLength": 2}', ""),
        ("lark", 'start: "a" | "b', ""),
        ("lark", "start: missing", "missing"),
        ("lark", "start: " + "(" * 5000 + '"a"' + ")" * 5000, ""),
    ],
)
def test_wrong_grammars_are_found_with_a_reason(kind: str, text: str, says: str) -> None:
    error = check(Grammar(kind, text))
    assert error
    assert says in error
    assert len(error) <= 303


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "(a+)+$"),
        ("regex", "a{1,100000}"),
        ("json", '{"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}, "$ref": "#/$defs/n"}'),
        ("json", json.dumps({"properties": {f"property {n}": {"type": "string"} for n in range(2000)}})),
        ("lark", 'start: "a" start | "b"'),
    ],
)
def test_large_grammars_are_taken(kind: str, text: str) -> None:
    assert check(Grammar(kind, text)) == ""


def test_keywords_that_cannot_be_enforced_are_refused_unless_lenient() -> None:
    schema = '{"type": "array", "items": {"type": "integer"}, "uniqueItems": true}'
    assert check(Grammar("json", schema))
    assert check(Grammar("json", schema, lenient=True)) == ""


def test_alternatives_that_overlap_are_refused_with_a_remedy_and_others_are_told_apart() -> None:
    overlapping = {"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 2}]}
    assert "say anyOf" in check(Grammar("json", json.dumps(overlapping)))
    assert not check(Grammar("json", json.dumps(overlapping), lenient=True))
    assert not check(Grammar("json", json.dumps({"oneOf": [{"type": "integer"}, {"type": "string"}]})))
