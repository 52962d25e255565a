"""Where pages lie in a directory of the disk tier, for tests that harm them there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tailrace.kv.tiers.index import FORMAT, HEADER, MAGIC, NOTHING, RECORD


class Place(NamedTuple):
    """A slot: the file that it is in, where it begins there, its bytes, and where its record begins in the index."""

    path: Path
    at: int
    size: int
    record: int

    @property
    def index(self) -> Path:
        """The index of its segment."""
        return self.path.with_suffix(".idx")

    def read(self) -> bytes:
        """What is in it, as far as the file goes."""
        return self.path.read_bytes()[self.at : self.at + self.size]

    def write(self, raw: bytes) -> None:
        """Puts something else into it."""
        assert len(raw) == self.size
        with open(self.path, "r+b") as file:
            file.seek(self.at)
            file.write(raw)


def segment_files(folder: Path) -> list[Path]:
    """The files that have pages."""
    return sorted(folder.glob("*.seg"))


def places(folder: Path) -> dict[bytes, Place]:
    """Every page that an index names, by its digest."""
    found: dict[bytes, Place] = {}
    for path in segment_files(folder):
        raw = path.with_suffix(".idx").read_bytes()
        magic, version, size = HEADER.unpack_from(raw)
        assert (magic, version) == (MAGIC, FORMAT)
        for number, (digest, _) in enumerate(RECORD.iter_unpack(raw[HEADER.size :])):
            if digest != NOTHING:
                assert digest not in found, "a page is there twice"
                found[digest] = Place(path, number * size, size, HEADER.size + number * RECORD.size)
    return found


def change_all(path: Path) -> None:
    """Changes a byte of every page in that file."""
    for place in places(path.parent).values():
        if place.path == path:
            raw = place.read()
            place.write(bytes([raw[0] ^ 1]) + raw[1:])


def spoil(place: Place, how: Callable[[bytes], bytes]) -> None:
    """Replaces what is in a slot."""
    place.write(how(place.read()))
