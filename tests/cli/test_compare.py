"""`tailrace compare` as a person and as a program use it, with stand-ins for the engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tailrace.cli import benchshow, compareplan, compareshow
from tailrace.deploy import engines
from tailrace.deploy.engines.driver import Options
from tailrace.measure import importing
from tailrace.measure.engines.turns import Entrant
from tailrace.measure.result import Side
from tailrace.terms import InvalidInput
from tests.cli.conftest import Run
from tests.deploy import peers


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text('{"dtype": "bfloat16"}')
    (folder / "model.safetensors").write_bytes(b"12345")
    return str(folder)


def test_engines_are_listed_with_where_they_are_or_how_they_would_be_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    venv = peers.install(tmp_path, "sglang")
    monkeypatch.setenv("PATH", str(tmp_path))
    asked = list(engines.NAMES)
    compareshow.listing(compareplan.listing(compareplan.given([f"sglang={venv}"], [], [], [], [], asked)))
    shown = capsys.readouterr().out
    assert f"sglang        1.2.3                       {venv}/bin/python" in shown
    assert "not installed: no llama-server on PATH" in shown
    assert all(f"{name} " in shown for name in engines.NAMES)


def test_a_comparison_says_what_was_measured_and_who_was_not(
    run: Run, tmp_path: Path, checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [f"{name}={peers.install(tmp_path, name)}" for name in ("sglang", "vllm", "llama.cpp")]
    files = [tmp_path / name for name in ("a.json", "a.csv", "a.html")]
    words = ["compare", checkpoint, "-e", "sglang,vllm:slow,llama.cpp,tensorrt-llm", "--input", "8", "--output", "3"]
    words += ["-c", "1", "-n", "2", "--warmup", "0", "--repeats", "1", "--slo", "ttft=5s", "--price", "2"]
    words += ["--engine-args", "vllm:slow=--standin first=0.1", "--logs", str(tmp_path / "logs")]
    words += [word for path in paths for word in ("--engine-path", path)]
    words += [word for file in files for word in ("--out", str(file))]
    ended = run(*words, PATH="/usr/bin:/bin")
    assert ended.returncode == 0, ended.stderr
    for said in ("chat, 1 at a time, 1 turn\n", "sglang", "vllm:slow", "0 of 2", "output tokens/s", "memory",
                 "start to first token", "checkpoint (5 B, bfloat16)", "sglang.launch_server --model-path",
                 "llama.cpp was not measured: llama.cpp takes a .gguf file, and",
                 "tensorrt-llm was not measured: tensorrt-llm is not installed", "$ a thousand good requests",
                 "With 1 turn of 2 engines no difference can be sure; 6 are the fewest."):  # fmt: skip
        assert said in ended.stdout, said
    assert "starting sglang\nstarting vllm:slow\n" in ended.stderr
    kept = json.loads(files[0].read_text())
    assert kept["kind"] == "engines"
    assert [side["label"] for side in kept["sides"]] == ["sglang", "vllm:slow", "llama.cpp", "tensorrt-llm"]
    assert kept["sides"][0]["turns"][0]["kv_use"] == 0.25
    assert kept["setting"]["between turns"] in ("suspended", "stopped")
    assert files[1].read_text().count("\n") > 4
    page = files[2].read_text()
    for said in ("Engines side by side: chat", "What was run", "sglang.launch_server", "Against", "turn by turn"):
        assert said in page, said
    assert "<script" not in page
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["sglang-1.log", "vllm-slow-1.log"]
    benchshow.show(importing.read([files[0]], price=None))
    assert "tensorrt-llm was not measured" in capsys.readouterr().out


def test_what_is_wrong_is_said_by_the_option_s_name() -> None:
    given, labels = compareplan.given, compareplan.labels
    for call, words in (
        (lambda: labels("tailrace,ollama"), "there is no engine called 'ollama'"),
        (lambda: labels("vllm,vllm"), "vllm takes part twice: call the second vllm:NAME"),
        (lambda: labels(","), "--engines names none"),
        (lambda: given(["vllm"], [], [], [], [], ["vllm"]), "--engine-path is as in vllm=/path/to/venv, not 'vllm'"),
        (lambda: given([], ["ollama=x"], [], [], [], ["vllm"]), "--engine-args is as in"),
        (lambda: given([], [], ["sglang=x"], [], [], ["vllm:b"]), "--dtype sglang=...: sglang does not take part"),
        (lambda: given([], [], [], ["-1"], [], []), "--price is dollars an hour"),
        (lambda: given([], [], [], ["ollama=2"], [], []), "--price is dollars an hour"),
    ):
        with pytest.raises(InvalidInput) as caught:
            call()
        assert words in str(caught.value)


def test_each_engine_serves_the_first_model_that_it_takes_or_its_own(tmp_path: Path, checkpoint: str) -> None:
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF")
    paths = [f"{name}={peers.install(tmp_path, name)}" for name in ("sglang", "llama.cpp")]
    asked = ["sglang", "sglang:other", "llama.cpp", "tailrace"]
    models = [str(gguf), checkpoint, "sglang:other=org/name"]
    said = compareplan.given(paths, ["sglang:other=--device 'cpu'"], [], ["1", "sglang=3"], models, asked)
    options = Options("", context=64, parallel=1, threads=1)
    found = [compareplan.entrant(label, said, options) for label in asked]
    assert all(isinstance(one, Entrant) for one in found)
    assert [one.options.model for one in found if isinstance(one, Entrant)] == [
        checkpoint, "org/name", str(gguf), str(gguf)
    ]  # fmt: skip
    assert [one.price for one in found if isinstance(one, Entrant)] == [3, 3, 1, 1]
    other = found[1]
    assert isinstance(other, Entrant)
    assert other.options.extra == ("--device", "cpu")
    none = compareplan.given([paths[1]], [], [], [], [checkpoint], ["llama.cpp"])
    absent = compareplan.entrant("llama.cpp", none, options)
    assert isinstance(absent, Side)
    assert absent.absent == f"llama.cpp takes a .gguf file, and {checkpoint} is none"
