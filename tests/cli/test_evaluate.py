"""`tailrace eval kv`."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Run
from tests.models import random_llama

SMALL = ("--tokens", "64", "--passages", "1", "--context", "64", "--sequences", "2", "--threads", "2")


def test_json_is_for_programs(run: Run, tmp_path: Path) -> None:
    folder = random_llama.write(tmp_path / "m")
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog " * 4)
    ended = run("eval", "kv", str(folder), "--kv-dtype", "k8v4, int8", "--kv-dtype-skip", "1", "--text", str(text),
                "--pairs", "0", "--budget", "1MiB", "--exact", "--json", *SMALL)  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert [made["kv_dtype"] for made in found["outcomes"]] == ["bf16", "k8v4 but 1", "int8 but 1"]
    assert found["text"] == [{"name": "text.txt at 0", "tokens": 64}]
    bf16, skipped, _ = found["outcomes"]
    assert bf16["bytes_per_token"] == 2 * 2 * 2 * 32 * 2
    assert skipped["bytes_per_token"] == 2 * 128 + 2 * (34 + 20)
    assert bf16["users"] == (1 << 20) // (64 * 512)
    assert skipped["quality"]["mean_kl"] > 0
    assert skipped["speed"] == []


def test_tables_are_for_people(run: Run, tmp_path: Path) -> None:
    folder = random_llama.write(tmp_path / "m")
    shown = run("eval", "kv", str(folder), "--kv-dtype", "int8", "--pairs", "1", *SMALL).stdout
    for words in ("mean KL", "users of 64 tokens in 4.0 GiB", "int8", "decode 2 at 64", "prefill at 0"):
        assert words in " ".join(shown.split())


def test_an_unknown_type_is_refused_before_anything_is_loaded(run: Run) -> None:
    ended = run("eval", "kv", "no-such-model", "--kv-dtype", "k8v3")
    assert ended.returncode != 0
    assert "k8v3" in ended.stderr
    assert "as in k8v4" in ended.stderr
