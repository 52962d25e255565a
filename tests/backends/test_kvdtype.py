"""The names of KV types, what they leave out, and the bytes that they take."""

from __future__ import annotations

import pytest

from tailrace.backends.kvdtype import BF16, Kept, KvDtype, parse
from tailrace.terms import InvalidInput, ModelError


@pytest.mark.parametrize(
    ("text", "key", "value", "name"),
    [
        ("bf16", Kept.BF16, Kept.BF16, "bf16"),
        ("k16v16", Kept.BF16, Kept.BF16, "bf16"),
        ("fp16", Kept.F16, Kept.F16, "fp16"),
        ("f16", Kept.F16, Kept.F16, "fp16"),
        ("int8", Kept.I8, Kept.I8, "int8"),
        ("k8v8", Kept.I8, Kept.I8, "int8"),
        ("int4", Kept.I4, Kept.I4, "int4"),
        ("k8v4", Kept.I8, Kept.I4, "k8v4"),
        ("k16v8", Kept.BF16, Kept.I8, "k16v8"),
        ("k4v16", Kept.I4, Kept.BF16, "k4v16"),
        ("f32", Kept.F32, Kept.F32, "f32"),
    ],
)
def test_a_name_says_what_keys_and_values_are_kept_as(text: str, key: Kept, value: Kept, name: str) -> None:
    made = parse(text)
    assert (made.key, made.value, made.name) == (key, value, name)
    if name != "f32":
        assert parse(made.name) == made


@pytest.mark.parametrize("text", ["", "k8", "v4", "k8v5", "k4v4 ", "K8V4", "int2", "fp8", "k8v4v4", "float16"])
def test_any_other_name_is_refused_with_those_that_there_are(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"bf16, fp16, int8, int4.*k8v4"):
        parse(text)


def test_layers_can_be_left_out() -> None:
    made = parse("k8v4", "5,0-2,28")
    assert made.skip == (0, 1, 2, 5, 28)
    assert made.name == "k8v4 but 0,1,2,5,28"
    assert made.of(1) == (Kept.BF16, Kept.BF16)
    assert made.of(3) == (Kept.I8, Kept.I4)
    assert parse("bf16", "0,1") == BF16  # which is what they are anyway
    made.check(29)
    with pytest.raises(ModelError, match=r"layer 28.*0 \.\. 27"):
        made.check(28)


@pytest.mark.parametrize("text", ["a", "1,", "3-1", "-1", "1;2", "0-", "99999"])
def test_layers_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="--kv-dtype-skip"):
        parse("int8", text)


def test_less_than_f32_cannot_be_left_out_of_it() -> None:
    with pytest.raises(InvalidInput, match="less than f32"):
        parse("f32", "0")


def test_bytes_count_scales_and_what_values_are_padded_to() -> None:
    def bytes_of(text: str, head_dim: int) -> int:
        return parse(text).layer_bytes(0, 1, head_dim)

    assert [bytes_of(name, 64) for name in ("bf16", "fp16", "int8", "k8v4", "int4")] == [256, 256, 132, 106, 80]
    assert bytes_of("int8", 20) == 20 + 2 + 32 + 2
    assert bytes_of("int4", 80) == 40 + 12 + 48 + 12
    assert bytes_of("bf16", 20) == 80
    skipped = KvDtype(Kept.I8, Kept.I4, (0,))
    assert skipped.token_bytes(range(3), 2, 64) == 2 * (256 + 2 * 106)


def test_two_and_two_fifths_of_the_users_fit_with_k8v4() -> None:
    for head_dim in (64, 96, 128, 256):
        assert parse("bf16").layer_bytes(0, 1, head_dim) >= 2.4 * parse("k8v4").layer_bytes(0, 1, head_dim)
