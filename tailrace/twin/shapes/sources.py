"""Where a model's description comes from: a configuration, a folder, a file's header, a repository on a hub."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tailrace.models.files.jsons import parse_object, read_object
from tailrace.terms import ModelError
from tailrace.twin.shapes import gguf, stored
from tailrace.twin.shapes.hub import Repository, repository
from tailrace.twin.shapes.model import ModelShape, shape_of
from tailrace.twin.shapes.precision import Scheme, scheme_of
from tailrace.twin.shapes.split import Weights

CONFIG, MODELOPT = "config.json", "hf_quant_config.json"
MOST_JSON = 16 << 20
"""Bytes of a configuration; no real one comes near."""


@dataclass(frozen=True)
class Described:
    """A model, what it was read from, and what the headers of its files say (None where they were not read)."""

    shape: ModelShape
    weights: Weights
    source: str
    stored: stored.Stored | None


def describe(model: str, *, weights: str | None = None, text_only: bool = False, headers: bool = False) -> Described:
    """The model that `model` means: the path of a `config.json`, of a folder with one, or of a GGUF file; or a
    repository on a hub (OWNER/NAME or its address, or that of a .gguf file in it), of which configuration, index and
    headers are read by range requests. `weights` names a format to store it in instead of its own; `headers` reads
    the header of every file. Raises ModelError and InvalidInput, which say what is wrong."""
    path = Path(model).expanduser()
    if path.suffix.lower() == ".gguf" and "://" not in model:
        return _gguf(gguf.local(path), str(path), weights)
    if path.is_file():
        return _configured(path.parent, path, weights, text_only)
    if path.is_dir():
        found = sorted(path.glob("*.gguf"))
        if not (path / CONFIG).is_file() and found:
            return _gguf(gguf.local(found[0]), str(found[0]), weights)
        if not (path / CONFIG).is_file():
            raise ModelError(f"{path}: there is no {CONFIG} and no .gguf file")
        return _configured(path, path / CONFIG, weights, text_only)
    there = repository(model)
    if there is None:
        raise ModelError(f"There is no {model}: expected a config.json, a folder with one, a .gguf file, or OWNER/NAME")
    return _remote(there, weights, text_only, headers)


def _configured(folder: Path, path: Path, weights: str | None, text_only: bool) -> Described:
    config = read_object(path)
    if "model_type" not in config:
        raise ModelError(f"{path}: model_type is missing; this is not the config.json of a language model")
    beside = folder / MODELOPT
    if path.name == CONFIG and beside.is_file():
        config = _with_modelopt(config, read_object(beside))
    name = folder.name if path.name == CONFIG and folder.name else path.stem
    held = stored.read_stored(stored.folder_fetch(folder), str(folder), every=True) if path.name == CONFIG else None
    return _made(config, name, str(path), held, weights, text_only)


def _remote(there: Repository, weights: str | None, text_only: bool, headers: bool) -> Described:
    where = f"{there.endpoint}/{there.name}"
    if there.file:
        return _gguf(gguf.remote(there.fetch_at, there.file, where), f"{where}/{there.file}", weights)
    raw = there.fetch(CONFIG, MOST_JSON)
    if raw is None:
        raise ModelError(
            f"{where}: there is no {CONFIG}; give the address of a repository that has one, or a local file"
        )
    config = parse_object(Path(f"{where}/{CONFIG}"), raw)
    if "quantization_config" not in config and (beside := there.fetch(MODELOPT, MOST_JSON)) is not None:
        config = _with_modelopt(config, parse_object(Path(f"{where}/{MODELOPT}"), beside))
    held = stored.read_stored(there.fetch_at, where, every=headers)
    return _made(config, there.name, where, held, weights, text_only)


def _with_modelopt(config: dict[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """A configuration with what ModelOpt's own file says of its weights, where it says nothing itself."""
    if "quantization_config" in config or not isinstance(said.get("quantization"), dict):
        return config
    return {**config, "quantization_config": said["quantization"]}


def _made(
    config: dict[str, Any], name: str, source: str, held: stored.Stored | None, weights: str | None, text_only: bool
) -> Described:
    shape = shape_of(config, name, text_only=text_only)
    scheme: Scheme = scheme_of(shape.quantization, shape.dtype, name, weights)
    return Described(shape, Weights(shape, scheme), source, held)


def _gguf(file: gguf.Header, source: str, weights: str | None) -> Described:
    shape, scheme, held = gguf.described(file)
    if weights is not None:
        scheme = scheme_of(None, None, shape.name, weights)
    return Described(shape, Weights(shape, scheme), source, held)
