"""`tailrace size` and `tailrace devices`, as they are used."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tailrace.cli.main import main
from tests.twin.models import CONFIGS, LLAMA_405B, V32


class Ended(NamedTuple):
    """How a command ended, and what it said."""

    returncode: int
    stdout: str
    stderr: str


Run = Callable[..., Ended]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command line in this process."""

    def run(*arguments: str) -> Ended:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        said = capsys.readouterr()
        return Ended(int(ended.value.code or 0), said.out, said.err)

    return run


def test_the_table_says_what_a_model_is_and_how_it_fits(run: Run) -> None:
    shown = run("size", f"{CONFIGS}/{V32}.json", "--device", "h200", "--tp", "8", "--users", "40").stdout
    for words in ("deepseek_v32, 61 layers", "671.9 B, 38.4 B active", "674 GB as fp8", "78,324 B a token as bf16",
                  "latent, the same on every rank: 70,272 B", "index, the same on every rank: 8,052 B", "TP 8",
                  "40 users with 8,192 tokens", "overhead (assumed)", "most users"):  # fmt: skip
        assert words in shown


def test_what_does_not_fit_has_no_numbers_and_says_what_it_needs(run: Run) -> None:
    ended = run("size", f"{CONFIGS}/{LLAMA_405B}.json", "--device", "h100")
    assert ended.returncode == 1
    assert "does not fit" in ended.stdout
    assert "needs at least 12 of them (TP 4, PP 3)" in ended.stdout
    assert "most users" not in ended.stdout


def test_json_is_for_programs(run: Run) -> None:
    said = json.loads(run("size", f"{CONFIGS}/{V32}.json", "--device", "all", "--json").stdout)
    assert said["kv_bytes_per_token"] == 78_324
    assert [one["kind"] for one in said["kv_by_kind"]] == ["latent", "index"]
    assert said["valid_tp"] == [1, 2, 4, 8, 16]
    assert {one["device"] for one in said["fits"]} >= {"t4", "h100-80gb", "mi355x"}
    assert all(one["fits"] is False and one["needs"]["tp"] >= 1 for one in said["fits"] if one["device"] == "h200")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--tp", "3", "--device", "h100"], "TP 3 does not divide 128 heads"),
        (["--device", "abacus"], "no device 'abacus' is known"),
        (["--weights", "q5"], "'q5' is not known"),
        (["--context", "10000000"], "has at most 131,072"),
    ],
)
def test_wrong_use_is_explained(run: Run, more: list[str], words: str) -> None:
    ended = run("size", f"{CONFIGS}/{LLAMA_405B}.json", *more)
    assert ended.returncode == 2
    assert words in ended.stderr


def test_devices_and_prices_have_their_sources(run: Run, tmp_path: Path) -> None:
    shown = run("devices", "h100").stdout
    assert "81,559 MiB" in shown
    assert shown.count("2026-") >= 7
    assert "spot" in run("devices", "H100-SXM", "--prices").stdout
    known = json.loads(run("devices", "--json").stdout)
    assert known["devices"]["b200"]["rates"]["fp4"]["value"] == 9000
    wrong = tmp_path / "mine.toml"
    wrong.write_text('[devices.x]\nname = "x"')
    assert "missing required field" in run("devices", "--devices", str(wrong)).stderr
