"""A short run of what `make fuzz` does for longer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.api import fuzz

PHASES = "examples,coverage,fuzzing"


@pytest.mark.parametrize(
    ("server", "scope", "least"),
    [(fuzz.generating, fuzz.GENERATING, 1500), (fuzz.reading, fuzz.READING, 300)],
    ids=["generating", "reading"],
)
def test_no_call_breaks_the_server_or_gets_what_the_document_does_not_say(
    tmp_path: Path, server: fuzz.Server, scope: list[str], least: int
) -> None:
    with server(tmp_path) as running:
        ended = fuzz.fuzz(running, *scope, "--phases", PHASES, "--seed", "1", "--max-examples", "3")
        assert ended.returncode == 0, ended.stdout + ended.stderr
        found = re.search(r"(\d+) generated, (\d+) passed", ended.stdout)
        assert found, ended.stdout
        assert int(found[1]) == int(found[2]) > least
        assert fuzz.lives(running)
        assert any(status.endswith(" 200") for status in fuzz.answers(running))
