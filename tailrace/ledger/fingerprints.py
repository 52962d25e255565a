"""Which prompts began alike, without what they say: four bytes for each block of tokens, under a key of our own.

A block's fingerprint depends on the tenant, on its tokens and on all before them: two prompts have as many in common as
they have whole blocks. Whoever has the rows but not the key cannot tell what a prompt was, nor check a guess.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
from array import array
from collections.abc import Sequence
from pathlib import Path

BLOCK_TOKENS = 64
MOST_BLOCKS = 1024
"""Of a prompt; what it shares beyond is not known."""
BYTES = 4
KEY_BYTES = 32
KEY_FILE = "fingerprints.key"


def key_in(folder: Path) -> bytes:
    """The key that lies in a directory; it is made where there is none, once, however many servers begin at a time.
    Raises OSError."""
    path = folder / KEY_FILE
    with contextlib.suppress(FileNotFoundError):
        key = path.read_bytes()
        if len(key) == KEY_BYTES:
            return key
        path.unlink()  # cut short
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / f".{os.urandom(8).hex()}.key"
    try:
        with os.fdopen(os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
            file.write(os.urandom(KEY_BYTES))
        with contextlib.suppress(FileExistsError):  # another server was quicker
            os.link(new, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            new.unlink()
    return path.read_bytes()


def of(tokens: Sequence[int], tenant: str, key: bytes) -> str:
    """The fingerprints of a prompt's blocks, the last of which may be partial, as base64 without padding."""
    chain = hashlib.blake2b(tenant.encode(), digest_size=BYTES, key=key)
    data = memoryview(array("I", tokens[: BLOCK_TOKENS * MOST_BLOCKS])).cast("B")
    found = bytearray()
    for begin in range(0, len(data), 4 * BLOCK_TOKENS):
        chain.update(data[begin : begin + 4 * BLOCK_TOKENS])
        found += chain.digest()
    return base64.b64encode(found).rstrip(b"=").decode()


def blocks(text: str) -> list[int]:
    """The fingerprints as numbers. ValueError where it is none of ours."""
    data = base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    if len(data) % BYTES:
        raise ValueError(f"{len(data)} bytes are no fingerprints of {BYTES}")
    return [int.from_bytes(data[at : at + BYTES], "big") for at in range(0, len(data), BYTES)]
