"""JSON files of a checkpoint, read strictly: UTF-8, an object at the top, no key twice."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from tailrace.terms import ModelError


def parse_object(path: Path, raw: bytes) -> dict[str, Any]:
    """The JSON object in `raw`. Raises ModelError naming `path` (and the key that appears twice)."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            counts = Counter(key for key, _ in pairs)
            raise ModelError(f"{path}: {counts.most_common(1)[0][0]} appears twice")
        return result

    try:
        parsed = json.loads(str(raw, "utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:  # bad UTF-8, bad JSON, absurd numbers or nesting
        raise ModelError(f"{path}: not valid JSON ({str(error)[:120]})") from error
    if not isinstance(parsed, dict):
        raise ModelError(f"{path}: expected a JSON object, found {type(parsed).__name__}")
    return parsed


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ModelError when it is missing, unreadable or wrong."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror or error})") from error
    return parse_object(path, raw)
