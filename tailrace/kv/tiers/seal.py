"""What vouches for a page outside the process: a header that says which page it is, and a keyed tag over all of it.

An entry is a header (format, layout of the bytes, digest, parent, token ids), a nonce, a tag, and the page's bytes.
Each entry has a key of its own, HMAC-SHA256 of header and nonce under the secret, and the tag is the AES-256-GMAC of
the bytes under that key (NIST SP 800-38D). So a header, a nonce or a byte that was changed gives another key or another
tag; and since no key is used twice, GMAC's constant nonce is safe.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tailrace.kv.tiers import PageKey
from tailrace.terms import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Callable

FORMAT = 2
"""Changes with anything in the header, or what the tag covers."""
HEAD = struct.Struct("<8sIIQ32s32s32s")
MAGIC = b"TRKVPAGE"
NONCE_BYTES = 16
TAG_BYTES = 16
SECRET_BYTES = 32
"""A secret has at least as many."""

Buffer = bytes | bytearray | memoryview
Cause = Literal["absent", "size", "stale", "foreign", "checksum", "error"]
CAUSES: tuple[Cause, ...] = ("absent", "size", "stale", "foreign", "checksum", "error")
"""Why a load gave nothing: the entry is gone; is shorter or longer; is of another format; is another page's, or another
layout's; has been changed, or was written with another secret; cannot be read."""


def read_secret(path: Path) -> bytes:
    """The secret in a file. InvalidInput where there is none, it is too short, or everybody can read it."""
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_mode & 0o007:
                raise InvalidInput(f"{path} can be read by everybody: chmod 600 {path}", param="kv_key_file")
            secret = file.read()
    except OSError as error:
        raise InvalidInput(
            f"the key of KV pages cannot be read: {path}: {error.strerror or error}", param="kv_key_file"
        ) from error
    if len(secret) < SECRET_BYTES:
        raise InvalidInput(f"{path} has {len(secret)} bytes; a key has at least {SECRET_BYTES}", param="kv_key_file")
    return secret


class Seal:
    """Makes and checks entries. `numerics` names what the bytes of a page depend on besides model and tokens,
    `page_bytes` is their number."""

    def __init__(self, secret: bytes, *, numerics: str, page_bytes: int, page_tokens: int) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._cipher: Callable[[bytes], AESGCM] = AESGCM
        self._secret = hmac.new(secret, digestmod="sha256")
        self._layout = hashlib.sha256(numerics.encode()).digest()
        self._page_tokens = page_tokens
        self._header_bytes = HEAD.size + 4 * page_tokens
        self.page_bytes = page_bytes
        self.head_bytes = self._header_bytes + NONCE_BYTES + TAG_BYTES

    @property
    def entry_bytes(self) -> int:
        """Bytes of a whole entry."""
        return self.head_bytes + self.page_bytes

    @property
    def namespace(self) -> str:
        """The same for all who can read each other's entries, and for nobody else; tells nothing of the secret."""
        mac = self._secret.copy()
        mac.update(b"namespace %d %d %d " % (FORMAT, self._page_tokens, self.page_bytes) + self._layout)
        return mac.hexdigest()[:24]

    def head(self, key: PageKey, data: Buffer) -> bytes:
        """What goes before the page's bytes in its entry: `head_bytes` of them."""
        keyed = self._header(key) + secrets.token_bytes(NONCE_BYTES)
        return keyed + self._tag(keyed, data)

    def fault(self, key: PageKey, head: Buffer, data: Buffer, size: int) -> Cause | None:
        """What is wrong with an entry that was found for that page, if anything. `size` bytes were found, and are in
        `head` (`head_bytes`) and `data` (`page_bytes`) as far as they fit."""
        if size >= HEAD.size:
            magic, version, *_ = HEAD.unpack_from(head)
            if magic == MAGIC and version != FORMAT:
                return "stale"
        if size != self.entry_bytes:
            return "size"
        if head[: self._header_bytes] != self._header(key):
            return "foreign"
        keyed, tag = bytes(head[:-TAG_BYTES]), bytes(head[-TAG_BYTES:])
        return None if hmac.compare_digest(tag, self._tag(keyed, data)) else "checksum"

    def _header(self, key: PageKey) -> bytes:
        layout = self._layout
        head = HEAD.pack(MAGIC, FORMAT, self._page_tokens, self.page_bytes, layout, key.digest, key.parent)
        return head + key.tokens

    def _tag(self, keyed: bytes, data: Buffer) -> bytes:
        mac = self._secret.copy()
        mac.update(b"entry ")
        mac.update(keyed)
        return self._cipher(mac.digest()).encrypt(bytes(12), b"", data)
