"""The adapters that a server has, by the names that requests ask for them under, and loading them while it runs."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tailrace.api.aside import aside
from tailrace.api.errors import HttpError
from tailrace.engine.spec import AdapterSpec
from tailrace.terms import InvalidInput

if TYPE_CHECKING:
    from tailrace.api.settings import Settings
    from tailrace.engine.client import EngineClient
    from tailrace.engine.protocol import Adapted

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
FILES = ("adapter_config.json", "adapter_model.safetensors")


@dataclass(frozen=True)
class NamedAdapter:
    """One that is served. `digest` is the SHA-256 of its files, `bytes` what it takes in memory."""

    id: int
    name: str
    digest: str
    rank: int
    bytes: int
    created: int


class Adapters:
    """Owned by the loop. A name is an adapter's until it is unloaded, or another one takes its place."""

    def __init__(self, settings: Settings, client: EngineClient) -> None:
        self._settings = settings
        self._client = client
        self._named: dict[str, NamedAdapter] = {}
        self._starting = {one.id: one.name for one in client.spec.adapters}  # those of the server's start
        self._last = len(client.spec.adapters)
        self._loading: set[str] = set()
        client.on_adapters = self._started

    @property
    def all(self) -> list[NamedAdapter]:
        """Those that are served, in the order in which they came."""
        return list(self._named.values())

    def find(self, name: str) -> NamedAdapter | None:
        """The one that is served under a name."""
        return self._named.get(name)

    async def load(self, name: str, path: str, *, replace: bool = False) -> NamedAdapter:
        """Loads an adapter from the directory that adapters may come from, beside all that runs; with `replace` also
        where the name is another's, which requests get until then. Raises HttpError, InvalidInput, EngineDied."""
        check_name(name, self._settings)
        if name in self._loading:
            raise HttpError(409, f"the adapter {name!r} is being loaded", param="lora_name", code="busy")
        if name in self._named and not replace:
            raise InvalidInput(
                f"there is an adapter {name!r} already: unload it, or give load_inplace as true", param="lora_name"
            )
        self._loading.add(name)
        try:
            seconds = self._settings.timeouts.lora
            try:
                folder = await aside(lambda: inside(self._settings.lora_dir, path), seconds)
                self._last += 1
                spec = AdapterSpec(self._last, name, str(folder))
                news = await self._client.load_adapter(spec)
            except TimeoutError:
                message = f"the adapter's files could not be read within {seconds:g} s (--lora-timeout)"
                raise HttpError(
                    503, message, kind="service_unavailable", param="lora_path", code="timeout", retry=False
                ) from None
            if news.error:
                raise InvalidInput(f"the adapter cannot be loaded: {news.error}", param="lora_path")
            before = self._named.pop(name, None)
            self._add(name, news)
            if before is not None:
                self._client.unload_adapter(before.id)
            return self._named[name]
        finally:
            self._loading.discard(name)

    def unload(self, name: str) -> None:
        """No later request gets it; those that have it end as ever. Raises HttpError 404."""
        gone = self._named.pop(name, None)
        if gone is None:
            shown = name if len(name) <= 200 else name[:200] + "..."
            raise HttpError(404, f"there is no adapter {shown!r}", param="lora_name", code="model_not_found")
        self._client.unload_adapter(gone.id)

    def _add(self, name: str, news: Adapted) -> None:
        self._named[name] = NamedAdapter(news.id, name, news.digest, news.rank, news.bytes, int(time.time()))

    def _started(self, told: list[Adapted]) -> None:
        """An engine has begun: with which of the adapters that it was to have. What is in their files by now counts."""
        names = {one.id: one.name for one in self._named.values()} or self._starting
        for news in told:
            name = names.get(news.id)
            if name is not None and news.error:
                self._named.pop(name, None)
            elif name is not None:
                self._add(name, news)


def check_name(name: str, settings: Settings) -> None:
    """Raises InvalidInput for what cannot be an adapter's name."""
    if not NAME.fullmatch(name):
        raise InvalidInput(
            f"an adapter's name is 1 to 128 letters, digits and . _ : / -, beginning with a letter or digit; not "
            f"{name[:140]!r}",
            param="lora_name",
        )
    if name in settings.names:
        raise InvalidInput(f"{name!r} is the name of the model itself", param="lora_name")


def inside(root: str | None, path: str) -> Path:
    """The directory that a caller means, if it and its files lie below `root`, wherever links lead; relative paths
    begin there. Raises HttpError 403, InvalidInput."""
    if root is None:
        raise HttpError(
            403,
            "adapters are loaded at run time only from the directory that --lora-dir names, and it names none",
            kind="permission_error",
            param="lora_path",
            code="lora_dir_missing",
        )
    base = Path(root).expanduser().resolve()
    try:
        folder = (base / path).resolve()
        found = [folder, *((folder / name).resolve() for name in FILES)]
    except (OSError, ValueError, RuntimeError) as error:  # no path at all, or links in a circle
        raise InvalidInput(f"lora_path is not a path: {error}", param="lora_path") from None
    if not all(one.is_relative_to(base) for one in found):
        raise InvalidInput(
            "lora_path leads out of the directory that adapters may come from (--lora-dir)", param="lora_path"
        )
    return folder
