"""A model's configuration, read so that nothing in it goes unnoticed: what no rule has asked for is an error."""

from __future__ import annotations

from typing import Any

from tailrace.models.fields import Fields
from tailrace.terms import ModelError
from tailrace.twin.shapes.harmless import HARMLESS, OFF, PREFIXES, SUFFIXES


class _Watched(dict[str, Any]):
    """A dictionary that remembers which keys were asked for."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.asked: set[str] = set()
        self.instead: dict[str, Any] = {}

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return self.instead.get(key, super().get(key, default))


class Reader(Fields):
    """`Fields` that knows what it was asked for, and what it had to assume.

    A field may have several names, in one text: "num_experts|n_routed_experts". Files that have more than one of them
    must mean the same by them.
    """

    def __init__(self, where: str, values: dict[str, Any]) -> None:
        self._watched = _Watched(values)
        super().__init__(where, self._watched)
        self.assumed: dict[str, Any] = {}
        self._children: dict[str, Reader] = {}
        self._layered: set[str] = set()

    def raw(self, field: str, default: Any = None) -> Any:
        """A value as it stands; None and absent are the same."""
        found = {name: self._watched.get(name) for name in field.split("|")}
        said = {name: value for name, value in found.items() if value is not None}
        values = list(said.values())
        if any(value != values[0] for value in values[1:]):
            raise ModelError(f"{self.where}: {' and '.join(said)} say different things: {str(values)[:80]}")
        if not values:
            return default
        return values[0]

    def count(self, field: str, default: int | None = None, *, most: int = 1 << 31) -> int:
        return super().count(self._assume(field, default), default, most=most)

    def flag(self, field: str, default: bool) -> bool:
        """As `Fields` has it. What is on where the file does not say so is kept to be said."""
        name = self._assume(field, True) if default else self._name(field)
        return super().flag(name, default)

    def text(self, field: str, default: str | None = None) -> str:
        return super().text(self._name(field), default)

    def size(self, field: str, default: int | None = None) -> int:
        """As `count`, but zero is one too: there is none of it."""
        value = self.raw(field)
        if value == 0 and type(value) is int:
            return 0
        if value is None and default == 0:
            return 0
        return self.count(field, default)

    def take(self, field: str, value: int) -> int:
        """What the architecture means where a field is absent, kept to be said."""
        self.assumed[field.split("|")[0]] = value
        return value

    def at(self, field: str, layer: int, layers: int, default: int | None = None) -> int:
        """A size that may be a list of one a layer."""
        value = self.raw(field)
        if not isinstance(value, list):
            return self.size(field, default)
        if len(value) != layers:
            raise self.refuse(field, f"has {len(value)} entries, but there are {layers} layers")
        found = value[layer]
        if not isinstance(found, int) or not 0 <= found < 1 << 31:
            raise self.refuse(field, f"has {str(found)[:40]} for layer {layer}; expected a whole number")
        return int(found)

    def listed(self, field: str, layers: int) -> list[Any] | None:
        """A list with an entry for each layer; None where there is none."""
        value = self.raw(field)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < layers:
            length = len(value) if isinstance(value, list) else "no"
            raise self.refuse(field, f"has {length} entries, but there are {layers} layers")
        return value[:layers]

    def child(self, field: str) -> Reader | None:
        """A nested object; None where there is none."""
        value = self.raw(field)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.refuse(field, f"is {str(value)[:40]}; expected an object")
        if field not in self._children:
            self._children[field] = Reader(f"{self.where}: {field}", value)
        return self._children[field]

    def assumptions(self) -> dict[str, Any]:
        """Fields that are not in the file, with the values that the architecture's own code gives them."""
        made = dict(self.assumed)
        for child in self._children.values():
            made |= child.assumptions()
        return made

    def enter(self, layer: int) -> None:
        """From here on, fields are as `per_layer_config` has them for this layer, where it says something of it."""
        found = (self.raw("per_layer_config") or {}).get(str(layer), {})
        if not isinstance(found, dict):
            raise self.refuse("per_layer_config", f"has {str(found)[:40]} for layer {layer}; expected an object")
        self._layered |= found.keys()
        self._watched.instead = found

    def leave(self) -> None:
        """Fields are as the file has them for the whole model again. Raises ModelError for what no rule has asked
        for."""
        self._watched.instead = {}
        if odd := sorted(name for name in self._layered if name not in self._watched.asked):
            raise self.refuse("per_layer_config", f"has {', '.join(odd)[:200]}, which is not understood")

    def pass_over(self, *fields: str) -> None:
        """These do not matter to this architecture."""
        self._watched.asked.update(fields)

    def unread(self) -> list[str]:
        """Fields that say something, that no rule has asked for, and that are not known to be harmless."""
        here = self.where.rpartition(": ")[2] + "." if self.where.count(": ") else ""
        found = [
            here + name
            for name, value in self._watched.items()
            if name not in self._watched.asked and not _harmless(name, value)
        ]
        return found + [name for child in self._children.values() for name in child.unread()]

    def _name(self, field: str) -> str:
        """The one of a field's names that the file has; the first where it has none."""
        self.raw(field)
        names = field.split("|")
        return next((name for name in names if self.values.get(name) is not None), names[0])

    def _assume(self, field: str, default: int | None) -> str:
        name = self._name(field)
        if default is not None and self.values.get(name) is None:
            self.assumed[name] = default
        return name


def _harmless(name: str, value: Any) -> bool:
    """Whether a field cannot change what is counted here: it is known, or says nothing."""
    return (
        value is None
        or name in HARMLESS
        or (name in OFF and not value)
        or name.startswith(PREFIXES)
        or name.endswith(SUFFIXES)
    )
