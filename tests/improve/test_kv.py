"""Quality, memory, users and speed of KV in fewer bits, on a model without training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tailrace.backends.kvdtype import parse
from tailrace.improve.kv import Setting, evaluate, users_of
from tailrace.improve.text import Passage, passages
from tailrace.models import load_model, open_checkpoint
from tailrace.terms import InvalidInput
from tests.models import random_llama


class Letters:
    """A tokenizer that gives a character a token."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % 190 for letter in text]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_llama.write(tmp_path_factory.mktemp("m") / "m")


def test_fewer_bits_cost_more_and_take_less(model: Path) -> None:
    loaded = load_model(open_checkpoint(model), max_context=512)
    rng = np.random.default_rng(3)
    texts = [Passage(str(at), rng.integers(0, 190, 200).tolist()) for at in range(2)]
    kinds = [parse(name) for name in ("bf16", "fp16", "int8", "k8v4", "int4")]
    setting = Setting(budget=64 << 20, context=64, sequences=3, pairs=2, threads=2)
    said: list[str] = []
    found = {made.kv_dtype: made for made in evaluate(loaded, kinds, texts, setting, said.append)}
    assert list(found) == ["bf16", "fp16", "int8", "k8v4", "int4"]
    divergence = {name: made.quality.mean_kl for name, made in found.items()}
    assert divergence["bf16"] == 0.0
    assert 0.0 < divergence["fp16"] < divergence["int8"] < divergence["k8v4"] < divergence["int4"] < 0.1
    assert found["bf16"].quality.same_choice == 1.0
    assert found["bf16"].quality.perplexity_change == 0.0
    for made in found.values():
        quality = made.quality
        assert quality.tokens == 398
        assert quality.mean_kl <= quality.p99_kl <= quality.max_kl
        assert made.users == users_of(16 * made.bytes_per_token, setting)
        assert [(step.phase, step.context, step.sequences) for step in made.speed] == [
            ("prefill", 0, 1), ("decode", 16, 1), ("decode", 16, 3), ("decode", 64, 1), ("decode", 64, 3),
        ]  # fmt: skip
        assert all(step.seconds > 0 and step.low <= step.ratio <= step.high for step in made.speed)
    assert found["k8v4"].users_gained == pytest.approx(256 / 2 / (34 + 20), rel=0.01)  # heads of 32
    assert said


def test_a_file_is_cut_evenly(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("".join(chr(97 + at % 26) for at in range(1000)))
    letters: object = Letters()
    found = passages(letters, file, tokens=100, count=4)  # type: ignore[arg-type]  # only `encode` is used
    assert [len(passage.ids) for passage in found] == [100] * 4
    assert [passage.name for passage in found] == [f"text.txt at {at}" for at in (0, 250, 500, 750)]
    (all_of_it,) = passages(letters, file, tokens=5000, count=4)  # type: ignore[arg-type]
    assert len(all_of_it.ids) == 1000


def test_a_file_that_cannot_be_read_or_says_nothing_is_refused(tmp_path: Path) -> None:
    letters: object = Letters()
    (tmp_path / "short").write_text("hello")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, words in (("short", "has 5 tokens"), ("binary", "cannot be read as text"), ("none", "cannot be read")):
        with pytest.raises(InvalidInput, match=words):
            passages(letters, tmp_path / name, tokens=100, count=1)  # type: ignore[arg-type]


def test_without_a_file_the_text_is_the_language_reference() -> None:
    letters: object = Letters()
    found = passages(letters, None, tokens=300, count=3)  # type: ignore[arg-type]
    assert [len(passage.ids) for passage in found] == [300] * 3
    assert len({passage.name for passage in found}) == 3
