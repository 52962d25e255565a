"""A device that computes nothing: it takes as long as a cost says, and draws what it is told to."""

from __future__ import annotations

from array import array

import numpy as np

from tailrace.backends import Adapter, Batch, Ends, Inline, PackedAdapter, Pages, Result, Sampling
from tailrace.engine.plan import Plan
from tailrace.engine.request import Request
from tailrace.terms import InvalidInput
from tailrace.twin.simulate.cost import Step, StepCost

NO_INTS = np.zeros(0, np.int32)
NO_FLOATS = np.zeros(0, np.float32)
NOTHING = Batch(
    NO_INTS, NO_INTS, NO_INTS, NO_INTS, NO_INTS,
    Sampling(
        temperature=NO_FLOATS, top_k=NO_INTS, top_p=NO_FLOATS, min_p=NO_FLOATS, presence=NO_FLOATS, frequency=NO_FLOATS,
        repetition=NO_FLOATS, seed=np.zeros(0, np.uint64), position=NO_INTS, forced=NO_INTS, logprobs=NO_INTS,
        seen_start=NO_INTS, seen_token=NO_INTS, seen_count=NO_INTS, bias_start=NO_INTS, bias_token=NO_INTS,
        bias_value=NO_FLOATS,
    ),
)  # fmt: skip
"""What a step has instead of arrays."""


class Device(Inline):
    """Implements `engine.batch.Builder` and `Backend` in one: a step is its plan. `now` is in seconds, and goes on by
    what steps take; `answers` has the one token that each request's answer consists of, by its id."""

    name = "simulated"
    kernels = "cost"
    numerics = "none"
    batch_invariant = True
    weight_bytes = kv_bytes = page_bytes = 0

    def __init__(self, cost: StepCost) -> None:
        self.now = 0.0
        self.ends = 0.0  # when the step that was launched last has ended
        self.answers: dict[str, int] = {}
        self._cost = cost
        self._plan: Plan | None = None

    def clock(self) -> float:
        """The time."""
        return self.now

    # --- as a builder

    def seat(self, request: Request) -> None:
        """Nothing is kept of it."""

    def forget(self, request: Request) -> None:
        """Likewise."""

    def build(self, plan: Plan) -> Batch:
        """Nothing: the plan is all that a step's time depends on."""
        self._plan = plan
        return NOTHING

    def ahead(self, plan: Plan) -> tuple[Batch, Ends] | None:
        """A step begins when its engine says so."""
        return None

    def follow(self) -> None:
        """No step was begun ahead."""

    # --- as a backend

    def launch(self, batch: Batch) -> None:
        """The step that was built begins now."""
        plan = self._plan
        assert plan is not None
        chunks = plan.chunks.values()
        sampled = [chunk.sample for chunk in chunks]
        step = Step([chunk.count for chunk in chunks], [chunk.begin for chunk in chunks], sum(sampled))
        self.ends = self.now + self._cost.seconds(step)

    def wait(self) -> Result:
        """It has ended."""
        plan = self._plan
        assert plan is not None
        self.now = self.ends
        answers = self.answers
        drawn = [answers[chunk.request.id] for chunk in plan.chunks.values() if chunk.sample]
        return Result(np.array(drawn, np.int32), NO_FLOATS)

    def run_on(self, most: int) -> list[float]:
        """When the step that runs ends, and as many as `most` after it that give its requests one token each."""
        assert self._plan is not None
        before = [chunk.begin for chunk in self._plan.chunks.values()]
        new, count, at = [1] * len(before), len(before), self.ends
        ends, seconds = [at], self._cost.seconds
        for _ in range(most):
            before = [begin + 1 for begin in before]
            at += seconds(Step(new, before, count))
            ends.append(at)
        return ends

    def draw(self, request: Request, count: int) -> array[int]:
        """So many tokens of a request's answer."""
        return array("i", (self.answers[request.id],)) * count

    def read_page(self, page: Pages, out: bytearray | memoryview | None = None) -> bytearray | memoryview:
        """Pages have no bytes."""
        return bytearray() if out is None else out

    def write_page(self, page: Pages, data: bytes | bytearray | memoryview) -> None:
        """Likewise."""

    def pack_adapter(self, adapter: Adapter) -> PackedAdapter:
        """Raises InvalidInput: what an adapter costs is not known."""
        raise InvalidInput("a simulated device takes no adapters", param="adapter")

    def set_adapter(self, number: int, adapter: PackedAdapter | None) -> None:
        """As above."""
        raise InvalidInput("a simulated device takes no adapters", param="adapter")
