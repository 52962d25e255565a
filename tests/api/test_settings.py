"""What a replica may be told."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tailrace.api.access import store
from tailrace.api.server import run
from tailrace.api.settings import Limits, Settings
from tailrace.terms import InvalidInput, TailraceError


def test_other_hosts_than_loopback_need_a_key() -> None:
    with pytest.raises(InvalidInput, match="API key"):
        Settings("m", host="0.0.0.0").check()
    with pytest.raises(InvalidInput, match="API key"):
        run(Settings("m", host="0.0.0.0", port=0))
    Settings("m", host="0.0.0.0", api_keys=("k",)).check()
    Settings("m").check()
    assert "secret" not in repr(Settings("m", api_keys=("secret",), admin_keys=("secret",)))
    with pytest.raises(InvalidInput, match="API key"):
        Settings("m", host="0.0.0.0", admin_keys=("k",)).check()  # which is for no request


def test_a_file_of_keys_is_enough_for_other_hosts(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    for name, tenant in (("a", "t"), ("b", "t"), ("c", None), ("gone", None)):
        store.create(file, name, tenant=tenant)
    store.create(file, "ops", scopes=("admin",))
    store.revoke(file, "gone")
    made = Settings("m", host="0.0.0.0", keys=str(file), api_keys=("x",))
    made.check()
    assert made.engine().tenants == 1
    assert replace(made, kv_pin=((1,) * 16,)).engine().tenants == 3  # t, c, and the key that was told


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": -1},
        {"port": 70000},
        {"step_tokens": 0},
        {"max_running": 0},
        {"kv_tokens": 0},
        {"max_context": -5},
        {"threads": 0},
        {"threads": 100_000},
        {"backend": "gpu"},
        {"kv_dtype": "int3"},
        {"kv_dtype": "k8v4", "kv_dtype_skip": "first"},
        {"kv_policy": "mru"},
        {"kv_ttl": 5.0},
        {"kv_tenant_share": 0.0},
        {"kv_disk_bytes": 0},
        {"kv_key_file": "key"},
        {"kv_disk_bytes": 1 << 30},
        {"kv_valkey_ttl": 60.0},
        {"kv_valkey": "host:6379", "kv_key_file": "key"},
        {"kv_valkey": "http://host", "kv_key_file": "key"},
        {"kv_valkey": "valkey://", "kv_key_file": "key"},
        {"kv_valkey": "valkey://host:port", "kv_key_file": "key"},
        {"kv_valkey": "valkey://host", "kv_key_file": "key", "prefix_cache": False},
        {"kv_valkey": "valkey://host", "kv_key_file": "key", "kv_policy": "ttl", "kv_ttl": 5.0},
        {"kv_valkey_ttl": -1.0},
        {"kv_valkey_ttl": float("nan")},
        {"kv_valkey_password_file": "password"},
        {"kv_disk": "kv", "prefix_cache": False},
        {"kv_disk": ""},
        {"kv_valkey": " "},
        {"kv_disk": "kv", "kv_policy": "ttl", "kv_ttl": 5.0},
        {"ledger": "mysql://host/db"},
        {"ledger": "x.db", "ledger_rows": -1},
        {"ledger": "x.db", "ledger_retention": -1.0},
        {"slo": "ttft=soon"},
        {"slo": "itl=0.1"},
        {"api_keys": ("",)},
        {"api_keys": ("a b ",)},
        {"admin_keys": ("",)},
        {"keys": "/nowhere/keys.json"},
        {"tls_cert": "cert.pem", "tls_key": None},
        {"cors_origins": ("https://a.test/",)},
        {"unknown_parameters": "ignore"},
        {"log_prompts": True, "log_requests": False},
        {"limits": Limits(choices=0)},
    ],
)
def test_wrong_settings_are_named(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidInput) as refused:
        Settings("m", **wrong).check()  # type: ignore[arg-type]
    assert refused.value.param in wrong


def test_pages_are_shared_only_under_a_key_that_all_have() -> None:
    with pytest.raises(InvalidInput, match="needs --kv-key-file") as refused:
        Settings("m", kv_valkey="valkey://host").check()
    assert refused.value.param == "kv_key_file"


def test_there_is_room_for_the_pinned_prefixes_of_every_key() -> None:
    assert Settings("m", kv_pin=((1,) * 16,)).engine().tenants == 1
    made = Settings("m", kv_pin=((1,) * 16,), kv_policy="ttl", kv_ttl=5.0, api_keys=("a", "b", "b")).engine()
    assert (made.tenants, made.kv_pin, made.kv_policy, made.kv_ttl) == (2, ((1,) * 16,), "ttl", 5.0)


def test_as_many_threads_as_cores_are_possible() -> None:
    Settings("m", threads=os.cpu_count()).check()
    with pytest.raises(InvalidInput, match=f"{os.cpu_count()} cores"):
        Settings("m", threads=5000 + 4 * (os.cpu_count() or 1)).check()


def test_a_port_in_use_is_said_to_be(free_port: int) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port))
        taken.listen()
        with pytest.raises(TailraceError, match="another --port"):
            run(Settings("m", port=free_port))


def test_the_model_is_called_by_its_file_unless_named() -> None:
    assert Settings("/a/b/Small-1B.gguf").model_name == "Small-1B"
    assert Settings("/a/b/folder/").model_name == "folder"
    assert Settings("/a/b.gguf", served_names=("x", "y")).names == ("x", "y")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"loras": (("m", "a"),)}, "name of the model itself"),
        ({"loras": (("a b", "a"),)}, "1 to 128 letters"),
        ({"loras": (("a", "x"), ("a", "y"))}, "two adapters have the name 'a'"),
        ({"loras": (("a", "x"), ("b", "y")), "max_loras": 1}, "2 adapters are more than --max-loras, 1"),
        ({"loras": (("a", "x"),), "max_loras": 0}, "--max-loras must be 1 to 256"),
        ({"max_loras": 4}, "of use only with --lora or --lora-dir"),
        ({"lora_dir": "."}, "--lora-dir is for somebody who may load adapters"),
        ({"lora_dir": "nowhere", "admin_keys": ("k",)}, "--lora-dir nowhere is not a directory"),
    ],
    ids=str,
)
def test_adapters_that_cannot_be_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        Settings("m", **wrong).check()


def test_adapters_get_numbers_and_whole_paths(tmp_path: Path) -> None:
    made = Settings("m", loras=(("a", "x"), ("b", "~/y")), lora_dir=str(tmp_path), admin_keys=("k",))
    made.check()
    assert [(one.id, one.name, one.path) for one in made.engine().adapters] == [
        (1, "a", os.path.abspath("x")),
        (2, "b", os.path.expanduser("~/y")),
    ]
