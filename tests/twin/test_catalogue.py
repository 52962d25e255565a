"""Devices and prices: every value with its unit, its source and its day, and dense rates only."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from tailrace.backends.cpu.machine import Arithmetic, Bandwidth, Ceilings, Machine
from tailrace.terms import InvalidInput
from tailrace.twin.catalogue import devices, machine, prices
from tailrace.twin.catalogue.devices import Device, Devices, Source, Value

KNOWN = devices.builtin()

DENSE = {  # TFLOP/s that vendors' documents give without sparsity; twice that is what their front pages say
    "t4": {"fp16": 65}, "a100-80gb": {"bf16": 312}, "h100-80gb": {"bf16": 989, "fp8": 1979},
    "h200": {"bf16": 989, "fp8": 1979}, "h100-pcie": {"bf16": 756, "fp8": 1513},
    "l40s": {"bf16": 362, "fp8": 733}, "l4": {"bf16": 121, "fp8": 242},
    "b200": {"bf16": 2250, "fp8": 4500, "fp4": 9000}, "gb200": {"bf16": 2500, "fp8": 5000, "fp4": 10000},
    "gb300": {"fp4": 15000}, "rtx-4090": {"bf16": 165, "fp8": 330}, "mi300x": {"bf16": 1307, "fp8": 2615},
    "mi355x": {"bf16": 2516, "fp8": 5033, "fp4": 10066},
}  # fmt: skip


@pytest.mark.parametrize("key", KNOWN.devices)
def test_every_value_has_a_unit_a_source_and_a_day(key: str) -> None:
    one = KNOWN.devices[key]
    values = [one.sold, one.memory, one.bandwidth, *one.rates.values(), *filter(None, (one.link, one.power))]
    for value in values:
        source = KNOWN.sources[value.source]
        assert value.unit in devices.UNITS
        assert source.title
        assert source.read >= datetime.date(2026, 1, 1)


@pytest.mark.parametrize("key", DENSE)
def test_rates_are_dense(key: str) -> None:
    for kind, rate in DENSE[key].items():
        assert KNOWN.devices[key].rates[kind].amount / 1e12 == pytest.approx(rate, rel=0.005)


def test_devices_reach_from_t4_to_gb300_and_mi355x() -> None:
    assert {"t4", "a10", "l4", "l40s", "a100-80gb", "h100-80gb", "h200", "b200", "b300", "gb200", "gb300", "rtx-4090",
            "rtx-5090", "rtx-pro-6000", "mi300x", "mi325x", "mi355x"} <= set(KNOWN.devices)  # fmt: skip


def test_memory_is_what_programs_see_where_it_is_known() -> None:
    """80 GB as sold are 81,559 MiB; 24 GB of a card whose memory checks itself are less than 24 GiB."""
    assert KNOWN.find("H100-SXM")[1].memory_bytes == 81_559 * 2**20
    assert KNOWN.find("l4")[1].memory_bytes < 24 * 2**30


def test_weights_are_computed_in_what_the_device_multiplies() -> None:
    computed = {key: KNOWN.devices[key].computes for key in ("t4", "a100-80gb", "h100-80gb", "b200")}
    assert computed["h100-80gb"]("fp8-block") == "fp8"
    assert (computed["h100-80gb"]("mxfp8"), computed["b200"]("mxfp8")) == ("bf16", "fp8")
    assert computed["b200"]("nvfp4") == computed["b200"]("mxfp4") == "fp4"
    assert computed["h100-80gb"]("nvfp4") == computed["a100-80gb"]("fp8") == computed["b200"]("int4") == "bf16"
    assert computed["t4"]("bf16") == computed["t4"]("fp8") == "fp16"


FILE = """
[sources.own]
title = "what we measured"
read = 2026-11-30
[devices.{key}]
name = "Ours"
vendor = "us"
architecture = "x"
native = ["bf16"]
sold = {{ value = 80, unit = "GB", source = "own" }}
memory = {{ value = 80, unit = "GB", source = "own" }}
bandwidth = {{ value = 2, unit = "TB/s", source = "own" }}
[devices.{key}.rates]
bf16 = {{ value = 300, unit = "TFLOP/s", source = "own" }}
"""


def test_a_file_of_ones_own_adds_and_replaces(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(FILE.format(key="h200") + FILE.format(key="ours").split("read = 2026-11-30")[1])
    known = devices.load(file)
    assert known.find("ours")[1].memory_bytes == known.find("h200")[1].memory_bytes == 80_000_000_000
    assert known.find("h100") == KNOWN.find("h100")
    assert devices.load() is KNOWN


def _rate(kind: str, rate: int) -> tuple[str, str]:
    head = "[devices.ours.rates]"
    return head, f'{head}\n{kind} = {{ value = {rate}, unit = "TFLOP/s", source = "own" }}'


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("300", "624"), None),
        (_rate("fp16", 600), "differ"),
        (_rate("fp8", 1200), "fp8 is 4.00 times that of bf16; without sparsity it is 2 times"),
        (_rate("fp4", 4800), "fp4 is 16.00"),
        (('unit = "TB/s"', 'unit = "GiB"'), "bandwidth is in 'GiB'; expected GB/s or TB/s"),
        (('value = 2,', 'value = -2,'), "bandwidth.value"),
        (('memory = { value = 80, unit = "GB"', 'memory = { value = 160, unit = "GiB"'),
         "memory is 171.8 GB, but 80 GB are sold"),
        (('unit = "TFLOP/s", source = "own"', 'unit = "TFLOP/s", source = "hearsay"'), "the source 'hearsay'"),
        (('native = ["bf16"]', 'native = ["fp3"]'), "'fp3' is no type"),
        (('vendor = "us"', 'vendor = "us"\ncolour = "red"'), "unknown field `colour`"),
        (('name = "Ours"', ''), "missing required field `name`"),
        (('name = "Ours"', 'name = "Ours'), "line 6"),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_is_named(tmp_path: Path, change: tuple[str, str], words: str | None) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(FILE.format(key="ours").replace(*change))
    if words is None:  # a rate alone says nothing of sparsity
        assert devices.load(file).find("ours")
        return
    with pytest.raises(InvalidInput, match=words.replace(".", r"\.").replace("(", r"\(")):
        devices.load(file)


def test_what_cannot_be_read_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="No such file"):
        devices.load(tmp_path / "none.toml")
    with pytest.raises(InvalidInput, match=r"no device 'abacus' is known; known are t4, .*mi355x"):
        KNOWN.find("abacus")


def test_a_sparse_rate_among_ours_would_be_caught() -> None:
    """Twice the FP8 of any device with FP8 is refused, of those with room for an exception too."""
    for key, one in KNOWN.devices.items():
        if "fp8" in one.rates:
            fp8 = one.rates["fp8"]
            doubled = Device(**{**{f: getattr(one, f) for f in one.__struct_fields__},
                                "rates": {**one.rates, "fp8": Value(2 * fp8.value, fp8.unit, fp8.source)}})  # fmt: skip
            assert devices._sparse(doubled), key


# Prices


def test_prices_have_a_seller_a_term_and_a_day() -> None:
    known = prices.builtin()
    for rent in known.rents:
        assert rent.device in KNOWN.devices
        assert rent.seller
        assert rent.source
        assert rent.read.year >= 2026
    assert {rent.term for rent in known.of("h100-80gb", None)} == {"on-demand", "reserved", "spot"}


def test_prices_are_found_by_any_name_of_a_device_cheapest_first() -> None:
    known = prices.builtin()
    found = known.of("H100-SXM")
    assert found == known.of("h100-80gb")
    assert [rent.usd_per_hour for rent in found] == sorted(rent.usd_per_hour for rent in found)
    assert {rent.term for rent in found} == {"on-demand"}
    assert found[0].profile.usd_per_hour == found[0].usd_per_hour
    assert found[0].profile.source.endswith(f"read on {found[0].read}")


def test_apis_are_profiles_of_the_ledger() -> None:
    """1,000 tokens in, of which 600 cached, and 200 out."""
    api = prices.builtin().api("deepseek-v3-2")
    assert api.usd(1000, 600, 200) == pytest.approx((400 * 0.28 + 600 * 0.028 + 200 * 0.42) / 1e6)


def test_five_steps_of_an_agent_cost_what_their_transcripts_add_up_to() -> None:
    """Each step carries all before it: 1,000 tokens, 500 out, and 500 of a tool's answer to every next one."""
    api = prices.builtin().api("gpt-5-nano")
    steps = [(1000 + 1000 * step, 500) for step in range(5)]
    whole = sum(api.usd(prompt, 0, output) for prompt, output in steps)
    assert whole == pytest.approx((15_000 * 0.05 + 2500 * 0.40) / 1e6)
    assert whole / api.usd(1000, 0, 500) == pytest.approx(7)


RENT = '[[rents]]\ndevice = "h200"\nusd_per_hour = 1.0\nseller = "a"\nsource = "b"\nread = 2026-01-01\n'
API = "[apis.x]\nusd_per_million_input = 1.0\nusd_per_million_output = 2.0\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (RENT.replace("h200", "abacus"), "'abacus', which is no device"),
        (RENT.replace("1.0", "0.0"), "usd_per_hour"),
        (RENT.replace('source = "b"\n', ""), "missing required field `source`"),
        (RENT + 'term = "free"\n', "term"),
        (API, "apis.x needs a source and a date"),
        (API.replace("1.0", "-1.0"), "usd_per_million_input is -1.0"),
    ],
)
def test_a_price_that_cannot_be_is_named(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "prices.toml"
    file.write_text(text)
    with pytest.raises(InvalidInput, match=words):
        prices.load(file)


def test_what_nobody_sells_is_said_so() -> None:
    with pytest.raises(InvalidInput, match="no on-demand price of 't4' is known; there are prices of: a100-40gb"):
        prices.builtin().of("t4")
    with pytest.raises(InvalidInput, match="no API 'x' is known"):
        prices.builtin().api("x")


def test_empty_files_have_nothing() -> None:
    assert devices.parse("", "f") == Devices()
    assert Source("t", datetime.date(2026, 1, 1)).url == ""


# This machine


def test_a_machine_that_was_measured_is_a_device(tmp_path: Path) -> None:
    """Reading from memory, and the fastest multiply-adds of each type (two operations each), on all threads."""
    arithmetics = tuple(
        Arithmetic(kind, "x", threads, rate, rate)
        for kind, threads, rate in (
            ("bf16", 2, 1e9),
            ("amx_bf16", 1, 8e9),
            ("amx_bf16", 2, 9e9),
            ("int8_by_int4", 2, 5e9),
        )
    )
    bandwidths = tuple(Bandwidth(level, 2, 1, rate, rate) for level, rate in (("L1", 9e10), ("memory", 2e10)))
    ceilings = Ceilings(
        machine=Machine("cpu", 2, 2, "amx", "0"), measured_at="2026-11-30T10:00:00+00:00", took_seconds=1.0,
        others_cores=None, caches=(), bandwidths=bandwidths, arithmetics=arithmetics, spinning_hand_over_seconds=None,
        median_spinning_hand_over_seconds=None, parked_hand_over_seconds=None, median_parked_hand_over_seconds=None,
        page_bytes=4096, page_fault_seconds=1e-6, median_page_fault_seconds=1e-6,
    )  # fmt: skip
    known = machine.described(ceilings, 8 << 30)
    _, found = known.find("this")
    assert (found.memory_bytes, found.bandwidth.amount) == (8 << 30, 2e10)
    assert {kind: rate.amount for kind, rate in found.rates.items()} == {"bf16": 18e9}
    assert known.sources[found.bandwidth.source].read == datetime.date(2026, 11, 30)
    with pytest.raises(InvalidInput, match="run `tailrace machine"):
        machine.measured(tmp_path)
    assert 0 < machine.memory_bytes() < 1 << 50
