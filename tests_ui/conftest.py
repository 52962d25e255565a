"""A server with real weights and a dashboard, and a browser that looks at it.

`TAILRACE_PYTHON` is the interpreter that has Tailrace, its model pulled already.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, ViewportSize, expect, sync_playwright

HERE = Path(__file__).parent
PYTHON = Path(os.environ.get("TAILRACE_PYTHON", HERE.parent / ".venv" / "bin" / "python")).absolute()
SHOTS = os.environ.get("TAILRACE_SHOTS")
"""A directory for pictures of every page; none are made where it is not given."""
EVIL = "<img src=x onerror=alert(1)>"
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--disable-quic", "--no-zygote",
]  # fmt: skip
SIZES = {"laptop": ViewportSize(width=1280, height=800), "phone": ViewportSize(width=390, height=844)}

expect.set_options(timeout=30_000)
_spec = importlib.util.spec_from_file_location("browser", HERE / "browser.py")
assert _spec is not None
assert _spec.loader is not None
browsers = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(browsers)


@dataclass
class Running:
    """A `tailrace` that serves pages; `root` is where."""

    process: subprocess.Popen[str]
    root: str
    said: list[str] = field(default_factory=list)

    def complete(self, prompt: str, **headers: str) -> str:
        """Asks for a few tokens; the id of the answer."""
        body = {"model": "smol", "prompt": prompt, "max_tokens": 6, "temperature": 0}
        asked = urllib.request.Request(
            f"{self.root}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json", **headers}
        )
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return str(json.load(answer)["id"])

    def stop(self) -> None:
        """Ends it at once."""
        self.process.kill()
        self.process.wait()


@contextmanager
def tailrace(*arguments: str, port: int = 0) -> Iterator[Running]:
    """`tailrace ARGUMENTS` on a free port, or on this one."""
    command = [str(PYTHON), "-m", "tailrace.cli", *arguments, "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as child:
        try:
            assert child.stdout is not None
            said: list[str] = []
            for line in child.stdout:
                said.append(line)
                if found := re.search(r"Dashboard.*: (http://[\d.:]+)/ui", line):
                    yield Running(child, found[1], said)
                    break
            else:
                pytest.fail(f"it ended: {''.join(said)}")
        finally:
            child.terminate()
            child.stdout.close()


SERVE = ("serve", "smollm2-135m", "--ui", "--served-name", "smol", "--kv-tokens", "4096", "--no-log-requests")


@pytest.fixture(scope="session")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ledger") / "ledger.db"


@pytest.fixture(scope="session")
def server(ledger: Path) -> Iterator[Running]:
    """One with three requests in its ledger, of which one has a workload with a nasty name."""
    with tailrace(*SERVE, "--ledger", str(ledger), "--slo", "ttft=30s") as running:
        for workload in ("chat", EVIL, "chat"):
            running.complete("Rivers are", **{"x-tailrace-workload": workload})
        yield running


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    path = browsers.found()
    assert path is not None, "no browser: python tests_ui/browser.py fetches one"
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=path, args=FLAGS, env=browsers.environment())
        yield browser
        browser.close()


class Tab:
    """A page, and everything that went wrong in it or was asked of somebody else."""

    def __init__(self, page: Page, root: str) -> None:
        self.page = page
        self.root = root
        self.faults: list[str] = []
        page.set_default_timeout(30_000)
        page.on("console", lambda said: self.faults.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        page.on("dialog", lambda dialog: (self.faults.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda asked: None if asked.url.startswith(f"{root}/") else self.faults.append(asked.url))

    def open(self, place: str = "#/") -> Page:
        """Goes to a page of the dashboard."""
        self.page.goto(f"{self.root}/ui{place}")
        self.page.wait_for_selector(".page")
        return self.page

    def picture(self, name: str) -> None:
        """Takes one, where they are wanted."""
        if SHOTS:
            Path(SHOTS).mkdir(parents=True, exist_ok=True)
            self.page.screenshot(path=f"{SHOTS}/{name}.png")


@contextmanager
def tab(browser: Browser, running: Running, **options: Any) -> Iterator[Tab]:
    """A tab of its own; its faults fail the test."""
    context = browser.new_context(**{"viewport": SIZES["laptop"], **options})
    made = Tab(context.new_page(), running.root)
    yield made
    context.close()
    assert made.faults == []


def until(holds: Any, what: str, seconds: float = 60.0) -> Any:
    """Waits until it holds."""
    end = time.monotonic() + seconds
    while not (value := holds()):
        assert time.monotonic() < end, f"waited {seconds} s for: {what}"
        time.sleep(0.05)
    return value
