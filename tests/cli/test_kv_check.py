"""`tailrace kv check`: says whether what was cached is found, at every tier, and why not where it is not."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tailrace.cli import kvcheck
from tailrace.cli.client import Client, ServerError
from tailrace.cli.kvcheck import Counters, Finding, check
from tailrace.terms import InvalidInput, TailraceError
from tests.api.conftest import Running, serving
from tests.api.test_kv_disk import EAGER
from tests.cli.conftest import Run
from tests.kv.tiers.places import change_all, segment_files


def found(findings: list[Finding]) -> dict[str, str]:
    return {one.about: one.verdict for one in findings}


def text_of(findings: list[Finding], about: str) -> str:
    return next(one.text for one in findings if one.about == about)


def test_memory_and_disk_that_work_are_said_to(run: Run, tmp_path: Path) -> None:
    with serving(**EAGER, kv_disk=str(tmp_path / "kv"), kv_tokens=1024, max_context=1000) as server:
        ended = run("kv", "check", server.url, "--evict", "--tokens", "300")
        assert ended.returncode == 0, ended.stdout + ended.stderr
        lines = ended.stdout.splitlines()
        assert [line.split(":")[0].split(maxsplit=1) for line in lines] == [
            ["ok", "ram"], ["ok", "disk stores"], ["ok", "disk gives back"],
        ]  # fmt: skip
        assert "Filling the pool (1,024 tokens)" in ended.stderr
        ended = run("kv", "check", server.url, "--json")
        report = json.loads(ended.stdout)
        assert report["ok"]
        assert [one["verdict"] for one in report["findings"]] == ["ok", "ok", "skipped"]
        assert "--evict" in report["findings"][-1]["text"]


def test_a_server_that_finds_nothing_fails_and_says_why(run: Run) -> None:
    with serving(prefix_cache=False) as server:
        ended = run("kv", "check", server.url)
    assert ended.returncode == 1
    assert "FAILED  ram: 0 of the" in ended.stdout
    assert "the prefix cache is off" in ended.stdout


def test_tenants_find_nothing_of_each_other(run: Run) -> None:
    with serving(api_keys=["one-key", "another-key"]) as server:
        ended = run("kv", "check", server.url, "--api-key", "one-key", "--other-key", "another-key")
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert "ok      tenant: another key found nothing" in ended.stdout
        ended = run("kv", "check", server.url, "--api-key", "one-key", "--other-key", "one-key")
        assert ended.returncode == 2
        assert "the same key" in ended.stderr
        ended = run("kv", "check", server.url, "--api-key", "wrong")
        assert ended.returncode == 1
        assert "error:" in ended.stderr


def test_without_keys_all_are_one_tenant(quick_server: Running) -> None:
    client = Client(quick_server.url)
    findings = list(check(client, None, other=Client(quick_server.url, key="other")))
    assert found(findings) == {"ram": "ok", "tenant": "skipped", "tiers": "skipped"}


def test_a_model_that_is_not_served_and_a_server_that_is_not_there_are_said(quick_server: Running) -> None:
    with pytest.raises(InvalidInput, match="no model 'other'; it has stand"):
        list(check(Client(quick_server.url), "other"))
    with pytest.raises(TailraceError, match="No server answers"):
        list(check(Client("http://127.0.0.1:9"), None))


@pytest.fixture(scope="module")
def quick_server() -> Any:
    with serving() as server:
        yield server


def test_a_disk_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with serving(**EAGER, kv_disk=str(tmp_path / "kv")) as server:
        shutil.rmtree(tmp_path / "kv")
        findings = list(check(Client(server.url), None))
    assert found(findings) == {"ram": "ok", "disk stores": "failed"}
    assert "cannot be written" in text_of(findings, "disk stores")


@pytest.mark.parametrize(
    ("harm", "said"),
    [(change_all, "have been changed"), (os.unlink, "deleted"), (lambda path: os.truncate(path, 9), "short")],
)
def test_what_a_disk_lost_is_told(harm: Callable[[Path], None], said: str, tmp_path: Path) -> None:
    with serving(**EAGER, kv_disk=str(tmp_path), kv_tokens=512, max_context=480) as server:

        def spoil(_: str) -> None:
            for path in segment_files(tmp_path):
                harm(path)

        findings = list(check(Client(server.url), None, tokens=100, evict=True, say=spoil))
    assert found(findings) == {"ram": "ok", "disk stores": "ok", "disk gives back": "failed"}
    assert said in text_of(findings, "disk gives back")


def test_a_bound_that_is_too_small_is_told(tmp_path: Path) -> None:
    with serving(**EAGER, kv_disk=str(tmp_path), kv_tokens=1024, max_context=480, kv_disk_bytes=20 * 4096) as server:
        findings = list(check(Client(server.url), None, tokens=100, evict=True))
    assert found(findings)["disk gives back"] == "failed"
    assert "no room for them" in text_of(findings, "disk gives back")


class Scripted:
    """A server as the check sees it: `cached` of each answer in turn, and what /metrics says after each."""

    address = "http://127.0.0.1:9"

    def __init__(self, cached: list[int | None], metrics: list[str] | None, tokens: int = 100) -> None:
        self.cached, self.metrics, self.tokens, self.asked = cached, metrics, tokens, 0

    def models(self) -> list[str]:
        return ["m"]

    def get(self, _: str) -> Any:
        return {"data": [{"id": "m"}]}

    def text(self, _: str) -> str:
        if self.metrics is None:
            raise ServerError("not here", status=404)
        return self.metrics[min(self.asked, len(self.metrics) - 1)]

    def post(self, path: str, _: Any) -> Any:
        if path == "/tokenize":
            raise ServerError("not here", status=404)
        cached = self.cached[min(self.asked, len(self.cached) - 1)]
        self.asked += 1
        details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
        return {"usage": {"prompt_tokens": self.tokens, **details}}


def asked(*arguments: Any, **options: Any) -> list[Finding]:
    return list(check(Scripted(*arguments, **options), None))  # type: ignore[arg-type]  # stands in for the client


INFO = 'tailrace_cache_config_info{block_size="16",enable_prefix_caching="True"} 1.0\n'


TIERS = ("disk", "valkey")


def both(**more: dict[str, float]) -> str:
    """/metrics of a server with two tiers and a pool of 64 tokens; `more`: numbers of a tier, or "ram"."""
    lines = [INFO, "tailrace_kv_pages 4.0"]
    for tier in ("ram", *TIERS):
        numbers = {"hits": 0.0, "pages": 9.0} | more.get(tier, {})
        lines.append(f'tailrace_kv_hit_tokens_total{{tier="{tier}"}} {numbers.pop("hits")}')
        lines += [f"tailrace_kv_{tier}_{name} {value}" for name, value in numbers.items() if tier != "ram"]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("tier", "verdicts"), [("disk", ("ok", "skipped")), ("valkey", ("failed", "ok")), ("", ("failed", "failed"))]
)
def test_every_tier_is_judged_by_what_it_gave_itself(tier: str, verdicts: tuple[str, str]) -> None:
    stored = {"ram": {"hits": 96.0}, **{name: {"stored_total": 6.0} for name in TIERS}}
    given = {**stored, tier: {"stored_total": 6.0, "loads_total": 1.0, "hits": 96.0}} if tier else stored
    metrics = [both(), both(), both(**stored), both(**stored), both(**given)]
    client = Scripted([0, 96, 0, 96 if tier else 0], metrics)
    findings = list(check(client, None, evict=True))  # type: ignore[arg-type]  # stands in for the client
    assert found(findings) == {
        "ram": "ok",
        "disk stores": "ok",
        "valkey stores": "ok",
        "disk gives back": verdicts[0],
        "valkey gives back": verdicts[1],
    }


@pytest.mark.parametrize(("state", "said"), [("up", "does not answer"), ("writable", "takes no pages")])
def test_a_valkey_server_that_takes_nothing_is_told(state: str, said: str) -> None:
    metrics = both(ram={"hits": 96.0}, disk={"stored_total": 6.0}, valkey={f"{state}": 0.0})
    findings = asked([0, 96], [both(), both(), metrics])
    assert found(findings) == {"ram": "ok", "disk stores": "ok", "valkey stores": "failed", "disk back": "skipped"}
    assert said in text_of(findings, "valkey stores")


def test_another_makers_server_is_judged_by_its_answers() -> None:
    assert found(asked([0, 64], None)) == {"ram": "ok", "tiers": "skipped"}
    assert found(asked([0, 0], None)) == {"ram": "failed", "tiers": "skipped"}
    assert found(asked([None], None)) == {"ram": "failed"}


def test_hits_that_cannot_be_are_a_failure() -> None:
    assert found(asked([16], [INFO])) == {"new": "failed"}
    findings = asked([0, 96], [INFO])
    assert found(findings)["ram"] == "failed"
    assert "/metrics counts 0" in text_of(findings, "ram")


@pytest.mark.parametrize(
    ("after", "said"),
    [
        ('tailrace_kv_evictions_total{cause="pressure"} 3.0\n', "--kv-tokens"),
        ('tailrace_kv_evictions_total{cause="ttl"} 3.0\n', "--kv-ttl"),
        ('tailrace_kv_evictions_total{cause="quota"} 3.0\n', "--kv-tenant-share"),
        ("tailrace_engine_restarts_total 1.0\n", "started again"),
        ("tailrace_kv_pages 8.0\n", "nothing in /metrics says why"),
    ],
)
def test_why_memory_did_not_have_it_is_told(after: str, said: str) -> None:
    findings = asked([0, 16], [INFO, INFO, INFO + after])
    assert found(findings)["ram"] == "failed"
    assert said in text_of(findings, "ram")


def test_a_prompt_shorter_than_a_page_shows_nothing() -> None:
    assert found(asked([0, 0], [INFO], tokens=16))["ram"] == "skipped"


def test_a_history_without_hits_is_worth_a_word() -> None:
    history = INFO + "tailrace_prefix_cache_queries_total 90000.0\ntailrace_prefix_cache_hits_total 0.0\n"
    findings = asked([0, 0], [history])
    assert findings[0].verdict == "note"
    assert "0.0%" in findings[0].text
    assert "differ at their beginning" in findings[0].text


def test_counters_read_what_prometheus_writes() -> None:
    counters = Counters('# HELP a b\na_total{x="1",y="q\\"z"} 2.0\na_total{x="2"} 3\nb 1e3\n')
    assert counters.get("a_total") == 5
    assert counters.get("a_total", x="2") == 3
    assert counters.get("b") == 1000
    assert counters.get("c") is None
    assert counters.labels("a_total", "x") == ["1", "2"]
    assert kvcheck.risen(Counters(""), counters, "b") == 1000
