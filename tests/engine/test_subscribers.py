"""Where KV events may be published, and with what keys."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tailrace.engine import subscribers
from tailrace.terms import InvalidInput

HERE, THERE = "tcp://127.0.0.1:5557", "tcp://0.0.0.0:5557"
SECRET, PUBLIC = "JTKVSB%%)wK0E.X)V>+}o?pNmC{O&4W4b!Ni{Lh6", "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"


def key_file(folder: Path, text: str = f'secret = "{SECRET}"\nsubscribers = ["{PUBLIC}"]\n') -> str:
    file = folder / "events.toml"
    file.write_text(text)
    return str(file)


def check(events: str | None, replay: str | None = None, key: str | None = None, prefix_cache: bool = True) -> None:
    subscribers.check(events, replay, key, prefix_cache=prefix_cache)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "[::1]"])
def test_loopback_needs_no_key(host: str) -> None:
    check(f"tcp://{host}:5557", f"tcp://{host}:5558")


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "10.0.0.1", "[::]", "[2001:db8::1]"])
def test_every_other_address_needs_one(host: str, tmp_path: Path) -> None:
    for addresses in ((f"tcp://{host}:5557", None), (HERE, f"tcp://{host}:5558")):
        with pytest.raises(InvalidInput, match="--kv-events-key FILE"):
            check(*addresses)
        check(*addresses, key_file(tmp_path))


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1:5557", "tcp://127.0.0.1", "tcp://127.0.0.1:0", "tcp://127.0.0.1:65536", "tcp://127.0.0.1:*", "ipc:///x",
     "tcp://a.example:1", "tcp://127.1:5", "tcp://[::1:5", "tcp://::1:5557", "udp://127.0.0.1:5", "", "tcp://1.2.3.4;0:5"],
)  # fmt: skip
def test_what_is_no_address_is_refused_by_name(address: str) -> None:
    with pytest.raises(InvalidInput, match="--kv-events must be an address") as refused:
        check(address)
    assert refused.value.param == "kv_events"
    with pytest.raises(InvalidInput, match="--kv-events-replay must be an address"):
        check(HERE, address)


def test_options_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    check(None)
    for wrong, param in (
        ((None, HERE), "kv_events_replay"),
        ((None, None, "file"), "kv_events_key"),
        ((HERE, HERE), "kv_events_replay"),
        ((HERE, None, str(tmp_path / "absent")), "kv_events_key"),
        ((HERE, None, None, False), "kv_events"),
    ):
        with pytest.raises(InvalidInput) as refused:
            check(*wrong)
        assert refused.value.param == param


def test_without_pyzmq_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InvalidInput, match=r"pip install 'tailrace\[events\]'"):
        check(HERE)


def test_keys_are_read_and_not_shown(tmp_path: Path) -> None:
    keys = subscribers.read_keys(key_file(tmp_path))
    assert (keys.secret, keys.subscribers) == (SECRET, {PUBLIC})
    assert SECRET not in repr(keys)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("secret", "is not TOML"),
        (f'secret = "{SECRET}"', "must have"),
        (f'secret = "{SECRET}"\nsubscribers = []', "public keys"),
        (f'secret = "{SECRET}"\nsubscribers = "{PUBLIC}"', "public keys"),
        (f'secret = "{SECRET}"\nsubscribers = ["{PUBLIC}", "short"]', "public keys"),
        (f'secret = "{SECRET[1:]}"\nsubscribers = ["{PUBLIC}"]', "secret"),
        (f'secret = "{SECRET}"\nsubscribers = ["{PUBLIC}"]\nsubscriber = "x"', "nothing else"),
    ],
)
def test_files_that_are_no_keys_are_refused_and_not_quoted(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=said) as refused:
        subscribers.read_keys(key_file(tmp_path, text))
    assert SECRET[1:] not in str(refused.value)
