"""What has changed in a prefix index, in the KV events of vLLM, by which routers follow what a replica holds.

A batch is a msgpack array (seconds since 1970, events, rank); an event is an array that begins with its name:

- `BlockStored(block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium)`: pages in a row, the first of
  them after the page `parent_block_hash`, or at the beginning of a prompt (null);
- `BlockRemoved(block_hashes, medium)`;
- `AllBlocksCleared()`: nothing is known any more.

`lora_id` is the number of the adapter that the pages were computed with, in the order in which a server has loaded
them. A hash is the page's digest (`prefix.page_digest`). The digest of a tenant's root never leaves the index.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

if TYPE_CHECKING:
    from tailrace.kv.prefix import Node

MEDIUM = "CPU"
"""Where the pages lie, in vLLM's word for it."""


class BlockStored(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Full pages that can be found from now on, each after the one before it."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str = MEDIUM


class BlockRemoved(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Pages that are not found again."""

    block_hashes: list[bytes]
    medium: str = MEDIUM


class AllBlocksCleared(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """No page is found again."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """One message: `ts` is in seconds since 1970."""

    ts: float
    events: list[Event]
    data_parallel_rank: int = 0


class Changes(NamedTuple):
    """Everything that was known is gone (`cleared`), and then: nodes were stored, digests were removed."""

    cleared: bool
    changes: list[Node | bytes]


class EventLog:
    """The changes of an index since they were last taken; its `listener`. It begins with an index that is empty.

    It costs an append for each page. Where it is taken after each step it holds at most as many changes as the pool has
    pages, which may all be evicted at once, and the step computes.
    """

    __slots__ = ("_changes", "_cleared")

    def __init__(self) -> None:
        self._cleared = True
        self._changes: list[Node | bytes] = []

    def stored(self, node: Node) -> None:
        """It is in the index now."""
        self._changes.append(node)

    def removed(self, node: Node) -> None:
        """It is no longer in the index."""
        self._changes.append(node.digest)

    def cleared(self) -> None:
        """The index is empty now, whatever it was told before."""
        self._cleared = True
        self._changes = []

    def take(self) -> Changes | None:
        """What has changed since the last call; None where nothing has."""
        if not self._changes and not self._cleared:
            return None
        taken = Changes(self._cleared, self._changes)
        self._cleared, self._changes = False, []
        return taken


def events_of(changes: Changes) -> list[Event]:
    """The same as events: pages that follow one another are one event, and so are removals in a row."""
    events: list[Event] = [AllBlocksCleared()] if changes.cleared else []
    for run in _runs(changes.changes):
        first = run[0]
        if isinstance(first, bytes):
            events.append(BlockRemoved(run))  # type: ignore[arg-type]  # a run is all of one kind
        else:
            events.append(_stored(first, run))  # type: ignore[arg-type]
    return events


def snapshot(nodes: Sequence[Node], at_once: int) -> Iterator[list[Event]]:
    """An index's content as events to somebody who knows nothing of it, `at_once` pages at a time."""
    for begin in range(0, max(1, len(nodes)), at_once):
        yield events_of(Changes(not begin, list(nodes[begin : begin + at_once])))


def _runs(changes: list[Node | bytes]) -> Iterator[list[Node | bytes]]:
    """Cut so that each piece is one event."""
    run: list[Node | bytes] = []
    for change in changes:
        last = run[-1] if run else None
        follows = last is not None and (isinstance(last, bytes) if isinstance(change, bytes) else change.parent is last)
        if run and not follows:
            yield run
            run = []
        run.append(change)
    if run:
        yield run


def _stored(first: Node, run: list[Node]) -> BlockStored:
    parent = first.parent
    before = None if parent is None or parent.parent is None else parent.digest  # a root's is a secret
    tokens = array("i", b"".join([node.tokens for node in run])).tolist()
    return BlockStored([node.digest for node in run], before, tokens, len(first.tokens) // 4, first.tree.adapter)
