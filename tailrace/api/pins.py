"""Pinned prefixes: the files that a server is given, as token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tailrace.terms import InvalidInput

if TYPE_CHECKING:
    from tailrace.text import Text


def read(files: Sequence[str], text: Callable[[], Text]) -> tuple[tuple[int, ...], ...]:
    """The token ids of each file. It is a JSON list of them, or text that is tokenized as it stands: control tokens
    that are spelled in it are such, and nothing is added, neither a BOS nor a template. `text` is called only where
    there is text. Raises InvalidInput, naming the file."""
    return tuple(_read(file, text) for file in files)


def _read(file: str, text: Callable[[], Text]) -> tuple[int, ...]:
    try:
        content = Path(file).expanduser().read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"--kv-pin {file} cannot be read: {error}", param="kv_pin") from error
    if not content.strip():
        raise InvalidInput(f"--kv-pin {file} is empty: there is nothing to keep", param="kv_pin")
    listed = _list(content)
    if listed is None:
        return tuple(text().encode(content, add_bos=False, parse_special=True))
    if not all(type(token) is int and 0 <= token < 1 << 31 for token in listed):
        raise InvalidInput(f"--kv-pin {file} is a JSON list, but not one of token ids", param="kv_pin")
    return tuple(listed)


def _list(content: str) -> list[int] | None:
    """What is in a JSON list; None where the text is something else."""
    try:
        found = msgspec.json.decode(content)
    except msgspec.DecodeError:
        return None
    return found if isinstance(found, list) else None
