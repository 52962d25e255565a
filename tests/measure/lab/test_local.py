"""Precision and roofline: what their numbers say."""

from __future__ import annotations

from tailrace.measure.lab import precision, roofline
from tailrace.measure.lab.experiment import Verdict
from tailrace.measure.lab.inside import Operation, Precision, Precisions, Quality, Roof, Roofline, Speed, Step


def kind(name: str, size: int, ratio: float, change: float) -> Precision:
    quality = Quality(
        1000, 20.0 * (1 + change), change, (change - 0.01, change + 0.01), abs(change), (0.0, 0.1), 0.2, 0.9
    )
    speeds = tuple(
        Speed(phase, 128, 1, tokens, 0.01 * ratio, ratio, ratio * 0.99, ratio * 1.01, 5)
        for phase, tokens in (("prefill", 256), ("decode", 1))
    )
    return Precision(name, "somewhere", size, 4.0, quality, speeds)


def taught(*others: Precision, missing: dict[str, str] | None = None) -> precision.Lesson:
    found = Precisions((kind("stored (Q4_1)", 100, 1.0, 0.0), *others), missing or {}, "a book", "avx2", 2)
    return precision.Experiment().teach(found)


def test_decode_that_follows_the_bytes_is_told_from_one_that_does_not() -> None:
    lesson = taught(kind("bf16", 280, 2.7, 0.001), kind("int8", 150, 0.8, 0.05))
    said = [one.text for one in lesson.findings]
    assert "With bf16, decode follows the bytes (2.80 times the bytes, 2.70 times the time)" in said[1]
    assert "does not follow the bytes (1.50 times the bytes, 0.80 times the time)" in said[3]
    assert [one.verdict for one in lesson.beliefs] == [Verdict.HOLDS, Verdict.HOLDS]
    assert "int8" in lesson.beliefs[1].because


def test_fewer_bits_that_are_slower_contradict_the_belief() -> None:
    lesson = taught(kind("bf16", 280, 0.7, 0.001))
    assert lesson.beliefs[0].verdict is Verdict.FAILS
    assert lesson.beliefs[1].verdict is Verdict.OPEN  # its interval has 0 in it


def test_what_is_not_to_be_had_is_said() -> None:
    lesson = taught(missing={"int4": "the stored weights are that already"})
    assert lesson.beliefs == []
    assert "int4 is not in it: the stored weights are that already." in lesson.notes
    assert "no second kind" in lesson.findings[0].text


def step(name: str, *, memory: float, share: float, sequences: int = 1, tokens: int = 1) -> Step:
    parts = (
        Operation("down", 2.0, 1e9, 2e9, memory, "memory", True),
        Operation("head", 2.0, 1e9, 2e9, 1 - memory, "fp32", False),
    )
    return Step(name, name.split()[0], sequences, tokens, 1e8, 1e7, 0.02, share, parts)


def roofs(*steps: Step) -> Roofline:
    arithmetic = (Roof("fp32", 1e11), Roof("amx_int8", 4e12))
    return Roofline(
        "a machine", "avx2", 2, 96_000_000, (Roof("L2", 2e11), Roof("memory", 2e10)), arithmetic, steps, 1.5, 2
    )


def test_phases_are_judged_by_their_operations() -> None:
    lesson = roofline.Experiment().teach(
        roofs(step("decode 1 at 512", memory=0.9, share=0.8), step("prefill 512", memory=0.1, share=0.7, tokens=512))
    )
    assert [one.verdict for one in lesson.beliefs] == [Verdict.HOLDS, Verdict.HOLDS]
    assert "10.0 operations for each byte moved, 20 ms, 50 tokens a second. 90% of the time" in lesson.findings[0].text
    assert "512 times as long" in lesson.findings[2].text
    assert any("Other programs used 1.5 of 2 cores" in note for note in lesson.notes)


def test_a_step_far_below_its_roof_is_bound_by_neither() -> None:
    lesson = roofline.Experiment().teach(roofs(step("decode 1 at 512", memory=0.9, share=0.1)))
    assert lesson.beliefs[0].verdict is Verdict.OPEN
    assert "attains only 10%" in lesson.beliefs[0].because
    other = roofline.Experiment().teach(roofs(step("decode 1 at 512", memory=0.2, share=0.9)))
    assert other.beliefs[0].verdict is Verdict.FAILS


def test_only_ceilings_that_hold_something_are_shown() -> None:
    lesson = roofline.Experiment().teach(roofs(step("decode 1 at 512", memory=0.5, share=0.9)))
    shown = [row[0] for row in lesson.tables[1].rows]
    assert shown == ["L2", "memory", "multiply-adds, fp32"]
