"""All experiments, in the order in which the report tells them."""

from __future__ import annotations

from typing import Any

from tailrace.measure.lab import agent, batch, context, kv, precision, prefix, roofline, shapes
from tailrace.measure.lab.experiment import Experiment

EXPERIMENTS: tuple[Experiment[Any], ...] = (
    shapes.Experiment(), batch.Experiment(), context.Experiment(), kv.Experiment(), prefix.Experiment(),
    agent.Experiment(), precision.Experiment(), roofline.Experiment(),
)  # fmt: skip
