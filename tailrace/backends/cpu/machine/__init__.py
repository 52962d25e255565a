"""What this machine gives at most, and how near a model's operations come to it.

- `ceilings`: the numbers, and the file in the cache that keeps them for whoever predicts times.
- `probe`: measures them, in a few seconds.
- `work`: how many operations and bytes each part of a step is made of, from the recorded forward pass; pure.
- `attained`: times those parts, in real steps and one matrix product at a time.
- `roofline`: holds the one against the other, which gives `points`.

Called by `cli`, and by whoever plans with the ceilings. Never knows of requests, of files of models or of schedules.
"""

from tailrace.backends.cpu.machine.ceilings import Arithmetic, Bandwidth, Cache, Ceilings, Machine, load, save
from tailrace.backends.cpu.machine.points import Point, Roofline, StepPoints
from tailrace.backends.cpu.machine.probe import measure, this_machine
from tailrace.backends.cpu.machine.roofline import measure_roofline

__all__ = [
    "Arithmetic",
    "Bandwidth",
    "Cache",
    "Ceilings",
    "Machine",
    "Point",
    "Roofline",
    "StepPoints",
    "load",
    "measure",
    "measure_roofline",
    "save",
    "this_machine",
]
