"""Which model fits which devices: weights, overhead and KV against memory, at any valid parallelism.

No time is predicted here. What does not follow from the model and the device is an assumption with a name (`Reserve`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tailrace.terms import InvalidInput
from tailrace.twin.catalogue.devices import Device
from tailrace.twin.shapes.precision import KV_FORMATS
from tailrace.twin.shapes.split import Parallel, Rank, Weights, objections, ranks, request_bytes

PAGE = 16
"""Tokens of a page of KV: a request holds whole ones."""

MOST_DEVICES = 1024
"""No more are tried."""


@dataclass(frozen=True)
class Reserve:
    """What is assumed of the memory that neither weights nor KV take. `usable`: the share of a device's memory that
    an engine takes; vLLM's default. `overhead_bytes`: activations, captured graphs, the runtime, on each device; as
    much as vLLM 0.19 took for Llama-3.1-8B with 2,048 tokens a step in a public run on an RTX 4090."""

    usable: float = 0.9
    overhead_bytes: int = 1_240_000_000


@dataclass(frozen=True)
class Fit:
    """A model on devices. All bytes are of the fullest device. `users`: how many requests with `context` tokens each
    fit at a time, on all devices together; `wanted`: how many must. `kv_budget` may be below zero: then not even
    weights fit. `needs`: the least that it fits on, where it does not fit here."""

    device: str
    device_bytes: int
    parallel: Parallel
    context: int
    wanted: int
    reserve: Reserve
    weight_bytes: int
    kv_budget: int
    request_bytes: int
    users: int
    needs: Parallel | None = None

    @property
    def fits(self) -> bool:
        return self.users >= self.wanted

    @property
    def kv_bytes(self) -> int:
        """KV of the wanted users that this device holds."""
        return self.request_bytes * -(-self.wanted // self.parallel.dp)


def fit(
    weights: Weights, name: str, device: Device, parallel: Parallel, *, context: int, users: int = 1, kv: str = "bf16",
    reserve: Reserve | None = None,
) -> Fit:  # fmt: skip
    """Whether a model fits devices at this parallelism, and for how many users of `context` tokens. Where it does not,
    `needs` is the smallest number of such devices on which it does. Raises InvalidInput for a parallelism that is not
    valid, for a context that the model does not have, and for a type of KV that is not known."""
    check(weights, context, users, kv)
    held = reserve or Reserve()
    found = place(weights, name, device, parallel, context, users, KV_FORMATS[kv], held)
    if found.fits:
        return found
    least = smallest(weights, name, device, context, users, KV_FORMATS[kv], held)
    return Fit(**{**vars(found), "needs": least.parallel if least else None})


def check(weights: Weights, context: int, users: int, kv: str) -> None:
    """Raises InvalidInput for what no device can be asked."""
    trained = weights.shape.context
    if kv not in KV_FORMATS:
        raise InvalidInput(f"--kv {kv!r} is not known; known are {', '.join(KV_FORMATS)}", param="kv")
    if context < 1 or users < 1:
        raise InvalidInput("--context and --users are at least 1", param="context")
    if trained is not None and context > trained:
        raise InvalidInput(
            f"--context is {context:,}, but {weights.shape.name} has at most {trained:,}", param="context"
        )


def place(
    weights: Weights, name: str, device: Device, parallel: Parallel, context: int, users: int, value_bytes: float,
    reserve: Reserve,
) -> Fit:  # fmt: skip
    """What is left for KV, and for how many requests that is."""
    budget = int(device.memory_bytes * reserve.usable) - reserve.overhead_bytes
    stages = ranks(weights, parallel)
    worst = min(stages, key=lambda rank: _users(weights, rank, parallel, context, value_bytes, budget))
    most = _users(weights, worst, parallel, context, value_bytes, budget)
    return Fit(
        name, device.memory_bytes, parallel, context, users, reserve, worst.weight_bytes, budget - worst.weight_bytes,
        _request(weights, worst, parallel, context, value_bytes), most * parallel.dp,
    )  # fmt: skip


def _request(weights: Weights, rank: Rank, parallel: Parallel, context: int, value_bytes: float) -> int:
    """KV bytes of one request on a rank, in whole pages."""
    whole = -(-context // PAGE) * PAGE
    return int(request_bytes(weights.shape, whole, value_bytes, parallel, rank.layers))


def _users(
    weights: Weights, rank: Rank, parallel: Parallel, context: int, value_bytes: float, budget: int
) -> int:  # fmt: skip
    """Requests that a rank has room for; a rank without attention has room for any number."""
    left = budget - rank.weight_bytes
    each = _request(weights, rank, parallel, context, value_bytes)
    if left < 0:
        return 0
    return left // each if each else 1 << 40


def smallest(
    weights: Weights, name: str, device: Device, context: int, users: int, value_bytes: float, reserve: Reserve
) -> Fit | None:
    """The fewest devices on which it fits, dividing tensors before layers; None where no number up to a thousand
    does."""
    budget = int(device.memory_bytes * reserve.usable) - reserve.overhead_bytes
    if budget <= 0:
        return None
    least = max(1, weights.bytes // device.memory_bytes)
    for count in range(least, MOST_DEVICES + 1):
        for parallel in parallels(weights, count, device.domain):
            found = place(weights, name, device, parallel, context, users, value_bytes, reserve)
            if found.fits:
                return found
    return None


def parallels(weights: Weights, count: int, domain: int) -> Iterator[Parallel]:
    """Valid ways to use so many devices for one replica: tensor parallelism within what sees each other over links
    (or eight, where there are none), pipeline parallelism beyond, experts spread where tensors cannot be divided
    further."""
    for tp in range(min(count, max(domain, 8)), 0, -1):
        if count % tp:
            continue
        pp = count // tp
        if pp > len(weights.shape.layers):
            continue
        for ep in dict.fromkeys((1, tp)):
            parallel = Parallel(tp, pp, 1, ep)
            if not objections(weights, parallel):
                yield parallel
                break
