"""A checkpoint as a whole: configuration, tensors by Hugging Face name, and what `text` needs, whatever the format.

The readers of the formats are imported when they are first needed: a prepared start needs neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tailrace.terms import ModelError

if TYPE_CHECKING:
    from tailrace.backends import Weight
    from tailrace.models.files.gguf import GgufFile

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


@dataclass(frozen=True)
class TextAssets:
    """What `text` needs of a checkpoint."""

    tokenizer_json: bytes | None
    """Hugging Face's tokenizer.json, as bytes."""
    tokenizer_config: dict[str, Any]
    """tokenizer_config.json, with special_tokens_map.json beneath it; {} when there is neither."""
    gguf: dict[str, Any] | None
    """GGUF metadata of the keys `tokenizer.*`, when there is no tokenizer.json."""
    chat_template: str | None
    bos_id: int | None
    eos_ids: tuple[int, ...]
    """All ids that end a generation."""
    add_bos: bool | None
    """None: as the tokenizer itself says."""


@dataclass(frozen=True)
class Checkpoint:
    """A model's files, opened and checked, nothing read yet but headers. `config` is in Hugging Face's words; `tensors`
    go by Hugging Face's names and are memory-mapped."""

    path: Path
    name: str
    config: dict[str, Any]
    tensors: Mapping[str, Weight]
    text: TextAssets
    source_format: str


def checkpoint_files(path: Path) -> tuple[Path, ...]:
    """The files that opening `path` would read, sorted: the .gguf file alone, or a folder's configuration, tokenizer
    and weights. Raises ModelError when there is no model."""
    try:
        if path.is_file():
            return (path,)
        if not path.is_dir():
            raise ModelError(f"{path}: no such file or folder")
        kinds = (".json", ".jinja", ".safetensors", ".gguf")
        return tuple(sorted(child for child in path.iterdir() if child.suffix in kinds and child.is_file()))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror or error})") from error


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a .gguf file, or a folder that holds config.json with safetensors, or one .gguf file. Raises ModelError
    naming the file, and the tensor or field, that is wrong. Nothing is ever unpickled."""
    try:
        return _open(Path(path))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror or error})") from error


def _open(path: Path) -> Checkpoint:
    from tailrace.models.files.safetensors import INDEX, SINGLE

    files = checkpoint_files(path)
    if path.is_file():
        if path.suffix in PICKLES:
            raise ModelError(f"{path}: pickled weights are refused, since loading them runs code; use safetensors")
        if path.suffix == ".safetensors":
            raise ModelError(f"{path}: name the folder that holds this file and its config.json instead")
        return _open_gguf(path)
    ggufs = [file for file in files if file.suffix == ".gguf"]
    if any(file.suffix == ".safetensors" or file.name == INDEX for file in files):
        return _open_folder(path)
    if len(ggufs) > 1:
        raise ModelError(f"{path}: there are {len(ggufs)} .gguf files; name one of them")
    if ggufs:
        return _open_gguf(ggufs[0])
    pickles = sorted(child.name for child in path.iterdir() if child.suffix in PICKLES)
    if pickles:
        raise ModelError(
            f"{path}: the weights are pickled ({pickles[0]}), which is refused, since loading them runs code; "
            "use a safetensors version of this model"
        )
    raise ModelError(f"{path}: there is no {SINGLE}, no {INDEX} and no .gguf file; the weights are missing")


def _open_gguf(path: Path) -> Checkpoint:
    from tailrace.models.files.gguf import read_gguf
    from tailrace.models.gguf_names import gguf_config, gguf_tensors

    file = read_gguf(path)
    config = gguf_config(file)
    name = file.metadata.get("general.name")
    return Checkpoint(
        path=path,
        name=name if isinstance(name, str) and name else path.stem,
        config=config,
        tensors=gguf_tensors(file, config),
        text=_gguf_text(file, config["vocab_size"]),
        source_format="GGUF",
    )


def _gguf_text(file: GgufFile, vocab: int) -> TextAssets:
    metadata = {key: value for key, value in file.metadata.items() if key.startswith("tokenizer.")}
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
        raise ModelError(f"{file.path}: metadata key tokenizer.ggml.tokens is missing or not a list of strings")
    if len(tokens) > vocab:
        raise ModelError(
            f"{file.path}: tokenizer.ggml.tokens has {len(tokens)} entries, but the model has {vocab} rows"
        )

    def token(key: str) -> int | None:
        return _token_id(file.path, f"tokenizer.ggml.{key}", metadata.get(f"tokenizer.ggml.{key}"), vocab)

    ends = [token(key) for key in ("eos_token_id", "eot_token_id", "eom_token_id")]
    template = metadata.get("tokenizer.chat_template")
    add_bos = metadata.get("tokenizer.ggml.add_bos_token")
    return TextAssets(
        tokenizer_json=None,
        tokenizer_config={},
        gguf=metadata,
        chat_template=template if isinstance(template, str) else None,
        bos_id=token("bos_token_id"),
        eos_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
        add_bos=add_bos if isinstance(add_bos, bool) else None,
    )


def _open_folder(path: Path) -> Checkpoint:
    from tailrace.models.files.jsons import read_object
    from tailrace.models.files.safetensors import read_checkpoint

    config = read_object(path / "config.json")
    if not isinstance(config.get("model_type"), str):
        raise ModelError(f"{path / 'config.json'}: model_type is missing")
    return Checkpoint(
        path=path,
        name=path.resolve().name,
        config=config,
        tensors=read_checkpoint(path),
        text=_folder_text(path, config),
        source_format="safetensors",
    )


def _folder_text(path: Path, config: dict[str, Any]) -> TextAssets:
    settings = _optional(path / "special_tokens_map.json") | _optional(path / "tokenizer_config.json")
    generation = _optional(path / "generation_config.json")
    vocab = config.get("vocab_size")
    vocab = vocab if type(vocab) is int else 1 << 31
    ends: list[int] = []
    for name, source in (("generation_config.json", generation), ("config.json", config)):
        given = source.get("eos_token_id")
        for value in given if isinstance(given, list) else [given]:
            end = _token_id(path / name, "eos_token_id", value, vocab)
            if end is not None and end not in ends:
                ends.append(end)
    tokenizer = path / "tokenizer.json"
    if not ends:
        named = _named_token(tokenizer, settings, "eos_token")
        ends += [] if named is None or named >= vocab else [named]
    bos = config.get("bos_token_id")
    add_bos = settings.get("add_bos_token")
    return TextAssets(
        tokenizer_json=_bytes(tokenizer) if tokenizer.exists() else None,
        tokenizer_config=settings,
        gguf=None,
        chat_template=_chat_template(path, settings),
        bos_id=_token_id(path / "config.json", "bos_token_id", bos, vocab),
        eos_ids=tuple(ends),
        add_bos=add_bos if isinstance(add_bos, bool) else None,
    )


def _named_token(tokenizer: Path, settings: dict[str, Any], field: str) -> int | None:
    """The id of a token that only the tokenizer's configuration names. A model whose end is not known never stops."""
    text = settings.get(field)
    text = text.get("content") if isinstance(text, dict) else text
    if not isinstance(text, str):
        return None
    for key, entry in _entries(settings.get("added_tokens_decoder")):
        if isinstance(entry, dict) and entry.get("content") == text and key.isdecimal():
            return int(key)
    parsed = _optional(tokenizer)
    added = parsed.get("added_tokens")
    for entry in added if isinstance(added, list) else ():
        if isinstance(entry, dict) and entry.get("content") == text and type(entry.get("id")) is int:
            return int(entry["id"])
    model = parsed.get("model")
    found = dict(_entries(model.get("vocab"))).get(text) if isinstance(model, dict) else None
    return found if type(found) is int else None


def _entries(value: Any) -> list[tuple[str, Any]]:
    """A JSON object's items; none of anything else."""
    return list(value.items()) if isinstance(value, dict) else []


def _chat_template(path: Path, settings: dict[str, Any]) -> str | None:
    """The template: its own file first, then the tokenizer's configuration (of several, the one named default)."""
    if (path / "chat_template.jinja").exists():
        try:
            return str(_bytes(path / "chat_template.jinja"), "utf-8")
        except UnicodeDecodeError as error:
            raise ModelError(f"{path / 'chat_template.jinja'}: not UTF-8") from error
    template = _optional(path / "chat_template.json").get("chat_template", settings.get("chat_template"))
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _token_id(path: Path, field: str, value: Any, vocab: int) -> int | None:
    """A token id, checked against the vocabulary. None, and -1 as some files write it, is no token."""
    if value is None or value == -1:
        return None
    if type(value) is not int or not 0 <= value < vocab:
        raise ModelError(f"{path}: {field} is {str(value)[:40]}; expected a token id below {vocab}")
    return value


def _optional(path: Path) -> dict[str, Any]:
    from tailrace.models.files.jsons import read_object

    return read_object(path) if path.exists() else {}


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror or error})") from error
