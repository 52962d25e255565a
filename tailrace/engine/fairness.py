"""Order between tenants: start-time fair queueing over tokens asked for."""

from __future__ import annotations

from collections.abc import Mapping

FORGET_ABOVE = 1024
"""Tenants remembered before those that owe nothing are forgotten."""


class FairOrder:
    """Gives each request a tag; waiting requests of equal priority go in the order of their tags.

    A tenant's requests are laid end to end on a virtual line, each as long as the tokens it asks for divided by the
    tenant's weight; a tag is where a request begins. A tenant that was away begins at the present (the tag admitted
    last), so nothing is saved up. One tenant alone is served first come, first served; of many, each gets its share
    however many requests the others send.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._ends: dict[str, float] = {}
        self._present = 0.0

    def tag(self, tenant: str, tokens: int) -> float:
        """The tag of a request that asks for `tokens` (prompt and most output)."""
        begin = max(self._present, self._ends.get(tenant, 0.0))
        self._ends[tenant] = begin + tokens / self._weights.get(tenant, 1.0)
        if len(self._ends) > FORGET_ABOVE:
            self._ends = {name: end for name, end in self._ends.items() if end > self._present}
        return begin

    def admitted(self, tag: float) -> None:
        """A request with this tag was admitted: the present is at least there."""
        self._present = max(self._present, tag)

    def give_back(self, tenant: str, tokens: int) -> None:
        """A request ended with `tokens` of what it asked for unused."""
        if tenant in self._ends:
            self._ends[tenant] -= tokens / self._weights.get(tenant, 1.0)
