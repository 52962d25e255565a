"""The command line in a process of its own, and a stand-in for the server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.standin import StandIn, serving

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def standin() -> Iterator[StandIn]:
    with serving(StandIn()) as running:
        yield running


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment without the tester's own settings, and with an empty cache and catalogue."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("TAILRACE_", "_TAILRACE"))}
    return {
        **clean, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "COLUMNS": "120", "NO_COLOR": "1",
        "TERM": "dumb", "TAILRACE_CACHE": str(tmp_path / "cache"), "TAILRACE_CATALOGUE": str(tmp_path / "none.toml"),
        "TAILRACE_LEDGER": str(tmp_path / "ledger.db"),
    }  # fmt: skip


@pytest.fixture
def run(environment: dict[str, str]) -> Run:
    """Runs `tailrace ARGUMENTS` to its end."""

    def call(*arguments: str, text: str = "", **extra: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "tailrace.cli", *arguments], input=text, capture_output=True, text=True,
            env={**environment, **extra}, timeout=300, check=False,
        )  # fmt: skip

    return call
