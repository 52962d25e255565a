"""Where KV events are published, and who may follow them: the checks, which need no ZeroMQ.

Events have token ids in them, so whoever hears them can read prompts. Without keys they stay on this machine. Standard
library only: a server checks its settings before anything heavy loads.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from tailrace.terms import InvalidInput

ADDRESS = re.compile(r"tcp://(\*|localhost|[0-9.]+|\[[0-9a-fA-F:.]+\]):([0-9]{1,5})")
KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")  # 32 bytes in Z85


@dataclass(frozen=True)
class Keys:
    """CURVE keys in Z85: the server's own secret one, and the public ones of those that may subscribe."""

    secret: str = field(repr=False)
    subscribers: frozenset[str]


def check(events: str | None, replay: str | None, key_file: str | None, *, prefix_cache: bool) -> None:
    """InvalidInput, naming the option, unless these addresses can be used so: all that can be said without binding."""
    if events is None:
        for name, value in (("kv_events_replay", replay), ("kv_events_key", key_file)):
            if value is not None:
                flag = "--" + name.replace("_", "-")
                raise InvalidInput(f"{flag} goes with --kv-events, which is not given", param=name)
        return
    import importlib.util

    if importlib.util.find_spec("zmq") is None:
        raise InvalidInput(
            "--kv-events needs pyzmq, which is not installed: pip install 'tailrace[events]'", param="kv_events"
        )
    if not prefix_cache:
        raise InvalidInput("--kv-events tells of the prefix cache, which is off", param="kv_events")
    for name, address in (("kv_events", events), ("kv_events_replay", replay)):
        if address is not None and not is_loopback(address, name) and key_file is None:
            raise InvalidInput(
                f"KV events have the prompts' token ids in them, and {address} can be reached from other machines: "
                "give --kv-events-key FILE with the keys of those that may follow them, or an address such as "
                "tcp://127.0.0.1:5557",
                param=name,
            )
    if events == replay:
        raise InvalidInput(f"--kv-events and --kv-events-replay are both {events}", param="kv_events_replay")
    if key_file is not None:
        read_keys(key_file)


def is_loopback(address: str, name: str) -> bool:
    """Whether only this machine reaches it. InvalidInput unless it is an address to bind to."""
    import ipaddress

    found = ADDRESS.fullmatch(address)
    host = found[1].strip("[]") if found else ""
    try:
        loopback = host == "localhost" or (host != "*" and ipaddress.ip_address(host).is_loopback)
    except ValueError:
        found = None
    if found is None or not 0 < int(found[2]) < 65536:
        raise InvalidInput(
            f"--{name.replace('_', '-')} must be an address of this machine and a port, such as tcp://127.0.0.1:5557 "
            f"or tcp://*:5557, not {address!r}",
            param=name,
        )
    return loopback


def read_keys(file: str) -> Keys:
    """The keys in a TOML file: `secret`, and the list `subscribers`. InvalidInput says what is wrong, and quotes no
    key."""
    import tomllib

    def wrong(what: str) -> InvalidInput:
        return InvalidInput(f"--kv-events-key {file} {what}", param="kv_events_key")

    try:
        read = tomllib.loads(Path(file).expanduser().read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise wrong(f"cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise wrong(f"is not TOML: {error}") from None
    if read.keys() != {"secret", "subscribers"}:
        raise wrong('must have "secret" and "subscribers" in it, and nothing else')
    secret, subscribers = read["secret"], read["subscribers"]
    if not _is_key(secret):
        raise wrong('has no key of 40 characters (Z85) as its "secret"')
    if not isinstance(subscribers, list) or not subscribers or not all(map(_is_key, subscribers)):
        raise wrong('must have a list of public keys of 40 characters (Z85) as its "subscribers"')
    return Keys(secret, frozenset(subscribers))


def _is_key(value: object) -> bool:
    return isinstance(value, str) and KEY.fullmatch(value) is not None
