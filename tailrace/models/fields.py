"""Strict reading of a model's configuration: every value is checked, and what is not understood is refused by name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tailrace.terms import ModelError

LIMIT = 1 << 31
"""No size in a model's configuration is this large."""

LARGEST = 1e18
"""No number is; arithmetic in float32 must not overflow."""


class Fields:
    """A configuration object, read field by field. `where` is named in errors. An absent field is the same as null."""

    def __init__(self, where: str, values: dict[str, Any]) -> None:
        self.where = where
        self.values = values

    def refuse(self, field: str, why: str) -> ModelError:
        """The error to raise about a field."""
        return ModelError(f"{self.where}: {field} {why}")

    def has(self, field: str) -> bool:
        return self.values.get(field) is not None

    def count(self, field: str, default: int | None = None, *, most: int = LIMIT) -> int:
        """A whole number above zero and at most `most`."""
        value = self.values.get(field)
        if value is None:
            value = default
        if value is None:
            raise self.refuse(field, "is missing")
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not int or not 0 < value <= most:
            raise self.refuse(field, f"is {_short(value)}; expected a whole number from 1 to {most}")
        return value

    def number(self, field: str, default: float | None = None, *, zero: bool = False) -> float:
        """A finite number above zero (or zero too)."""
        value = self.values.get(field)
        if value is None:
            value = default
        if value is None:
            raise self.refuse(field, "is missing")
        bad = type(value) not in (int, float) or not abs(value) < LARGEST
        if bad or value < 0 or (value == 0 and not zero):
            raise self.refuse(field, f"is {_short(value)}; expected a number above zero")
        return float(value)

    def flag(self, field: str, default: bool) -> bool:
        value = self.values.get(field)
        if value is None:
            return default
        if type(value) is not bool:
            raise self.refuse(field, f"is {_short(value)}; expected true or false")
        return value

    def text(self, field: str, default: str | None = None) -> str:
        value = self.values.get(field)
        if value is None:
            value = default
        if not isinstance(value, str):
            raise self.refuse(field, "is missing" if value is None else f"is {_short(value)}; expected a name")
        return value

    def only(self, field: str, *allowed: Any) -> None:
        """Refuses a field that says anything but null or one of these values: the rest would change the numbers."""
        value = self.values.get(field)
        if value is not None and not any(type(value) is type(one) and value == one for one in allowed):
            known = " or ".join(repr(one) for one in allowed) or "to be absent"
            raise self.refuse(field, f"is {_short(value)}, which is not supported; expected {known}")

    def absent(self, fields: Iterable[str]) -> None:
        """Refuses these fields unless they are off: absent, null, false, zero, or empty."""
        for field in fields:
            if self.values.get(field):
                raise self.refuse(field, f"is {_short(self.values[field])}, which is not supported")


def _short(value: Any) -> str:
    """A value as the message shows it: a large integer or a long list must not make a long message."""
    if type(value) is int and abs(value) > 1 << 64:
        return "an absurdly large number"
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."
