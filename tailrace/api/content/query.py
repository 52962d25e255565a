"""The query of a request: each parameter used, or refused by name."""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import parse_qsl

from tailrace.api.content.shelf import Filter, Kind, Order
from tailrace.api.exchange import Exchange
from tailrace.terms import InvalidInput

MOST_FIELDS = 64


class Query:
    """What stands behind the ? of a request's target."""

    def __init__(self, exchange: Exchange, known: Collection[str], *, labels: bool = False) -> None:
        """`labels`: metadata[NAME]=VALUE may be given, any number of times. Raises InvalidInput for any other name that
        is not known, and for one that is given twice."""
        self.values: dict[str, str] = {}
        self.labels: dict[str, str] = {}
        try:
            rows = parse_qsl(exchange.query.decode("latin-1"), keep_blank_values=True, max_num_fields=MOST_FIELDS)
        except ValueError:
            raise InvalidInput(f"the query has more than {MOST_FIELDS} parameters") from None
        for name, value in rows:
            if labels and name.startswith("metadata[") and name.endswith("]"):
                self.labels[name[9:-1]] = value
            elif name not in known:
                raise InvalidInput(f"unknown parameter: {name[:64]}", param=name[:64], code="unknown_parameter")
            elif name in self.values:
                raise InvalidInput(f"{name} is given twice", param=name)
            else:
                self.values[name] = value

    def limit(self, default: int = 20, most: int = 100) -> int:
        """`limit`: how many entries a page has. Raises InvalidInput."""
        text = self.values.get("limit", str(default))
        number = int(text) if text.isascii() and text.isdigit() and len(text) < 9 else 0
        if not 1 <= number <= most:
            raise InvalidInput(f"limit must be between 1 and {most}, not {text[:32]}", param="limit")
        return number

    def order(self, default: Order) -> Order:
        """`order`. Raises InvalidInput."""
        match self.values.get("order", default):
            case "asc":
                return "asc"
            case "desc":
                return "desc"
            case other:
                raise InvalidInput(f'order must be "asc" or "desc", not {other[:32]!r}', param="order")

    def page(self, kind: Kind, tenant: str, order: Order, *, most: int = 100, default: int = 20) -> Filter:
        """Which objects are asked for. Raises InvalidInput."""
        return Filter(
            kind,
            tenant,
            self.limit(default, most),
            self.values.get("after"),
            self.order(order),
            self.values.get("model"),
            self.labels or None,
        )
