"""A page of metrics in Prometheus' text format, as far as gauges and counters are asked of it."""

from __future__ import annotations

import math
import re

_LINE = re.compile(r"([A-Za-z_:][A-Za-z0-9_:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?\s*")
_LABEL = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"')


def parse(text: str, names: tuple[str, ...]) -> dict[str, dict[str, float]]:
    """The values of these metrics by name, and by their labels as written. What is no number is left out."""
    found: dict[str, dict[str, float]] = {}
    for line in text.splitlines():
        parts = _LINE.fullmatch(line) if line.startswith(names) else None
        if parts is None or parts[1] not in names:
            continue
        try:
            value = float(parts[3])
        except ValueError:
            continue
        if not math.isnan(value):
            found.setdefault(parts[1], {})[parts[2] or ""] = value
    return found


def label(labels: str, name: str) -> str | None:
    """The value of one of the labels that `parse` gives."""
    return next((value for key, value in _LABEL.findall(labels) if key == name), None)
