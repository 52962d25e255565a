"""The table of what ids spell: saved, loaded, damaged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tailrace.terms import ModelError
from tailrace.text import TokenBytes

TABLE = TokenBytes.build([b"a", b"", b" bc", b"<s>"], [3], 1)


def test_a_table_is_the_same_after_saving(tmp_path: Path) -> None:
    TABLE.save(tmp_path / "t")
    loaded = TokenBytes.load(tmp_path / "t")
    assert [loaded[i] for i in range(-1, 6)] == [b"", b"a", b"", b" bc", b"<s>", b"", b""]
    assert [loaded.is_special(i) for i in range(-1, 6)] == [False, False, False, False, True, False, False]
    assert (len(loaded), loaded.leading, loaded.longest) == (4, 1, 3)


def test_any_damaged_byte_is_noticed(tmp_path: Path) -> None:
    data = TABLE.to_bytes()
    for at in range(len(data)):
        damaged = data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :]
        (tmp_path / "t").write_bytes(damaged)
        with pytest.raises(ModelError, match="damaged"):
            TokenBytes.load(tmp_path / "t")
    for size in range(len(data)):
        with pytest.raises(ModelError):
            TokenBytes.from_bytes(data[:size])


def test_importing_text_imports_neither_tokenizers_nor_jinja2() -> None:
    code = (
        "import sys; from tailrace.text import Detokenizer, StopMatcher, TokenBytes; "
        "assert not {'tokenizers', 'jinja2', 'gguf'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
