"""What a sentence-transformers folder says of its results: `modules.json` names the modules in order, and the pooling
module has a configuration of its own (https://sbert.net/docs/package_reference/sentence_transformer/models.html).

Read from the folder at each start: the files are small, and not part of a model's prepared entry.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from tailrace.backends.encoding import POOLINGS, Pooling
from tailrace.models.files.jsons import parse_object, read_object
from tailrace.terms import ModelError

MODES: dict[str, Pooling] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}


@dataclass(frozen=True)
class Output:
    """How the last layer's rows become an embedding. `longest`: most tokens of a text, where the folder bounds them.
    `dimensions`: prefixes of an embedding that are embeddings too (Matryoshka); empty: none are known to be."""

    pooling: Pooling = "mean"
    unit: bool = True
    longest: int | None = None
    dimensions: tuple[int, ...] = ()


def read_output(folder: Path, config: dict[str, Any], pooling: str | None = None) -> Output:
    """What the folder says; where it says nothing, the mean of all rows, of length one. `pooling` overrides it. Raises
    ModelError for modules that are not understood."""
    modules = _modules(folder / "modules.json") if folder.is_dir() else None
    found = Output()
    if modules is not None:
        kinds = [kind for kind, _ in modules]
        path = modules[1][1] if len(modules) > 1 else ""
        how = _pooling(folder / path / "config.json") if "Pooling" in kinds else "mean"
        found = Output(how, "Normalize" in kinds, _longest(folder))
    if pooling is not None:
        if pooling not in POOLINGS:
            raise ModelError(f"pooling is one of {', '.join(POOLINGS)}, not {pooling!r}")
        found = Output(pooling, found.unit, found.longest)
    return Output(found.pooling, found.unit, found.longest, _dimensions(folder, config))


def _modules(file: Path) -> list[tuple[str, str]] | None:
    """Kind and folder of each module; None where there is no such file."""
    if not file.exists():
        return None
    try:
        listed = parse_object(file, b'{"modules":' + file.read_bytes() + b"}")["modules"]
    except OSError as error:
        raise ModelError(f"{file}: cannot be read ({error.strerror or error})") from error
    rows = [row for row in listed if isinstance(row, dict)] if isinstance(listed, list) else []
    found = [(str(row.get("type")).rpartition(".")[2], str(row.get("path", ""))) for row in rows]
    expected = [kind for kind in ("Transformer", "Pooling", "Normalize") if kind in {kind for kind, _ in found}]
    if not found or [kind for kind, _ in found] != expected or expected[0] != "Transformer":
        shown = ", ".join(kind for kind, _ in found) or "nothing"
        raise ModelError(f"{file}: the modules are {shown}; supported are Transformer, Pooling and Normalize, in order")
    for _, path in found:
        if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
            raise ModelError(f"{file}: the path {path!r} leaves the folder")
    if found[0][1]:
        raise ModelError(f"{file}: the transformer is in {found[0][1]!r}; it must be in the folder itself")
    return found


def _pooling(file: Path) -> Pooling:
    config = read_object(file)
    named = config.get("pooling_mode")
    if named is None:
        modes = [name for name, on in config.items() if name.startswith("pooling_mode_") and on is True]
        known = [MODES[name] for name in modes if name in MODES]
        if len(modes) == 1 and known:
            return known[0]
        named = ", ".join(name.removeprefix("pooling_mode_") for name in modes) or "none"
    elif {"lasttoken": "last"}.get(named, named) in POOLINGS:
        return "last" if named == "lasttoken" else named
    raise ModelError(f"{file}: the pooling is {str(named)[:80]}; supported is one of {', '.join(POOLINGS)}")


def _longest(folder: Path) -> int | None:
    file = folder / "sentence_bert_config.json"
    value = read_object(file).get("max_seq_length") if file.exists() else None
    if value is not None and (type(value) is not int or not 3 <= value < 1 << 31):
        raise ModelError(f"{file}: max_seq_length is {str(value)[:40]}; expected a number of tokens")
    return value


def _dimensions(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """`matryoshka_dimensions` of the configuration."""
    value = config.get("matryoshka_dimensions")
    if value is None:
        return ()
    if not isinstance(value, list) or not all(type(one) is int and one > 0 for one in value):
        raise ModelError(f"{folder / 'config.json'}: matryoshka_dimensions is not a list of sizes")
    return tuple(sorted(set(value)))
