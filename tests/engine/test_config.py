"""Sizes that cannot work are refused by name."""

import pytest

from tailrace.engine.config import EngineConfig
from tailrace.terms import InvalidInput


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kv_tokens", 0),
        ("kv_tokens", 15),
        ("step_tokens", 1),
        ("max_running", 0),
        ("max_waiting", -1),
        ("scored_rows", 0),
        ("max_passed", 0),
        ("max_context", -1),
        ("prefill_beside_decodes", -5),
        ("max_preemptions", -1),
        ("decode_share", 0.0),
        ("decode_share", 1.5),
        ("oldest_share", float("nan")),
        ("age_seconds", 0.0),
        ("tenant_weights", {"a": 0.0}),
        ("kv_policy", "mru"),
        ("kv_ttl", 5.0),
        ("kv_tenant_share", 0.0),
        ("kv_tenant_share", 1.1),
        ("tenants", 0),
    ],
)
def test_impossible_sizes_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InvalidInput) as caught:
        EngineConfig(**{name: value})  # type: ignore[arg-type]
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("kv", "asked", "served"), [(512, 4096, 512), (512, 0, 512), (512, 100, 100), (527, 4096, 512), (16, 0, 16)]
)
def test_the_served_context_is_what_one_request_alone_can_hold(kv: int, asked: int, served: int) -> None:
    config = EngineConfig(kv_tokens=kv, max_context=asked)
    assert config.max_context == served
    assert config.kv_tokens == config.pages * 16
