"""What somebody knows of an index who hears its events and nothing else."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

from tailrace.kv.events import Event
from tailrace.kv.prefix import PrefixIndex, page_digest
from tests.kv.support import ROOT

Pages = dict[bytes, tuple[bytes | None, bytes]]
"""By digest: the digest of the page before (None: it is the first), and the token ids."""


class View:
    """Folds events as they come off the wire: arrays that begin with a name. Checks that they make sense."""

    def __init__(self) -> None:
        self.pages: Pages = {}

    def fold(self, events: Iterable[list[Any]]) -> None:
        for event in events:
            match event:
                case ["BlockStored", hashes, parent, tokens, size, None, "CPU"]:
                    assert len(tokens) == size * len(hashes) > 0
                    for at, digest in enumerate(hashes):
                        assert parent is None or parent in self.pages, "a page after one that is not known"
                        page = array("i", tokens[at * size : (at + 1) * size]).tobytes()
                        assert parent is None or digest == page_digest(parent, page)
                        self.pages[digest] = (parent, page)
                        parent = digest
                case ["BlockRemoved", hashes, "CPU"]:
                    for digest in hashes:
                        self.pages.pop(digest, None)
                case ["AllBlocksCleared"]:
                    self.pages.clear()
                case _:
                    raise AssertionError(f"no event: {event}")


def on_the_wire(events: Iterable[Event]) -> list[list[Any]]:
    import msgspec

    return msgspec.msgpack.decode(msgspec.msgpack.encode(list(events)))  # type: ignore[no-any-return]


def content(index: PrefixIndex) -> Pages:
    """What an index really holds."""
    found: Pages = {}
    for node in index.nodes():
        parent = node.parent
        assert parent is not None
        found[node.digest] = (parent.digest if parent.parent is not None else None, node.tokens)
    return found


def known_roots(index: PrefixIndex) -> set[bytes]:
    return {node.tree.root.digest for node in index.nodes()} | {ROOT}
