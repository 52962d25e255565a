"""The simulator on one core: how long it takes to go through a recorded trace on a fleet, whatever that fleet would be.

The cost of a step and the pool are made up, of the order of an 8 B model on one large GPU: what is measured is the
simulator. Its time depends on how many pages prompts have, how many tokens answers have, and how many steps there are.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tailrace.engine.config import EngineConfig
from tailrace.fleet import placement
from tailrace.twin.simulate.cost import Linear
from tailrace.twin.simulate.fleet import Answered, Fleet
from tailrace.twin.simulate.traffic import Traffic
from tailrace.workload import make, spec
from tailrace.workload.arrivals import Recorded

REPLICAS = 8
COST = Linear(step=0.006, token=2e-5, request=5e-5, read=2e-8)
CONFIG = EngineConfig(kv_tokens=512 * 1024, step_tokens=2048, max_running=64, max_waiting=4096, draft_tokens=0)
BAR = 180.0
"""Seconds that are asked for."""


def run(trace: Path | None, places: list[str]) -> None:
    """A line a placement. The time is of the processor, since one process does it all."""
    if trace is None:
        sys.exit("simulate: --trace FILE says which (JSON lines as Mooncake published them)")
    print(f"{REPLICAS} replicas, step {COST.step * 1000:g} ms and {COST.token * 1e6:g} us a token, {trace.name}\n")
    print(f"{'placement':12}{'requests':>10}{'seconds':>9}{'of trace':>10}{'steps':>12}{'tokens out':>12}{'cached':>8}")
    for place in places:
        workload = spec.load(str(trace))
        fleet = Fleet(REPLICAS, CONFIG, COST, placement.make(place))
        answered: list[Answered] = []
        began = time.process_time()
        fleet.run(Traffic(make.sessions(workload), Recorded()), answered.append)
        seconds = time.process_time() - began
        timelines = [one.timeline for one in answered]
        prompts = sum(one.prompt_tokens for one in timelines)
        cached = sum(one.cached_tokens for one in timelines) / prompts
        print(
            f"{place:12}{len(timelines):>10,}{seconds:>9.1f}{fleet.now:>10,.0f}"
            f"{sum(replica.core.steps for replica in fleet.replicas):>12,}"
            f"{sum(one.output_tokens for one in timelines):>12,}{cached:>8.1%}"
            f"{'' if seconds < BAR else '  over the bar'}",
            flush=True,
        )
