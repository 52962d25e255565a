"""The ceilings of a machine and the counts that are held against them: what must hold however busy the machine is."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from tailrace.backends import Attention, Format, Ops, Weight
from tailrace.backends.cpu import CpuBackend, available_kernels
from tailrace.backends.cpu.machine import (
    Ceilings,
    Machine,
    Roofline,
    load,
    measure,
    measure_roofline,
    save,
    this_machine,
)
from tailrace.backends.cpu.machine import ceilings as files
from tailrace.backends.cpu.machine.attained import Products, touch_pages
from tailrace.backends.cpu.machine.ceilings import Arithmetic, Bandwidth, Cache
from tailrace.backends.cpu.machine.probe import Others, Probe, find_caches, in_turns, thread_counts, working_sets
from tailrace.backends.cpu.machine.roofline import Bound, Cold, Row, bounds_of, rows_of
from tailrace.backends.cpu.machine.work import KINDS, Parts, Product, Shape, Work, parts_of
from tailrace.backends.cpu.store import pack
from tailrace.models import load_model, open_checkpoint
from tailrace.native import _kernels
from tailrace.terms import InvalidInput
from tests.batches import batch

LLAMA = Path(__file__).parent.parent / "golden" / "models" / "llama"
GIB = 1 << 30


def made(version: str = "1", *, threads: int = 2) -> Ceilings:
    """Ceilings with round numbers: each level ten times as slow as the one before."""
    levels = {"L1": 1000e9, "L2": 100e9, "memory": 10e9}
    return Ceilings(
        machine=Machine("cpu", threads, threads, "portable", version),
        measured_at="2030-01-01T00:00:00+00:00",
        took_seconds=1.0,
        others_cores=0.0,
        caches=(Cache(1, 32 << 10, 1), Cache(2, 1 << 20, 2)),
        bandwidths=tuple(Bandwidth(level, threads, 4096, rate, rate / 2) for level, rate in levels.items()),
        arithmetics=tuple(Arithmetic(kind, "by hand", threads, 50e9, 40e9) for kind in KINDS),
        spinning_hand_over_seconds=1e-7,
        median_spinning_hand_over_seconds=1e-7,
        parked_hand_over_seconds=None,
        median_parked_hand_over_seconds=None,
        page_bytes=4096,
        page_fault_seconds=1e-6,
        median_page_fault_seconds=1e-6,
    )


def parts() -> Parts:
    return parts_of(load_model(open_checkpoint(LLAMA), max_context=64))


@pytest.mark.parametrize("kernels", available_kernels())
def test_what_is_measured_is_possible(kernels: str) -> None:
    """Rates that the compiler optimised away would be far above what any core can do."""
    machine, allowed = this_machine(kernels), os.sched_getaffinity(0)
    found = measure(machine, seconds=0.2)
    assert os.sched_getaffinity(0) == allowed  # the caller is left where it was
    assert found.machine == machine
    assert [b.level for b in found.bandwidths if b.threads == 1][-1] == "memory"
    assert {b.threads for b in found.bandwidths} == set(thread_counts(machine.threads))
    for bandwidth in found.bandwidths:
        assert 1e6 < bandwidth.median_bytes_per_second <= bandwidth.bytes_per_second < 2e12 * bandwidth.threads
    beyond = set(found.kinds(1)) - set(KINDS)
    assert beyond <= {"bf16_dot", "amx_int8", "amx_bf16"}
    assert {(a.kind, a.threads) for a in found.arithmetics} == {
        (k, n) for k in {*KINDS, *beyond} for n in {1, machine.threads}
    }
    for a in found.arithmetics:
        assert 1e6 < a.median_multiply_adds_per_second <= a.multiply_adds_per_second < 1e13 * a.threads
        assert a.instructions
    if machine.cores > 1:
        assert 1e-9 < found.spinning_hand_over_seconds <= found.median_spinning_hand_over_seconds
        assert 1e-8 < found.parked_hand_over_seconds <= found.median_parked_hand_over_seconds
    assert 1e-9 < found.page_fault_seconds <= found.median_page_fault_seconds < 1
    assert found.page_bytes in {1 << n for n in range(12, 17)}


@pytest.mark.alone
@pytest.mark.skipif("avx512" not in available_kernels(), reason="needs AVX-512")
def test_what_the_processor_has_beyond_the_avx512_build_is_measured_where_it_has_it() -> None:
    flags = set(Path("/proc/cpuinfo").read_text().split("\n\n")[0].split())
    kinds = [kind for kind, _ in _kernels.peaks("avx512")]
    assert ("bf16_dot" in kinds) == ("avx512_bf16" in flags)
    assert ("amx_int8" in kinds) == ("amx_bf16" in kinds) == ({"amx_tile", "amx_int8", "amx_bf16"} <= flags)
    assert not {"bf16_dot", "amx_int8"} & {kind for kind, _ in _kernels.peaks("avx2")}
    if "amx_int8" in kinds:  # sixteen times the work of the dot product of vectors, at a fraction of the instructions
        best = {kind: _kernels.multiply_add_rate("avx512", kind, 1, 0.05)[0] for kind in kinds}
        assert min(best["amx_int8"], best["amx_bf16"]) > best["int8_by_int4"]


def test_everything_is_measured_in_turn() -> None:
    """So that what comes and goes does not spoil one ceiling alone."""
    order: list[str] = []

    def probe(name: str, rounds: list[tuple[float, float]], best: Callable[[list[float]], float]) -> Probe:
        left = iter(rounds)

        def measure_it() -> tuple[float, float]:
            order.append(name)
            return next(left)

        return Probe(name, measure_it, best)

    rate = probe("rate", [(5.0, 4.0), (9.0, 1.0), (7.0, 3.0)], max)
    took = probe("time", [(0.5, 0.6), (0.1, 0.9), (0.3, 0.7)], min)
    said: list[str] = []
    assert in_turns([rate, took], said.append) == [(9.0, 3.0), (0.1, 0.7)]
    assert order == ["rate", "time"] * 3
    assert said[0] == "rate (1 of 3)"


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"kernels 'sse9' cannot run on this machine; it can run: .*portable"):
        this_machine("sse9")
    for threads in (0, -1, 10_000):
        with pytest.raises(InvalidInput, match="threads must be 1 to"):
            this_machine(threads=threads)
    for wrong in (
        ("sse9", 4096, 1, 0.1),
        ("portable", 0, 1, 0.1),
        ("portable", 4096, 0, 0.1),
        ("portable", 4096, 1, 0),
    ):
        with pytest.raises(ValueError, match=r"\w"):
            _kernels.read_rate(*wrong)
    with pytest.raises(ValueError, match="no kind of multiply-add 'fp7'"):
        _kernels.multiply_add_rate("portable", "fp7", 1, 0.1)
    for seconds in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="seconds"):
            _kernels.page_fault(seconds)


def test_caches_are_what_the_system_says(tmp_path: Path) -> None:
    for index, (level, kind, size, shared) in enumerate(
        [("1", "Data", "48K", "3"), ("1", "Instruction", "32K", "3"), ("2", "Unified", "2M", "2-3"),
         ("3", "Unified", "32768K", "0-7,16"), ("4", "Unified", "what", "0")]
    ):  # fmt: skip
        place = tmp_path / "cpu3" / "cache" / f"index{index}"
        place.mkdir(parents=True)
        for name, text in (("level", level), ("type", kind), ("size", size), ("shared_cpu_list", shared)):
            (place / name).write_text(text + "\n")
    caches = (Cache(1, 48 << 10, 1), Cache(2, 2 << 20, 2), Cache(3, 32 << 20, 9))
    assert find_caches(3, tmp_path) == caches
    assert [c.level for c in find_caches(9, tmp_path)] == [1, 2]  # it says nothing: usual ones
    assert thread_counts(1) == [1]
    assert thread_counts(6) == [1, 2, 4, 6]
    near = [("L1", 24 << 10), ("L2", 1 << 20), ("L3", 16 << 20)]
    assert working_sets(caches, 1, 8 * GIB) == [*near, ("memory", 128 << 20)]
    crowded = (Cache(1, 48 << 10, 1), Cache(2, 2 << 20, 1), Cache(3, 32 << 20, 9))
    # nine threads leave each 1.8 MiB of L3, which cannot be told from L2
    assert [level for level, _ in working_sets(crowded, 9, 8 * GIB)] == ["L1", "L2", "memory"]
    assert working_sets(caches, 2, 128 << 20)[-1] == ("memory", 16 << 20)  # a quarter of what is free


def test_what_others_use_is_counted_without_this_process(tmp_path: Path) -> None:
    core = sorted(os.sched_getaffinity(0))[0]
    stat = tmp_path / "stat"
    stat.write_text(f"cpu  9 9 9 9 9 9 9 9 0 0\ncpu{core} 100 0 0 500 0 0 0 0 0 0\n")
    others = Others(stat)
    assert others.cores() == 0.0
    stat.write_text(f"cpu  9 9 9 9 9 9 9 9 0 0\ncpu{core} 100000 0 0 500 0 0 0 100 0 0\n")
    found = others.cores()
    assert found is not None
    assert found > 100  # a thousand seconds in no time
    assert Others(tmp_path / "none").cores() is None


def test_ceilings_are_kept_for_each_machine(tmp_path: Path) -> None:
    first, second = made("1"), made("2")
    assert load(tmp_path, first.machine) is None
    assert save(tmp_path / "new", first) == tmp_path / "new" / files.FILE
    save(tmp_path / "new", second)
    save(tmp_path / "new", msgspec.structs.replace(first, others_cores=3.0))
    assert load(tmp_path / "new", second.machine) == second
    assert load(tmp_path / "new", first.machine) == msgspec.structs.replace(first, others_cores=3.0)
    assert load(tmp_path / "new", made("3").machine) is None
    assert msgspec.json.decode((tmp_path / "new" / files.FILE).read_bytes())["format"] == files.FORMAT
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == [f".{files.FILE}.lock", files.FILE]


def test_what_models_attained_is_kept_with_the_ceilings(tmp_path: Path) -> None:
    ceilings = made()
    first, again, second = (
        Roofline(name, "portable", 2, size, 0.0, ()) for name, size in (("a", 1), ("a", 2), ("b", 3))
    )
    for roofline in (first, second, again):
        save(tmp_path, ceilings, roofline)
    path = save(tmp_path, msgspec.structs.replace(ceilings, took_seconds=9.0))
    assert path is not None
    (entry,) = msgspec.json.decode(path.read_bytes())["machines"]
    assert [(found["model"], found["weight_bytes"]) for found in entry["rooflines"]] == [("b", 3), ("a", 2)]
    assert entry["ceilings"]["took_seconds"] == 9.0


@pytest.mark.parametrize(
    "damage",
    [
        lambda body: body[: len(body) // 2],
        lambda body: b"",
        lambda body: body.replace(b'"page_fault_seconds": 1e-6', b'"page_fault_seconds": -1'),
        lambda body: body.replace(b'"threads": 2', b'"threads": "two"'),
        lambda body: body.replace(b'"format": 3', b'"format": 1'),
    ],
    ids=["torn", "empty", "negative", "type", "format"],
)
def test_a_damaged_file_is_a_warning_and_written_anew(
    tmp_path: Path, damage: object, caplog: pytest.LogCaptureFixture
) -> None:
    kept = made()
    path = save(tmp_path, kept)
    assert path is not None
    assert callable(damage)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert path.read_bytes() != whole
    assert load(tmp_path, kept.machine) is None
    assert f"{path} cannot be read and is ignored" in caplog.text
    save(tmp_path, kept)
    assert load(tmp_path, kept.machine) == kept


def test_a_cache_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    assert save(tmp_path / "file", made()) is None
    assert "the ceilings are not kept" in caplog.text


def test_the_parts_of_a_llama_are_counted_as_by_hand() -> None:
    """Two layers of width 32, 4 heads on 2 of 8, feed-forward 48, 96 tokens; bf16, of which every value is 2 bytes."""
    decode = {row.name: (row.times, row.work) for row in rows_of(parts(), Shape(3, 1, 20))}
    times, work = decode["q+k+v"]
    assert (times, work.total, work.cold_bytes) == (2, 2 * 2 * 3 * 64 * 32, 2 * 64 * 32 * 2)
    assert work.operations == {"bf16": work.total}
    assert (work.warm_bytes, work.span_bytes) == (2 * 3 * 4 * (32 + 64), 3 * 4 * (32 + 64))
    times, work = decode["down"]  # reads what it adds to
    assert (times, work.total, work.warm_bytes) == (2, 2 * 2 * 3 * 32 * 48, 2 * 3 * 4 * (48 + 2 * 32))
    assert decode["gate+up"][1].total == 2 * 2 * 3 * 96 * 32
    assert decode["o"][1].total == 2 * 2 * 3 * 32 * 32
    times, work = decode["head"]
    assert (times, work.total, work.cold_bytes) == (1, 2 * 3 * 96 * 32, 96 * 32 * 2)
    times, work = decode["attention"]  # 21 positions: scores and values, a multiply-add each
    assert (times, work.operations) == (2, {"bf16": 2 * 3 * 4 * 8 * 21 * 2 * 2})
    assert work.cold_bytes == 2 * 3 * 20 * (2 * 2 * 8) * 2
    assert decode["sampling"][1] == Work({"fp32": 3 * 96}, 0, 3 * 96 * 4, 3 * 96 * 4)


def test_past_the_last_attention_a_prompt_has_one_row() -> None:
    prefill = {row.name: row.work for row in rows_of(parts(), Shape(1, 40, 0))}
    assert prefill["q+k+v"].total == 2 * 2 * 40 * 64 * 32
    assert prefill["down"].total == 2 * (40 + 1) * 32 * 48
    assert prefill["head"].total == 2 * 96 * 32
    positions = 40 * 41 // 2
    assert prefill["attention"].operations == {"fp32": 2 * positions * 4 * 8 * 2 * 2}
    assert prefill["attention"].cold_bytes == 0  # it reads what this step wrote


def test_a_window_bounds_what_attention_sees() -> None:
    spec = Attention(0, heads=2, kv_heads=1, head_dim=16, scale=1.0, window=8)
    found = Parts((), (spec,), (), 0).attention(Shape(1, 4, 100))
    assert found.total == 4 * 8 * 2 * 16 * 2 * 2
    assert found.cold_bytes == 7 * 16 * 2 * 2


@pytest.mark.parametrize(
    ("form", "kind", "row_bytes"),
    [(Format.Q4_0, "int8_by_int4", 18), (Format.Q5_0, "int8_by_int6", 22), (Format.Q8_0, "int8_by_int8", 34)],
)
def test_quantised_products_are_counted_in_their_own_kind(form: Format, kind: str, row_bytes: int) -> None:
    weight = Weight("layers.0.x_proj.weight", form, (48, 64), np.zeros((48, 2 * row_bytes), np.uint8))
    product = Product((weight,), wanted=False, adds=False)
    work = product.work(5)
    assert product.label == "x"
    assert work.operations == {kind: 2 * 5 * 48 * 64}
    assert work.cold_bytes == 48 * 2 * row_bytes
    assert work.warm_bytes == 5 * (64 + 2 * 8 + 4 * 48)


def test_the_slowest_need_is_the_bound() -> None:
    ceilings = made()
    assert ceilings.level_of(64 << 10, 2) == "L1"  # two cores have two of it
    assert ceilings.level_of((64 << 10) + 1, 2) == "L2"
    assert ceilings.level_of((1 << 20) + 1, 2) == "memory"  # which they share
    cold = Cold(1_000_000, "memory", 10e9)

    def bounds(work: Work, rows: int = 1) -> tuple[Bound, Bound, Bound]:
        found = bounds_of(Row("x", "", 1, work, rows), ceilings, cold)
        return found.memory, found.arithmetic, found.slower

    few = Work({"fp32": 100}, 1_000_000, 1000, 1000)
    memory, arithmetic, slower = bounds(few)
    assert memory == slower == Bound("memory", pytest.approx(1e-4))
    assert arithmetic == Bound("fp32", pytest.approx(1e-9))
    many = Work({"fp32": 100_000_000, "bf16": 200_000_000}, 1_000_000, 1000, 1000)
    assert bounds(many)[1:] == (Bound("bf16", pytest.approx(3e-3)),) * 2
    warm = Work({"fp32": 100}, 0, 10_000_000, 500_000)
    assert bounds(warm)[2] == Bound("L2", pytest.approx(1e-4))
    with pytest.raises(KeyError, match="L3 on 2 threads"):
        ceilings.bandwidth("L3", 2)


def test_tiles_are_a_ceiling_for_integers_and_count_whole() -> None:
    """A tile takes as long with one row as with sixteen; bf16 of tiles is another rounding, so it holds nothing but a
    build that rounds so."""
    measured, cold = made(), Cold(1, "memory", 10e9)
    tiles = tuple(Arithmetic(f"amx_{kind}", "by hand", 2, 400e9, 400e9) for kind in ("int8", "bf16"))

    def arithmetic(kind: str, rows: int, kernels: str = "avx512bf16") -> Bound:
        machine = msgspec.structs.replace(measured.machine, kernels=kernels)
        ceilings = msgspec.structs.replace(measured, machine=machine, arithmetics=(*measured.arithmetics, *tiles))
        return bounds_of(Row("x", "", 1, Work({kind: 2_000_000 * rows}, 1, 1, 1), rows), ceilings, cold).arithmetic

    assert arithmetic("int8_by_int4", 1) == Bound("int8_by_int4", pytest.approx(1e6 / 50e9))
    assert arithmetic("int8_by_int4", 16) == Bound("amx_int8", pytest.approx(16e6 / 400e9))
    assert arithmetic("int8_by_int8", 17) == Bound("amx_int8", pytest.approx(32e6 / 400e9))
    assert arithmetic("bf16", 16) == Bound("bf16", pytest.approx(16e6 / 50e9))
    for kind in ("int8_by_int4", "int8_by_int8"):
        assert (
            arithmetic(kind, 1, "amx") == arithmetic(kind, 16, "amx") == Bound("amx_bf16", pytest.approx(16e6 / 400e9))
        )
    assert arithmetic("bf16", 16, "amx") == Bound("bf16", pytest.approx(16e6 / 50e9))


@pytest.mark.parametrize(("kernels", "found"), [("avx512bf16", "bf16_dot"), ("amx", "amx_bf16"), ("avx512", "fp32")])
def test_attention_is_held_against_the_instructions_that_its_build_attends_with(kernels: str, found: str) -> None:
    ceilings = made()
    rates = {"bf16_dot": 100e9, "amx_bf16": 800e9}
    pairs = tuple(Arithmetic(kind, "by hand", 2, rate, rate) for kind, rate in rates.items())
    machine = msgspec.structs.replace(ceilings.machine, kernels=kernels)
    ceilings = msgspec.structs.replace(ceilings, machine=machine, arithmetics=(*ceilings.arithmetics, *pairs))
    best = {"fp32": 50e9, "bf16_dot": 100e9, "amx_bf16": 200e9}[
        found
    ]  # tiles count whole, and four rows fill a quarter
    for head_dim, bound in (
        (64, Bound(found, pytest.approx(1e6 / best))),
        (80, Bound("fp32", pytest.approx(1e6 / 50e9))),
    ):
        spec = Attention(0, heads=4, kv_heads=1, head_dim=head_dim, scale=1.0)
        (kind,) = Parts((), (spec,), (), 0).attention(Shape(1, 4, 100)).operations
        row = Row("attention", "", 1, Work({kind: 2_000_000}, 1, 1, 1), 4)
        assert bounds_of(row, ceilings, Cold(1, "memory", 10e9)).arithmetic == bound


@pytest.mark.parametrize("form", [Format.Q4_0, Format.Q8_0])
def test_gate_up_silu_and_rounding_are_one_operation(form: Format) -> None:
    """Two products of 48 x 32 per row, and a row of 64 rounded: 64 bytes, and 8 for each block of 32."""

    def weight(name: str, n: int, k: int) -> Weight:
        size = {Format.Q4_0: 18, Format.Q8_0: 34}[form] * k // 32
        return Weight(f"layers.0.{name}_proj.weight", form, (n, k), np.zeros((n, size), np.uint8))

    gate, up, down = weight("gate", 64, 32), weight("up", 64, 32), weight("down", 32, 64)

    class Feed:
        vocab = 32

        def forward(self, ops: Ops) -> object:
            x = ops.wanted(ops.embed(Weight("embed", Format.F32, (32, 32), np.zeros((32, 128), np.uint8))))
            return ops.linear(ops.silu_mul(ops.linear(x, gate), ops.linear(x, up)), down)

    counted = parts_of(Feed())
    rows = {row.name: row.work for row in rows_of(counted, Shape(3, 1, 0))}
    kind = {Format.Q4_0: "int8_by_int4", Format.Q8_0: "int8_by_int8"}[form]
    tile_bytes = sum(_kernels.packed_shape(form.value, 64, 32)[3] for _ in range(2))
    fused = rows["gate+up+silu"]
    assert fused.operations == {kind: 2 * 3 * 2 * 64 * 32, "fp32": 3 * 64 * 9}
    assert fused.cold_bytes == tile_bytes
    assert fused.warm_bytes == 3 * (32 + 8 + 64 + 16)
    assert rows["down"].warm_bytes == 3 * (64 + 16 + 4 * 32)
    # rounding of x is an operation of its own; that of the gate's output, and the gate itself, are not
    assert rows["row by row"].operations == {"fp32": 3 * 32 * (2 + 4)}
    fused_one = next(p for p in counted.products if p.gates)
    timed = Products([fused_one] * 2, pack, kernels="portable", threads=1, most_rows=4)
    timing = timed.time(Shape(3, 1, 0), 0.01, before=lambda: None)
    assert 0 < timing.best <= timing.median < 10


def test_a_model_s_steps_are_held_against_the_ceilings() -> None:
    model = load_model(open_checkpoint(LLAMA))
    ceilings = measure(this_machine(), seconds=0.1)
    found = measure_roofline(
        model, ceilings, name="tiny", longest=64, batches=(1, 5), context=40, prefill=512, seconds=0.1
    )
    assert [step.step for step in found.steps] == ["decode 1 at 40", "decode 5 at 40", "prefill 64"]
    counted = parts()
    for step, shape in zip(found.steps, (Shape(1, 1, 40), Shape(5, 1, 40), Shape(1, 64, 0)), strict=True):
        works = {row.name: row.work for row in rows_of(counted, shape)}
        names = [p.operation for p in step.points]
        assert names[:5] == ["q+k+v", "o", "gate+up", "down", "head"]
        assert set(names) <= set(works)
        for p in step.points:
            assert (p.operations, p.moved_bytes) == (works[p.operation].total, works[p.operation].moved_bytes)
            assert 0 < p.seconds < 60
            assert p.operations_per_second == pytest.approx(p.operations / p.seconds)
            assert p.share_of_ceiling == pytest.approx(p.operations_per_second / p.ceiling_operations_per_second)
            assert p.ceiling_operations_per_second == min(
                p.memory_ceiling_operations_per_second, p.arithmetic_ceiling_operations_per_second
            )
            assert p.bound in {*KINDS, "amx_int8", "bf16_dot", "amx_bf16", "L1", "L2", "L3", "memory"}
        assert step.cold_bytes == sum(work.cold_bytes for work in works.values())
        assert step.cold_bytes_per_second > 1e6
        assert step.tokens_per_second == pytest.approx(shape.rows / step.seconds)
    with pytest.raises(InvalidInput, match="the model's context is 64 tokens: give a --context below that"):
        measure_roofline(model, ceilings, name="tiny", longest=64, context=64)


def test_pages_that_were_touched_are_pages_of_numbers() -> None:
    """Else attention would be timed over one page of zeros that stays in the nearest cache."""
    model = load_model(open_checkpoint(LLAMA), max_context=64)
    backend = CpuBackend(model, pages=9, max_context=64, step_tokens=8, max_running=4, threads=1)

    def logits(page: int) -> NDArray[np.float32]:
        """After one page of context, which is only read."""
        found = backend.run(batch([([5], 16, [page, 8])], [0])).logits
        assert found is not None
        return found[0]

    unwritten = logits(0)
    touch_pages(backend, 7, 4)
    for page in range(8):
        assert np.array_equal(logits(page), unwritten) == (page == 7)
