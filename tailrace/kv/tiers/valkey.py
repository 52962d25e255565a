"""Pages in a Valkey server (or another that speaks the Redis protocol), which several replicas share.

A page is a string under a key that ends with its digest: an entry (`seal`), written by SET with a time to live, read by
GETRANGE, which bounds the answer whatever lies there. Nothing is deleted: the server makes room by its own policy.

What the server has is known by asking it (`ask`), by having stored a page, and by having loaded it, and is believed
for a while. Whatever goes wrong with the connection closes it and opens the breaker: for a time that doubles from
failure to failure nothing is asked, loaded or stored, and then it is tried again. One thread talks to the server.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from tailrace.kv.prefix import PageChain
from tailrace.kv.tiers import PageKey, TierStats
from tailrace.kv.tiers.seal import CAUSES, Buffer, Cause, Seal
from tailrace.terms import InvalidInput

SCHEMES = ("valkey://", "valkeys://", "redis://", "rediss://", "unix://")
TIMEOUT = 0.5
"""Longest that the server may be silent, in seconds, also while a connection is made."""
PATIENCE = 2.0
"""Longest that a page may take to come; a server that is slower counts as failed."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds for which the breaker stays open: after the first failure, and at most."""
FULL_PAUSE = 5.0
"""Seconds for which nothing is stored after the server has refused a page."""
READ_BYTES = 1 << 20
"""What is read at a time."""
AHEAD_BYTES = 4 << 20
"""Most bytes of pages that the server is asked for in advance, or that it has not yet said to have taken."""
GROUP = 16
"""Pages that one question is about."""
KNOWN_SECONDS = 300.0
"""How long it is believed that the server has a page, at most half of the pages' time to live."""
KNOWN_PAGES = 65536
"""Most pages that are remembered as being there."""

_log = logging.getLogger("tailrace")


class Line(Protocol):
    """What is needed of the client's connection. It is made when it is first used, and anew after `disconnect`."""

    def pack_commands(self, commands: Sequence[tuple[object, ...]]) -> list[bytes]: ...

    def send_packed_command(self, command: list[bytes]) -> None: ...

    def read_response(self, disable_decoding: bool = False) -> object: ...

    def disconnect(self) -> None: ...


def check(url: str) -> str:
    """Where the server is, fit to be shown: the URL without user, password and options. InvalidInput where it is no URL
    of a server, or the client is not installed. Connects to nothing."""
    import importlib.util
    from urllib.parse import urlsplit

    try:
        parts = urlsplit(url)
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        parts, port = urlsplit(""), ""
    if not url.startswith(SCHEMES) or not (parts.hostname or (parts.scheme == "unix" and parts.path)):
        raise InvalidInput(
            "--kv-valkey is the URL of a server: valkey://host:6379/0, valkeys:// with TLS, or unix:///path/of/socket",
            param="kv_valkey",
        )
    if importlib.util.find_spec("valkey") is None:
        raise InvalidInput(
            "--kv-valkey needs the client, which is not installed: pip install 'tailrace[valkey]'", param="kv_valkey"
        )
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname or ""
    return f"{parts.scheme}://{host}{port}{parts.path}"


def read_password(file: str | None) -> str | None:
    """The first line of a file, None where there is none. InvalidInput where it cannot be read, or by everybody."""
    if file is None:
        return None
    path = Path(file).expanduser()
    try:
        with open(path, encoding="utf-8") as opened:
            if os.fstat(opened.fileno()).st_mode & 0o007:
                raise InvalidInput(
                    f"{path} can be read by everybody: chmod 600 {path}", param="kv_valkey_password_file"
                )
            return opened.readline().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(
            f"--kv-valkey-password-file {path} cannot be read: {error}", param="kv_valkey_password_file"
        ) from error


def connection_to(url: str, password: str | None) -> Line:
    """A connection that has not been made yet. InvalidInput where the URL has something that it cannot be made with."""
    from valkey.backoff import NoBackoff
    from valkey.connection import Connection, parse_url
    from valkey.retry import Retry

    try:
        told: dict[str, Any] = {
            **parse_url(url),
            "socket_timeout": TIMEOUT,
            "socket_connect_timeout": TIMEOUT,
            "retry": Retry(NoBackoff(), 0),  # the breaker says when
            "lib_name": None,  # saves two round trips
            "lib_version": None,
            "decode_responses": False,
            "socket_read_size": READ_BYTES,
        }
        kind = told.pop("connection_class", Connection)
        made: Line = kind(**(told if password is None else {**told, "password": password}))
    except (ValueError, TypeError) as error:
        raise InvalidInput(f"--kv-valkey {check(url)}: {error}", param="kv_valkey") from error
    return made


class ValkeyTier:
    """A `Tier`. `ttl` is the seconds after which the server forgets a page, 0 for never. The connection is made by the
    thread that uses it: a server that is not there at the start is one that has failed. InvalidInput where the URL
    cannot be used."""

    name = "valkey"
    asked = True
    batch = 1

    def __init__(
        self,
        url: str,
        seal: Seal,
        *,
        ttl: float,
        password: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        from valkey.exceptions import ResponseError, ValkeyError

        self._where = check(url)
        self._line = connection_to(url, password)
        self._failures = (
            ValkeyError,
            OSError,
            ValueError,
        )  # what a connection raises for rubbish is not always its own
        self._refusal = ResponseError
        self._seal = seal
        self._prefix = f"tailrace:kv:{seal.namespace}:".encode()
        self._expiry = ("PX", max(1, round(ttl * 1000))) if ttl else ()
        self._fresh = min(KNOWN_SECONDS, ttl / 2) if ttl else KNOWN_SECONDS
        self._clock = clock
        self._window = max(1, AHEAD_BYTES // seal.entry_bytes)
        self._entry = bytearray(seal.entry_bytes)
        self._known: OrderedDict[bytes, float] = OrderedDict()  # when the server was known to have that page
        self._ahead: deque[PageKey] = deque()  # to be asked for
        self._coming: deque[PageKey] = deque()  # asked for
        self._untold: deque[bytes] = deque()  # stored, but the server has not said so yet
        self._loaded = self._stored = self._refused = 0
        self._misses: dict[str, int] = dict.fromkeys(CAUSES, 0)
        self._up = False  # until it has answered
        self._said: bool | None = None  # what the log has last been told of that
        self._pause = 0.0
        self._again = 0.0  # when a server that has failed is tried again
        self._full_until = 0.0
        self._full = False

    # --- asked by any thread

    @property
    def up(self) -> bool:
        return self._up

    def lookup(self, chain: PageChain, first: int, limit: int) -> int:
        if not self._up:
            return 0
        oldest, known, digests = self._clock() - self._fresh, self._known, chain.digests
        end = first
        while end < limit and known.get(digests[end], oldest) > oldest:
            end += 1
        return end - first

    def holds(self, digest: bytes) -> bool:
        oldest = self._clock() - self._fresh
        return self._known.get(digest, oldest) > oldest

    def stats(self) -> TierStats:
        pages = len(self._known)
        size = pages * self._seal.entry_bytes
        full = self._full or not self._up
        return TierStats(pages, size, self._loaded, self._stored, 0, self._refused, not full, dict(self._misses))

    # --- one thread

    def ask(self, digests: Sequence[bytes]) -> None:
        """All of them in groups first; then those of the first group that is not complete, one by one. The rest of the
        groups that are not complete count as absent: what comes after a gap is of no use."""
        if not self._ready():
            return
        groups = [digests[at : at + GROUP] for at in range(0, len(digests), GROUP)]
        try:
            counts = self._counts(groups)
            gaps = [group for group, count in zip(groups, counts, strict=True) if count != len(group)]
            for group, count in zip(groups, counts, strict=True):
                for digest in group:
                    self._know(digest, count == len(group))
            for digest, count in zip(gaps[0], self._counts([[d] for d in gaps[0]]), strict=True) if gaps else ():
                self._know(digest, count == 1)
        except self._failures as error:
            self._fail(error)
        else:
            self._worked()

    def _counts(self, groups: Sequence[Sequence[bytes]]) -> list[int]:
        """How many pages of each group are there. They count as just used for the server's policy."""
        line = self._line
        self._settle()
        line.send_packed_command(line.pack_commands([("TOUCH", *map(self._key, group)) for group in groups]))
        counts = []
        for _ in groups:
            count = line.read_response()
            if not isinstance(count, int):
                raise ValueError(f"{count!r:.40} in place of a number")
            counts.append(count)
        return counts

    def prepare(self, keys: Sequence[PageKey]) -> None:
        if not self._ready():
            return
        try:
            self._settle()
            self._ahead.extend(keys)
            self._send_for(self._window)
        except self._failures as error:
            self._fail(error)

    def load(self, key: PageKey) -> memoryview | None:
        if not self._ready():
            return self._missed("error", key)
        begun = self._clock()
        try:
            if not self._coming or self._coming[0] != key:
                self._settle()
                self._ahead.append(key)
            self._send_for(self._window)
            self._coming.popleft()
            try:
                found = self._line.read_response(disable_decoding=True)
            except self._refusal:  # what lies there is no string, or is not for us to read
                return self._missed("foreign", key)
            if not isinstance(found, bytes):
                raise ValueError(f"{found!r:.40} in place of a page")
            self._send_for((self._window + 1) // 2)
        except self._failures as error:
            self._fail(error)
            return self._missed("error", key)
        if self._clock() - begun > PATIENCE:
            self._fail(TimeoutError(f"a page took more than {PATIENCE:g} s"))
        else:
            self._worked()
        if not found:
            return self._missed("absent", key)
        entry = memoryview(found)
        head, data = entry[: self._seal.head_bytes], entry[self._seal.head_bytes :]
        cause = self._seal.fault(key, head, data, len(found))
        if cause is not None:
            return self._missed(cause, key)
        self._loaded += 1
        self._know(key.digest, True)
        return data

    def _send_for(self, least: int) -> None:
        """Asks for pages, up to a window of them, once less than `least` are on their way."""
        if len(self._coming) >= least or not self._ahead:
            return
        asked = []
        while self._ahead and len(self._coming) < self._window:
            key = self._ahead.popleft()
            self._coming.append(key)
            asked.append(("GETRANGE", self._key(key.digest), 0, self._seal.entry_bytes))  # a byte more than it may have
        self._line.send_packed_command(self._line.pack_commands(asked))

    def store_all(self, pages: Sequence[tuple[PageKey, Buffer]]) -> None:
        for key, data in pages:
            self.store(key, data)

    def store(self, key: PageKey, data: bytes | bytearray | memoryview) -> bool:
        if len(data) != self._seal.page_bytes:
            raise ValueError(f"a page takes {self._seal.page_bytes} bytes, not {len(data)}")
        if self.holds(key.digest):
            return True
        if not self._ready() or self._clock() < self._full_until:
            self._refused += 1
            return False
        head = self._seal.head_bytes
        self._entry[:head] = self._seal.head(key, data)
        self._entry[head:] = data
        line = self._line
        try:
            if self._coming:
                self._settle()
            line.send_packed_command(
                line.pack_commands([("SET", self._key(key.digest), memoryview(self._entry), *self._expiry)])
            )
            self._untold.append(key.digest)
            while len(self._untold) >= self._window:
                self._told()
        except self._failures as error:
            self._fail(error)
            return False
        return True

    def tend(self) -> float | None:
        """Hears what the server says of the last pages, and tries one again that has failed."""
        if not self._up:
            wait = self._again - self._clock()
            if wait > 0:
                return wait
        if not self._up or self._untold or self._coming or self._ahead:
            try:
                self._settle()
                if not self._up:
                    self._line.send_packed_command(self._line.pack_commands([("PING",)]))
                    if self._line.read_response() not in (b"PONG", "PONG"):
                        raise ValueError("no answer to PING")
            except self._failures as error:
                self._fail(error)
            else:
                self._worked()
        return None if self._up else max(0.0, self._again - self._clock())

    def close(self) -> None:
        if self._up:
            self.tend()
        self._line.disconnect()

    # --- the connection

    def _key(self, digest: bytes) -> bytes:
        return self._prefix + digest.hex().encode()

    def _ready(self) -> bool:
        """Whether the server may be used now."""
        return self._up or self._clock() >= self._again

    def _settle(self) -> None:
        """Takes the answers that are still to come, so that the next one is the next question's."""
        self._ahead.clear()
        while self._untold:
            self._told()
        while self._coming:
            self._coming.popleft()
            with contextlib.suppress(self._refusal):
                self._line.read_response(disable_decoding=True)

    def _told(self) -> None:
        """Takes the answer to the first store that has none yet."""
        digest = self._untold.popleft()
        try:
            self._line.read_response()
        except self._refusal as error:
            self._refused += 1
            self._full_until = self._clock() + FULL_PAUSE
            if not self._full:
                _log.warning("tailrace: %s takes no KV pages (%s): it is only read from", self._where, error)
            self._full = True
            return
        if self._full:
            _log.warning("tailrace: %s takes KV pages again", self._where)
        self._full = False
        self._stored += 1
        self._know(digest, True)

    def _know(self, digest: bytes, there: bool) -> None:
        known = self._known
        known.pop(digest, None)
        if there:
            known[digest] = self._clock()
            if len(known) > KNOWN_PAGES:
                known.popitem(last=False)

    def _missed(self, cause: Cause, key: PageKey) -> memoryview | None:
        self._misses[cause] += 1
        self._know(key.digest, False)
        return None

    def _fail(self, error: BaseException) -> None:
        """Opens the breaker. What was known may have gone with the server."""
        self._line.disconnect()
        self._refused += len(self._untold)
        for queue in (self._ahead, self._coming, self._untold):
            queue.clear()
        self._known.clear()
        self._pause = min(LONGEST_PAUSE, 2 * self._pause or FIRST_PAUSE)
        self._again = self._clock() + self._pause
        self._up = False
        if self._said is not False:
            _log.warning(
                "tailrace: KV pages are not shared through %s now (%s); it is tried again from time to time",
                self._where,
                str(error) or type(error).__name__,
            )
        self._said = False

    def _worked(self) -> None:
        """Closes the breaker."""
        self._pause = 0.0
        self._up = True
        if self._said is False:
            _log.warning("tailrace: KV pages are shared through %s again", self._where)
        self._said = True
