"""Documentation is run: every fenced block that is marked `run` in the README and in docs/, against a real server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(bash|python) run\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)")


class Block(NamedTuple):
    """One snippet, and where it stands."""

    place: str
    language: str
    code: str


def blocks() -> list[Block]:
    return [
        Block(f"{page.relative_to(ROOT)}:{text[: found.start()].count(chr(10)) + 1}", found[1], found[2])
        for page in PAGES
        for text in [page.read_text()]
        for found in BLOCK.finditer(text)
    ]


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server's ledger is."""
    return tmp_path_factory.mktemp("ledger") / "ledger.db"


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory, ledger: Path) -> Iterator[str]:
    """`tailrace serve` with the default model and a content store on a free port; its URL."""
    command = [sys.executable, "-m", "tailrace.cli", "serve", "--port", "0", "--kv-tokens", "4096", "--no-log-requests"]
    command += ["--content-store", f"sqlite:////{tmp_path_factory.mktemp('content')}/content.db"]
    command += ["--ledger", str(ledger)]
    clean = {name: value for name, value in os.environ.items() if name != "TAILRACE_API_KEY"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=clean) as child:
        assert child.stdout is not None
        said = []
        for line in child.stdout:
            said.append(line)
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                break
        else:
            pytest.fail(f"the server ended: {''.join(said)}")
        yield found[0]
        child.terminate()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with `tailrace` on its path."""
    place = tmp_path_factory.mktemp("docs")
    script = place / "bin" / "tailrace"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m tailrace.cli "$@"\n')
    script.chmod(0o755)
    return place


@pytest.mark.parametrize("block", blocks(), ids=lambda block: block.place)
def test_the_snippet_runs(block: Block, server: str, folder: Path, ledger: Path) -> None:
    code = block.code.replace("http://127.0.0.1:8000", server).replace("tailrace chat", f"tailrace chat --url {server}")
    code = code.replace("tailrace generate", f"tailrace generate --url {server}")
    command = ["bash", "-euo", "pipefail", "-c", code] if block.language == "bash" else [sys.executable, "-c", code]
    path = os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])
    environment = {
        **os.environ,
        "TAILRACE_LEDGER": str(ledger),
        "PATH": path,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), *sys.path])),
    }
    ended = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip()
    assert '"error"' not in ended.stdout


def test_there_is_something_to_run() -> None:
    assert len(blocks()) >= 5


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        assert (page.parent / link).exists(), link
