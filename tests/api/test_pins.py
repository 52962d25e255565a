"""Files whose prefixes are pinned: text as it stands, or token ids."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from tailrace.api.pins import read
from tailrace.terms import InvalidInput
from tailrace.text import Text
from tests.api.conftest import Running, serving
from tests.api.stand import FIRST_BYTE, ROLE, StandText

SYSTEM = "You answer briefly, and in whole sentences."


def text() -> Text:
    return cast(Text, StandText())


def no_text() -> Text:
    raise AssertionError("a tokenizer is not needed")


def test_text_is_tokenized_as_it_stands(tmp_path: Path) -> None:
    file = tmp_path / "system.txt"
    file.write_text("<role>be [kind]\n")
    assert read([str(file)], text) == ((ROLE, *(FIRST_BYTE + byte for byte in b"be [kind]\n")),)


def test_a_json_list_is_token_ids_and_needs_no_tokenizer(tmp_path: Path) -> None:
    file, other = tmp_path / "a.json", tmp_path / "b.json"
    file.write_text("[1, 2,\n3]\n")
    other.write_text("[4]")
    assert read([str(file), str(other)], no_text) == ((1, 2, 3), (4,))


@pytest.mark.parametrize(
    "content", [b"", b" \n", b"\xff\xfe", b'["a"]', b"[1, -2]", b"[1.5]", b"[true]", b"[4294967296]"]
)
def test_a_file_that_is_neither_is_refused_by_name(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "wrong"
    file.write_bytes(content)
    with pytest.raises(InvalidInput, match=f"--kv-pin {file}"):
        read([str(file)], text)
    with pytest.raises(InvalidInput, match="cannot be read"):
        read([str(tmp_path / "nowhere")], text)


@pytest.fixture(scope="module")
def pinning() -> Iterator[Running]:
    """A server with a small pool and a pinned system prompt, as its template renders it."""
    ids = tuple(StandText().encode_chat([{"content": SYSTEM}], add_generation_prompt=False))
    with serving(kv_pin=(ids,), kv_tokens=512, max_context=256, kv_tenant_share=0.5) as server:
        yield server


def test_a_pinned_system_prompt_outlives_what_comes_after_it(pinning: Running) -> None:
    def cached() -> int:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "hello"}]
        body = {"model": "stand", "messages": messages, "max_tokens": 1}
        usage = pinning.post("/v1/chat/completions", body).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert cached() == 0
    for n in range(6):
        prompt = f"{n} " + "x" * 200
        assert pinning.post("/v1/completions", {"model": "stand", "prompt": prompt, "max_tokens": 2}).is_success
    assert cached() == 32
    assert pinning.metric("tailrace_kv_pages_pinned") == 2
    assert pinning.metric("tailrace_kv_evictions_total", cause="quota") > 0
    assert pinning.metric("tailrace_kv_evictions_total", cause="ttl") == 0
    queries = pinning.metric("tailrace_prefix_cache_queries_total")
    hits, misses = (pinning.metric(f"tailrace_prefix_cache_{what}_total") for what in ("hits", "misses"))
    assert hits > 0
    assert queries == hits + misses
