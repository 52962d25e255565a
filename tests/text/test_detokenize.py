"""Ids to text as they come: never half a character, and the pieces joined are the text of all ids at once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.terms import ModelError
from tailrace.text import Detokenizer, TokenBytes, decode
from tailrace.text.tokens import STRIP_FIRST_TOKEN, Spelling, byte_alphabet

PIECES = [b"", b" ", b"  ", b"a", b" b", "é".encode()[:1], "é".encode()[1:], *(bytes([b]) for b in "😀€".encode())]
PIECES += [b"\xff", b"\xc0", b"\xed\xa0\x80", "😀 ok".encode()[2:], "中文".encode()[:4], b"<s>"]
SPECIAL = len(PIECES) - 1


def table(leading: int = 0) -> TokenBytes:
    return TokenBytes.build(PIECES, [SPECIAL], leading)


IDS = st.lists(st.integers(-2, len(PIECES) + 3), max_size=20)


@settings(max_examples=250, deadline=None)
@given(IDS, st.booleans(), st.sampled_from([0, 1, 3]), st.booleans())
def test_the_pieces_joined_are_the_bytes_of_all_ids_decoded_at_once(ids, skip: bool, leading: int, start: bool) -> None:
    spelled = table(leading)
    data = b"".join(PIECES[i] for i in ids if 0 <= i < len(PIECES) and not (skip and i == SPECIAL))
    spaces = min(len(data) - len(data.lstrip(b" ")), leading if start else 0)
    expected = data[spaces:].decode("utf-8", errors="replace")
    stream = Detokenizer(spelled, skip_special=skip, start=start)
    assert "".join([*map(stream.push, ids), stream.finish()]) == expected
    assert decode(spelled, ids, skip_special=skip, start=start) == expected


@given(st.text(max_size=20))
@settings(max_examples=200, deadline=None)
def test_no_replacement_character_appears_that_the_text_has_not(text: str) -> None:
    data = text.encode()
    spelled = TokenBytes.build([bytes([byte]) for byte in range(256)], [])
    stream = Detokenizer(spelled)
    pieces = [stream.push(byte) for byte in data]
    assert "".join(pieces) == text
    assert stream.finish() == ""


def test_an_unfinished_character_becomes_one_replacement_at_the_end() -> None:
    spelled = TokenBytes.build([bytes([byte]) for byte in range(256)], [])
    stream = Detokenizer(spelled)
    assert [stream.push(byte) for byte in "ok😀".encode()[:-1]] == ["o", "k", "", "", ""]
    assert stream.finish() == "\ufffd"


def test_the_first_token_loses_its_spaces_where_the_decoder_says_so() -> None:
    spelled = TokenBytes.build([b"  a b", b" c", b"<s>"], [2], STRIP_FIRST_TOKEN)
    assert decode(spelled, [2, 0, 1]) == "ab c"
    assert decode(spelled, [0, 1], start=False) == "  a b c"


def test_special_tokens_inside_a_character_do_not_break_it() -> None:
    e_acute = "é".encode()
    spelled = TokenBytes.build([e_acute[:1], e_acute[1:], b"<s>"], [2])
    assert decode(spelled, [0, 2, 1]) == "é"


def test_decoders_are_read_or_refused_by_name() -> None:
    replace = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    llama = {"type": "Sequence", "decoders": [replace, {"type": "ByteFallback"}, {"type": "Fuse"}, strip]}
    spelling = Spelling.of(llama)
    assert spelling.spell(["▁a▁", "<0xE9>", "<0xZZ>", "<x>"]) == [b" a ", b"\xe9", b"<0xZZ>", b"<x>"]
    assert spelling.leading == 1
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}
    assert Spelling.of(metaspace).leading == STRIP_FIRST_TOKEN
    assert Spelling.of({**metaspace, "prepend_scheme": "never"}).leading == 0
    with pytest.raises(ModelError, match="CTC"):
        Spelling.of({"type": "CTC"})
    pieces = Spelling.of({"type": "WordPiece", "prefix": "##", "cleanup": True})
    assert pieces.spell(["turn", "##s", "a"]) == [b" turn", b"s", b" a"]
    assert pieces.leading == 1
    with pytest.raises(ModelError, match="no decoder"):
        Spelling.of(None)
    with pytest.raises(ModelError, match="Strip"):
        Spelling.of({"type": "Sequence", "decoders": [strip]})


def test_byte_level_spelling_is_the_alphabets_inverse() -> None:
    alphabet = byte_alphabet()
    assert sorted(alphabet.values()) == list(range(256))
    assert (alphabet["Ġ"], alphabet["Ċ"], alphabet["a"]) == (0x20, 0x0A, 0x61)
    spelling = Spelling(byte_level=True)
    assert spelling.spell(["Ġa", "Ã©", "<｜x｜>", " x"]) == [b" a", "é".encode(), "<｜x｜>".encode(), b" x"]  # noqa: RUF001
