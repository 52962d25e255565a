"""Adapters through a real server: chosen by the model's name, loaded and unloaded by an operator while requests run."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tailrace.api import adapters, aside
from tailrace.api.adapters import Adapters
from tailrace.api.errors import HttpError
from tailrace.api.generation import refusal
from tailrace.api.settings import Settings, Timeouts
from tailrace.engine.protocol import Output
from tailrace.engine.spec import AdapterSpec, EngineSpec
from tailrace.models import Model, load_model, open_checkpoint
from tests.api.conftest import Running, launch, serving, until
from tests.models import random_llama, random_lora

USER = {"authorization": "Bearer user"}
OPERATOR = {"authorization": "Bearer operator"}
BODY: dict[str, Any] = {"prompt": "abcdefgh" * 6, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
LONG = {"max_tokens": 300}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_llama.write(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return load_model(open_checkpoint(folder), max_context=64)


@pytest.fixture(scope="module")
def shelf(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory from below which adapters may be loaded; beside it lies one that is out of reach."""
    root = tmp_path_factory.mktemp("shelf") / "in"
    for name, seed in (("one", 1), ("two", 2), ("deep/three", 3)):
        random_lora.make(root / name, model, seed)
    random_lora.write(root / "dora", random_lora.tensors(model, 4), random_lora.config(use_dora=True))
    outside = random_lora.make(root.parent / "outside", model, 5)
    (root / "link").symlink_to(outside)
    pipe = random_lora.make(root / "pipe", model, 6) / "adapter_model.safetensors"
    pipe.unlink()
    os.mkfifo(pipe)
    (root / "half").mkdir()
    for file in outside.iterdir():
        (root / "half" / file.name).symlink_to(file)
    return root


def settings(folder: Path, shelf: Path, **more: Any) -> dict[str, Any]:
    made = {"model": str(folder), "loader": "", "served_names": ["tiny"], "kv_tokens": 4096, "draft_tokens": 0}
    keys = {"api_keys": ["user"], "admin_keys": ["operator"]}
    return made | keys | {"lora_dir": str(shelf), "loras": [("first", str(shelf / "one"))], **more}


@pytest.fixture(scope="module")
def server(folder: Path, shelf: Path) -> Iterator[Running]:
    with serving(**settings(folder, shelf, max_loras=3)) as running:
        yield running


def ask(server: Running, name: str, status: int = 200, **more: Any) -> Any:
    answer = server.post("/v1/completions", {**BODY, "model": name, **more}, headers=USER)
    assert answer.status_code == status, answer.text
    return answer.json()


def text(server: Running, name: str, **more: Any) -> str:
    answer = ask(server, name, **more)
    assert answer["model"] == name
    return str(answer["choices"][0]["text"])


def load(server: Running, name: str, path: str, status: int = 200, **more: Any) -> Any:
    body = {"lora_name": name, "lora_path": path, **more}
    answer = server.post("/v1/load_lora_adapter", body, headers=OPERATOR)
    assert answer.status_code == status, answer.text
    return answer.json()


def unload(server: Running, name: str, status: int = 200) -> Any:
    answer = server.post("/v1/unload_lora_adapter", {"lora_name": name}, headers=OPERATOR)
    assert answer.status_code == status, answer.text
    return answer.json()


def names(server: Running) -> list[str]:
    return [card["id"] for card in server.get("/v1/models", headers=USER).json()["data"]]


@pytest.fixture(scope="module")
def texts(server: Running) -> dict[str, str]:
    """What the model says without an adapter, with "first", and with the other two."""
    load(server, "second", "two")
    load(server, "third", "deep/three")
    found = {name: text(server, name) for name in ("tiny", "first", "second", "third")}
    unload(server, "second")
    unload(server, "third")
    assert len(set(found.values())) == 4
    return found


def test_the_report_and_the_list_of_models_have_each(server: Running, texts: dict[str, str]) -> None:
    report = "".join(server.lines)
    assert "adapters: first (rank 8, " in report
    assert "; at most 3" in report
    cards = server.get("/v1/models", headers=USER).json()["data"]
    assert [(card["id"], card["parent"]) for card in cards] == [("tiny", None), ("first", "tiny")]
    assert server.client("user").models.retrieve("first").to_dict()["parent"] == "tiny"


def test_every_endpoint_that_takes_a_model_takes_an_adapters_name(server: Running, texts: dict[str, str]) -> None:
    client = server.client("user")
    made = client.completions.create(model="first", **{k: v for k, v in BODY.items() if k != "ignore_eos"})
    assert made.model == "first"
    streamed = client.completions.create(
        model="first", prompt=BODY["prompt"], max_tokens=12, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    assert "".join(chunk.choices[0].text for chunk in streamed) == texts["first"]
    ids = server.post("/tokenize", {"model": "first", "prompt": "abc"}, headers=USER).json()["tokens"]
    assert server.post("/detokenize", {"model": "first", "tokens": ids}, headers=USER).status_code == 200
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="fourth", prompt="a")


def test_a_grammar_and_an_adapter_go_together(server: Running, texts: dict[str, str]) -> None:
    found = {
        name: text(server, name, guided_regex="[a-e]{20}", max_tokens=40, ignore_eos=False)
        for name in ("tiny", "first")
    }
    assert all(len(one) == 20 and set(one) <= set("abcde") for one in found.values())
    assert found["tiny"] != found["first"]


def test_cached_prompts_are_each_adapters_own(server: Running, texts: dict[str, str]) -> None:
    prompt = "zyxw" * 16

    def cached(name: str) -> int:
        return int(ask(server, name, prompt=prompt)["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [cached(name) for name in ("tiny", "first", "tiny", "first")] == [0, 0, 64, 64]
    load(server, "first", "two", load_inplace=True)
    assert cached("first") == 0
    load(server, "first", "one", load_inplace=True)
    assert cached("first") == 64


def test_many_at_once_get_what_each_gets_alone(server: Running, texts: dict[str, str]) -> None:
    load(server, "second", "two")
    load(server, "third", "deep/three")
    order = ["tiny", "first", "second", "third"] * 5
    with ThreadPoolExecutor(len(order)) as pool:
        assert list(pool.map(lambda name: text(server, name), order)) == [texts[name] for name in order]
    load(server, "fourth", "two", 400)
    unload(server, "second")
    unload(server, "third")


def test_unloading_lets_streams_end_and_gives_the_room_back(server: Running, texts: dict[str, str]) -> None:
    load(server, "second", "two")
    load(server, "third", "two")
    whole = text(server, "second", **LONG)
    with server.http(headers=USER) as client:
        body = {**BODY, **LONG, "model": "second", "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            assert unload(server, "second")["status"] == "ok"
            assert ask(server, "second", 404)["error"]["code"] == "model_not_found"
            assert names(server) == ["tiny", "first", "third"]
            assert any(line == "data: [DONE]" for line in lines)
    assert text(server, "third", **LONG) == whole
    until(lambda: "error" not in load_or_not(server, "again", "deep/three"), "room for another adapter")
    assert text(server, "again") == texts["third"]
    for name in ("again", "third"):
        unload(server, name)
    assert unload(server, "third", 404)["error"]["param"] == "lora_name"


def load_or_not(server: Running, name: str, path: str) -> Any:
    body = {"lora_name": name, "lora_path": path}
    return server.post("/v1/load_lora_adapter", body, headers=OPERATOR).json()


@pytest.mark.parametrize(
    ("name", "path", "param", "message"),
    [
        ("x", "none", "lora_path", "no such directory"),
        ("x", "dora", "lora_path", "use_dora is True, which is not supported"),
        ("x", "../outside", "lora_path", "leads out of the directory"),
        ("x", "link", "lora_path", "leads out of the directory"),
        ("x", "half", "lora_path", "leads out of the directory"),
        ("x", "/etc", "lora_path", "leads out of the directory"),
        ("x", "pipe", "lora_path", "adapter_model.safetensors: not a regular file"),
        ("x", "a\0b", "lora_path", "is not a path"),
        ("x", "one/adapter_config.json", "lora_path", "no such directory"),
        ("tiny", "one", "lora_name", "is the name of the model itself"),
        ("first", "two", "lora_name", "there is an adapter 'first' already"),
        ("", "one", "lora_name", "1 to 128 letters"),
        ("a b", "one", "lora_name", "1 to 128 letters"),
        ("x" * 200, "one", "lora_name", "1 to 128 letters"),
    ],
)
def test_what_cannot_be_loaded_is_refused_by_name(
    server: Running, name: str, path: str, param: str, message: str
) -> None:
    error = load(server, name, path, 400)["error"]
    assert error["param"] == param
    assert message in error["message"]
    assert names(server) == ["tiny", "first"]


def test_only_an_operator_may_and_only_where_there_is_a_directory(server: Running, quick: Running) -> None:
    for path, body in (
        ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "one"}),
        ("/v1/unload_lora_adapter", {"lora_name": "first"}),
    ):
        assert server.post(path, body, headers=USER).status_code == 403
        assert server.post(path, body).status_code == 401
        assert quick.post(path, body).status_code in (401, 403)
        assert server.post(path, {**body, "lora_int_id": 3}, headers=OPERATOR).status_code == 400
    assert names(server) == ["tiny", "first"]


def test_what_is_in_use_can_be_seen(server: Running, texts: dict[str, str]) -> None:
    state = server.get("/admin/state", headers=OPERATOR).json()["adapters"]
    assert [(row["name"], row["rank"], len(row["digest"])) for row in state] == [("first", 8, 64)]
    assert server.metric_of(OPERATOR, "tailrace_lora_requests", adapter="first", state="running") == 0
    assert server.metric_of(OPERATOR, "vllm:lora_requests_info", max_lora="3", running_lora_adapters="") > 0
    until(lambda: any(line.get("adapter") == "first" for line in server.requests()), "a line that names the adapter")


def test_adapters_outlive_the_engine_and_its_sleep(
    server: Running, folder: Path, shelf: Path, texts: dict[str, str], tmp_path: Path
) -> None:
    own = tmp_path / "own"
    shutil.copytree(shelf / "one", own / "one")
    shutil.copytree(shelf / "two", own / "two")
    with serving(**settings(folder, own, loras=[("first", str(own / "one"))])) as other:
        load(other, "second", "two")
        assert other.post("/admin/sleep", {}, headers=OPERATOR).status_code == 200
        assert load(other, "third", "two", 503)["error"]["code"] == "asleep"
        assert other.post("/admin/wake", {}, headers=OPERATOR).status_code == 200
        assert {name: text(other, name) for name in ("tiny", "first", "second")} == {
            name: texts[name] for name in ("tiny", "first", "second")
        }
        shutil.rmtree(own / "two")
        os.kill(other.engine, signal.SIGKILL)
        until(lambda: other.metric_of(OPERATOR, "tailrace_engine_restarts_total") == 1, "another engine")
        until(lambda: other.metric_of(OPERATOR, "tailrace_engine_up") == 1, "it to be ready")
        assert text(other, "first") == texts["first"]
        assert ask(other, "second", 404)["error"]["code"] == "model_not_found"
        assert names(other) == ["tiny", "first"]
        assert any("the adapter second is no longer served" in line for line in other.log)


def test_an_adapter_that_went_while_a_request_was_on_its_way_is_a_model_that_is_not_found() -> None:
    error = refusal(Output("r", finish="error", error="adapter_not_loaded: the adapter was unloaded"))
    assert (error.status, error.param, error.code) == (404, "model", "model_not_found")


def test_a_server_does_not_start_without_an_adapter_that_it_is_to_have(folder: Path, shelf: Path) -> None:
    running = launch(**settings(folder, shelf, loras=[("bad", str(shelf / "dora"))]))
    assert running.wait() == 1
    said = "".join([*running.lines, *running.log])
    assert "an adapter (--lora) cannot be served" in said
    assert "use_dora" in said


class Silent:
    """An engine that never says what has become of an adapter."""

    def __init__(self) -> None:
        self.spec = EngineSpec("m", lora_seconds=0.1)
        self.asked: list[AdapterSpec] = []
        self.on_adapters: Any = None

    async def load_adapter(self, adapter: AdapterSpec) -> Any:
        self.asked.append(adapter)
        async with asyncio.timeout(self.spec.lora_seconds):
            await asyncio.Event().wait()


def test_a_load_waits_for_files_only_so_long(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = threading.Event()
    engine = Silent()
    own = Settings("m", lora_dir=str(shelf), admin_keys=("k",), timeouts=Timeouts(lora=0.1))

    async def refused(named: Adapters) -> HttpError:
        with pytest.raises(HttpError) as error:
            await named.load("a", "one")
        assert (error.value.status, error.value.code, error.value.param) == (503, "timeout", "lora_path")
        return error.value

    async def main() -> None:
        named = Adapters(own, engine)  # type: ignore[arg-type]  # as much of a client as it takes
        assert "within 0.1 s (--lora-timeout)" in str(await refused(named))  # by the engine
        assert len(engine.asked) == 1
        monkeypatch.setattr(adapters, "inside", lambda _root, _path: free.wait(60))
        for _ in range(aside.MOST):  # nor even a look at the directory
            await refused(named)
        with pytest.raises(HttpError, match="does not answer"):  # at once: nobody can end those threads
            await named.load("a", "one")
        free.set()
        while any(thread.name == aside.NAME for thread in threading.enumerate()):
            await asyncio.sleep(0.01)
        assert len(engine.asked) == 1

    asyncio.run(main())
    free.set()
