"""The drivers: each finds its engine, starts it with flags that it knows, and knows what it tells of itself."""

from __future__ import annotations

import json
import sys
import urllib.request
from functools import partial
from pathlib import Path

import pytest

from tailrace.deploy import engines
from tailrace.deploy.engines import finding
from tailrace.deploy.engines.driver import Found, NotFound, Options
from tailrace.deploy.local import Replica, StartFailed
from tailrace.measure import gauges
from tailrace.terms import InvalidInput
from tests.deploy import peers

OTHERS = [name for name in engines.NAMES if name != "tailrace"]
PREFIX = ("llama.cpp", "vllm", "sglang", "openvino")


@pytest.fixture
def gguf(tmp_path: Path) -> str:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF and more")
    return str(path)


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "bfloat16"}))
    (folder / "model.safetensors").write_bytes(b"")
    return str(folder)


@pytest.mark.parametrize("name", OTHERS)
def test_an_engine_is_started_with_flags_that_it_knows_and_tells_what_its_gauges_are(
    name: str, tmp_path: Path, gguf: str, checkpoint: str
) -> None:
    driver = engines.driver(name)
    found = driver.find(str(peers.install(tmp_path, name)))
    assert found.version == "1.2.3"
    model = gguf if driver.unfit(gguf) is None else checkpoint
    assert driver.unfit(model) is None
    options = Options(model, "mine", context=128, parallel=2, threads=1, prefix_cache=True if name in PREFIX else None,
                      dtype="float32" if name not in ("llama.cpp", "tensorrt-llm") else None,
                      extra=("--standin", "first=0"))  # fmt: skip
    with Replica.start(partial(driver.command, found, options), log=tmp_path / "log") as replica:
        with urllib.request.urlopen(f"{replica.url}/v1/models") as response:
            told = json.load(response)["data"][0]["id"]
        assert told == "mine" or name in ("transformers", "tensorrt-llm")  # these have no flag for that
        if driver.gauges is not None:
            with urllib.request.urlopen(f"{replica.url}{driver.gauges.path}") as response:
                page = response.read().decode()
            assert gauges.value(page, driver.gauges.running) == 1
            assert gauges.value(page, driver.gauges.waiting) == 2
            if name != "llama.cpp":
                assert gauges.value(page, driver.gauges.kv_use, largest=True) == 0.25
            if driver.gauges.cache_hits:
                assert gauges.value(page, driver.gauges.cache_hits) == 40
                assert gauges.value(page, driver.gauges.cache_queries) == 100


def test_a_flag_that_the_engine_does_not_know_ends_the_start_with_its_own_words(
    tmp_path: Path, checkpoint: str
) -> None:
    driver = engines.driver("sglang")
    found = driver.find(str(peers.install(tmp_path, "sglang")))
    with pytest.raises(StartFailed, match=r"sglang ended with status 1.*\n.*unrecognized arguments: --no-such"):
        Replica.start(partial(driver.command, found, Options(checkpoint, extra=("--no-such",))), log=tmp_path / "log")


def test_options_that_are_not_given_are_left_to_the_engine() -> None:
    found = Found(("engine",), "1", "there")
    for name in engines.NAMES:
        words = engines.driver(name).command(found, Options("m"), 1).argv
        assert "None" not in words
        assert not {"--max-model-len", "-c", "--dtype", "--context-length", "--threads", "-t"} & set(words)
    told = {name: engines.driver(name).command for name in ("llama.cpp", "vllm", "sglang", "tailrace", "openvino")}
    off = Options("m", prefix_cache=False, context=100, parallel=4)
    assert "--no-cache-prompt" in told["llama.cpp"](found, off, 1).argv
    assert "400" in told["llama.cpp"](found, off, 1).argv  # its slots divide what it is given
    assert "--no-enable-prefix-caching" in told["vllm"](found, off, 1).argv
    assert "--disable-radix-cache" in told["sglang"](found, off, 1).argv
    assert "--no-prefix-cache" in told["tailrace"](found, off, 1).argv
    assert "--no-prefix-cache" in told["openvino"](found, off, 1).argv


def test_what_an_engine_cannot_do_is_refused_by_name() -> None:
    for name, options, said in (
        ("llama.cpp", Options("m", dtype="bfloat16"), "llama.cpp cannot be told dtype"),
        ("transformers", Options("m", prefix_cache=True), "transformers cannot be told prefix caching"),
        ("tensorrt-llm", Options("m", prefix_cache=False), "tensorrt-llm cannot be told prefix caching but in a file"),
        ("tensorrt-llm", Options("m", dtype="fp8"), "tensorrt-llm cannot be told dtype but in a file"),
    ):
        with pytest.raises(InvalidInput, match=said):
            engines.driver(name).command(Found(("engine",), "1", "there"), options, 1)


def test_a_model_of_another_format_is_refused_in_a_sentence(gguf: str, checkpoint: str) -> None:
    for name in ("vllm", "sglang", "transformers", "tensorrt-llm"):
        told = engines.driver(name).unfit(gguf)
        assert told is not None
        assert f"{name} takes a folder as Hugging Face's" in told
        assert f"and {gguf} is none" in told
        assert engines.driver(name).unfit("org/a-model") is None  # a name on the hub
        assert "is not there" in (engines.driver(name).unfit("no/such/folder") or "")
    assert "llama.cpp takes a .gguf file" in (engines.driver("llama.cpp").unfit(checkpoint) or "")
    assert "openvino_model.xml" in (engines.driver("openvino").unfit(checkpoint) or "")
    assert engines.driver("tailrace").unfit(checkpoint) is None
    assert "There is no" in (engines.driver("tailrace").unfit("no/such.gguf") or "")


@pytest.mark.parametrize("name", OTHERS)
def test_an_engine_that_is_not_there_is_said_by_name_and_with_how_it_is_found(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    driver = engines.driver(name)
    with pytest.raises(NotFound, match=rf"{name} is not installed: no \S+ on PATH.*--engine-path {name}=PATH"):
        driver.find(None)
    with pytest.raises(NotFound, match=f"{name}: /no/such is no file that can be run"):
        driver.find("/no/such")
    with pytest.raises(NotFound, match=f"{name}: there is no|{name}: .* is no virtual environment"):
        driver.find(str(tmp_path))


def test_programs_on_path_and_packages_of_an_interpreter_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama = peers.install(tmp_path, "llama.cpp")
    monkeypatch.setenv("PATH", f"{llama / 'bin'}:/usr/bin:/bin")
    assert engines.driver("llama.cpp").find(None).where == str(llama / "bin/llama-server")
    venv = peers.install(tmp_path, "vllm")
    script = venv / "bin/vllm"
    script.write_text(f"#!{venv}/bin/python\n")
    script.chmod(0o755)
    for given in (str(script), str(venv / "bin/python"), str(venv)):
        assert engines.driver("vllm").find(given).argv[0] == str(venv / "bin/python")
    with pytest.raises(NotFound, match=r"sglang: .*vllm/bin/python has no module sglang"):
        engines.driver("sglang").find(str(venv))
    here = finding.package("pytest", sys.executable, "pytest", ("pytest",), "pytest")
    assert here.version == pytest.__version__
    lonely = tmp_path / "lonely"
    lonely.write_text("#!/bin/sh\n")
    lonely.chmod(0o755)
    with pytest.raises(NotFound, match="names no python in its first line"):
        engines.driver("vllm").find(str(lonely))


def test_there_is_no_engine_of_another_name() -> None:
    with pytest.raises(InvalidInput, match=r"there is no engine called 'ollama': tailrace, llama.cpp"):
        engines.driver("ollama")
