"""Results that were measured before, ours or others': read, and put into our words.

`others` knows the files of `vllm bench serve`, GuideLLM and AIPerf. What they do not tell is not made up: intervals,
attainment and the client's state are of our own results only.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from tailrace.measure import result
from tailrace.measure.importing import others
from tailrace.measure.result import Bench
from tailrace.terms import InvalidInput


def read(paths: Sequence[Path], price: float | None = None) -> Bench:
    """The results in files. One of ours is as it was; of several, each run stands for itself. Raises InvalidInput."""
    benches = [_read(path) for path in paths]
    if len(benches) == 1:
        return msgspec.structs.replace(benches[0], price=price if price is not None else benches[0].price)
    runs = [run for bench in benches for run in bench.runs]
    slo = benches[0].slo if all(bench.slo == benches[0].slo for bench in benches) else None
    return Bench(kind="import", runs=runs, slo=slo, price=price, version=benches[0].version)


def _read(path: Path) -> Bench:
    try:
        content = path.read_bytes()
        found: Any = msgspec.json.decode(content)
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}", param="import") from error
    except msgspec.DecodeError as error:
        raise InvalidInput(f"{path} is no JSON: {error}", param="import") from error
    try:
        if (runs := others.read(found, path.stem)) is not None:
            return Bench(kind="import", runs=runs)
        return result.load(content)
    except (InvalidInput, KeyError, TypeError, ValueError) as error:
        raise InvalidInput(f"{path}: {error}", param="import") from error
