"""Servers with real weights for other people's clients, which run in an environment without Tailrace.

`TAILRACE_PYTHON` is the interpreter that has Tailrace, its models pulled already.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PYTHON = Path(os.environ.get("TAILRACE_PYTHON", HERE.parent / ".venv" / "bin" / "python")).absolute()
MODEL = "smol"
EMBEDDER = "minilm"


@dataclass(frozen=True)
class Place:
    """Where a server is, and what it serves."""

    root: str
    model: str

    @property
    def base(self) -> str:
        """The base URL of OpenAI's clients."""
        return f"{self.root}/v1"


@contextmanager
def serving(model: str, name: str, *options: str) -> Iterator[Place]:
    """`tailrace serve` on a free port."""
    command = [str(PYTHON), "-m", "tailrace.cli", "serve", model, "--port", "0", "--served-name", name, *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as child:
        try:
            assert child.stdout is not None
            said: list[str] = []
            for line in child.stdout:
                said.append(line)
                if found := re.search(r"Serving on (http://[\d.:]+)", line):
                    yield Place(found[1], name)
                    break
            else:
                pytest.fail(f"the server ended: {''.join(said)}")
        finally:
            child.terminate()
            child.stdout.close()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """SmolLM2-135M with a chat template that knows tools, and a content store."""
    folder = tmp_path_factory.mktemp("content")
    options = ["--kv-tokens", "16384", "--no-log-requests", "--content-store", f"sqlite:////{folder}/content.db"]
    with serving("smollm2-135m", MODEL, "--chat-template", "hermes", *options) as place:
        yield place


@pytest.fixture(scope="session")
def embedder() -> Iterator[Place]:
    """MiniLM."""
    with serving("minilm", EMBEDDER, "--no-log-requests") as place:
        yield place
