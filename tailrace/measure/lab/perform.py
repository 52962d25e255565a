"""Experiments performed: each with what it taught, what it took, or why it could not be done."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from tailrace.measure.lab.experiment import Experiment, Lesson
from tailrace.measure.lab.stand import Stand
from tailrace.terms import TailraceError


class Chapter(msgspec.Struct, frozen=True, kw_only=True):
    """One experiment. `found`: its numbers, as JSON's own types. Where it could not be done there is no lesson, and
    `missing` says why."""

    name: str
    question: str
    seconds: float = 0.0
    lesson: Lesson | None = None
    found: Any = None
    missing: str = ""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All that a command did. `where`: the server, or this machine. `budget`: seconds an experiment."""

    model: str
    where: str
    began: float
    seconds: float
    budget: float
    chapters: list[Chapter]
    version: str = ""


async def perform(
    experiments: Sequence[Experiment[Any]], stand: Stand, observe: Callable[[Chapter], object] = lambda _: None
) -> list[Chapter]:
    """One after the other; `observe` gets each as it ends. What cannot be done here is said, and the next one is begun:
    unless it is the only one, whose error is raised."""
    made = []
    stand = replace(stand, say=_breaking_off(stand.say))
    for experiment in experiments:
        begin = time.perf_counter()
        await asyncio.sleep(0)  # a Ctrl-C that came meanwhile ends it here
        try:
            made.append(await _one(experiment, stand, begin))
        except TailraceError as error:
            if len(experiments) == 1:
                raise
            made.append(_missing(experiment, str(error)))
        observe(made[-1])
    return made


def _breaking_off(say: Callable[[str], None]) -> Callable[[str], None]:
    """Experiments that compute in this thread await nothing: a Ctrl-C ends them when they next say something."""

    def said(text: str) -> None:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError
        say(text)

    return said


async def _one(experiment: Experiment[Any], stand: Stand, begin: float) -> Chapter:
    if experiment.needs == "local" and stand.start is None:
        raise TailraceError("it measures this machine, not a server at a URL: leave --url out")
    found = await experiment.run(stand)
    return Chapter(
        name=experiment.name, question=experiment.question, seconds=time.perf_counter() - begin,
        lesson=experiment.teach(found), found=msgspec.to_builtins(found),
    )  # fmt: skip


def _missing(experiment: Experiment[Any], why: str) -> Chapter:
    return Chapter(name=experiment.name, question=experiment.question, missing=why)
