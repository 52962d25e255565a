"""Pieces of files of a model hub, by range requests: configurations and headers, never weights.

Every answer is bounded, in bytes and in time. A token (HF_TOKEN) goes to the configured hub alone (HF_ENDPOINT):
neither to another address that was typed, nor to where a hub redirects.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import urllib.error
import urllib.request
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from tailrace.terms import ModelError

ENDPOINT = "https://huggingface.co"
TIMEOUT = 20.0
"""Seconds without a byte."""

REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")


@dataclass(frozen=True)
class Repository:
    """A model's repository on a hub: `name` is owner/name, `endpoint` the hub's address without a slash at its end."""

    name: str
    endpoint: str
    revision: str = "main"
    file: str = ""
    """A GGUF file in it, where the address was of one."""

    def fetch(self, path: str, limit: int, begin: int = 0) -> bytes | None:
        """At most `limit` bytes of a file, from `begin` on; None where the repository has no such file. Raises
        ModelError for what else goes wrong."""
        url = f"{self.endpoint}/{self.name}/resolve/{quote(self.revision, safe='')}/{quote(path)}"
        request = urllib.request.Request(url, headers={"Range": f"bytes={begin}-{begin + limit - 1}"})
        request.add_header("User-Agent", "tailrace")
        token = os.environ.get("HF_TOKEN")
        if token and self.endpoint == configured():
            request.add_unredirected_header("Authorization", f"Bearer {token}")
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
                if answer.status == 200 and begin:
                    raise ModelError(f"{url}: the server sends whole files only, so the header cannot be read alone")
                return bytes(answer.read(limit))
        except urllib.error.HTTPError as error:
            with contextlib.closing(error):
                if error.code == 404:
                    return None
                raise self._refused(url, error.code) from None
        except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise ModelError(f"{url}: cannot be read ({str(reason)[:120]})") from None

    def fetch_at(self, path: str, count: int, begin: int) -> bytes | None:
        """As `stored.Fetch` has it."""
        return self.fetch(path, count, begin)

    def _refused(self, url: str, status: int) -> ModelError:
        if status in (401, 403):
            also = "" if self.endpoint == configured() else f" and HF_ENDPOINT={self.endpoint}"
            return ModelError(
                f"{url}: the hub wants to know who asks ({status}): set HF_TOKEN{also}, if you may read {self.name}"
            )
        return ModelError(f"{url}: the hub answered {status}")


def configured() -> str:
    """The address of the hub that names mean, without a slash at its end."""
    return os.environ.get("HF_ENDPOINT", ENDPOINT).rstrip("/")


def repository(model: str) -> Repository | None:
    """The repository that a name (owner/name) or an address (https://hub/owner/name) means; None where it means
    none."""
    if REPOSITORY.fullmatch(model):
        return Repository(model, configured())
    parts = urlsplit(model)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        return None
    match = re.fullmatch(r"/?([^/]+/[^/]+)(?:/(?:tree|resolve|blob)/([^/]+)/?(.*))?/?", parts.path)
    if match is None or not REPOSITORY.fullmatch(match[1]):
        raise ModelError(f"{model}: expected an address such as {ENDPOINT}/OWNER/NAME")
    file = match[3] if (match[3] or "").lower().endswith(".gguf") else ""
    return Repository(match[1], f"{parts.scheme}://{parts.netloc}", match[2] or "main", file)
