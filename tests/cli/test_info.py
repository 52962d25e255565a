"""`tailrace info` of the real model."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Run


def test_the_table_says_what_the_model_is(run: Run, smollm2: Path) -> None:
    shown = run("info", str(smollm2)).stdout
    for words in ("llama", "GGUF", "134.5 M", "30 of width 576", "9 heads on 3 KV heads of 64", "49,152", "tied",
                  "8,192 tokens", "92.1 MiB", "Q4_1: 63.3 MiB in 210", "22.5 KiB a token", "180.0 MiB"):  # fmt: skip
        assert words in shown


def test_json_is_for_programs(run: Run, smollm2: Path) -> None:
    info = json.loads(run("info", str(smollm2), "--json").stdout)
    assert info["parameters"] == info["active_parameters"] == 134_515_008
    assert info["weight_bytes"] == sum(kind["bytes"] for kind in info["formats"].values())
    assert info["kv_bytes_per_token"] == 2 * 30 * 3 * 64 * 2
    assert info["config"]["head_dim"] == 64


def test_a_file_that_is_no_model_is_refused_by_name(run: Run, tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"not a model at all")
    ended = run("info", str(tmp_path / "broken.gguf"))
    assert ended.returncode == 1
    assert "broken.gguf" in ended.stderr
    assert "Traceback" not in ended.stderr
