"""Bytes of weights: formats with their scales, and which tensors have which."""

from __future__ import annotations

from typing import Any

import pytest

from tailrace.terms import InvalidInput, ModelError
from tailrace.twin.shapes.names import matches
from tailrace.twin.shapes.precision import FORMATS, scheme_of
from tailrace.twin.shapes.split import Weights
from tailrace.twin.shapes.tensors import Part, Tensor
from tests.twin.models import GPT_OSS, LLAMA_8B, MISTRAL_7B, MIXTRAL, QWEN3_4B, V3, shape, weights


def _matrix(rows: int, columns: int, times: int = 1) -> Tensor:
    return Tensor(Part.DENSE, "mlp.up_proj", rows, columns, times=times)


@pytest.mark.parametrize(
    ("form", "size"),
    [
        ("bf16", 2 * 300 * 500),
        ("fp8", 300 * 500 + 300 * 4),
        ("fp8-tensor", 300 * 500 + 4),
        ("fp8-block", 300 * 500 + 3 * 4 * 4),
        ("int4", 300 * 250 + 300 * 4 * 2),
        ("mxfp4", 300 * 250 + 300 * 16),
        ("nvfp4", 300 * 250 + 300 * 32 + 4),
    ],
)
def test_a_matrix_takes_its_values_and_its_scales(form: str, size: int) -> None:
    """Groups and tiles at the edges have a scale as well."""
    assert FORMATS[form].bytes(_matrix(300, 500)) == size
    assert FORMATS[form].bytes(_matrix(300, 500, times=3)) == 3 * size


@pytest.mark.parametrize(
    ("name", "size"),
    [(GPT_OSS, 65_248_815_744), ("openai--gpt-oss-20b", 13_761_264_768)],
)
def test_experts_in_mxfp4_take_what_the_index_of_the_files_says(name: str, size: int) -> None:
    assert weights(name).bytes == size


def test_fine_grained_fp8_takes_what_the_files_take() -> None:
    """DeepSeek-V3 is 688.6 GB with its multi-token prediction, and copies of embedding and head in that."""
    made = weights(V3)
    copies = 2 * made.shape.vocab * made.shape.hidden * 2
    assert made.bytes + made.mtp_bytes + copies == pytest.approx(688.6e9, rel=0.001)
    assert set(made.by_format) == {"fp8-block", "bf16"}


def test_what_is_not_a_linear_layer_stays_in_16_bits() -> None:
    made = weights(MIXTRAL, "int4")
    stay = {tensor.part for _, tensor, form in made.pieces if form.name == "bf16"}
    assert stay == {Part.EMBEDDING, Part.HEAD, Part.ROUTER, Part.NORM}


def test_a_mixture_takes_memory_for_all_its_experts() -> None:
    """8x7B at four bits is 24 GB, of which a token uses a quarter; what it uses alone would fit a device of 16 GB."""
    made = weights(MIXTRAL, "int4")
    assert made.bytes / 1e9 == pytest.approx(46.7 * 4.125 / 8, rel=0.02)
    assert made.shape.active / made.shape.parameters < 0.3


SCHEMES: dict[str, tuple[dict[str, Any], str, float]] = {
    "compressed-tensors int4": (
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
         "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
             "num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}}}},
        "int4-group", 4.125),
    "compressed-tensors fp8": (
        {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
         "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
             "num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}}}},
        "fp8-channel", 8.01),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}, "gptq-int4", 4.17),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, "awq-int4", 4.16),
    "modelopt nvfp4": ({"quant_algo": "NVFP4", "exclude_modules": ["lm_head"], "group_size": 16}, "nvfp4", 4.5),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bnb-4bit", 4.5),
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEMES)
def test_methods_of_quantisation_are_read_from_the_configuration(name: str) -> None:
    config, form, bits = SCHEMES[name]
    made = shape({**MISTRAL_7B, "quantization_config": config})
    held = Weights(made, scheme_of(made.quantization, made.dtype, "model"))
    linear = sum(tensor.values for _, tensor, kind in held.pieces if kind.name == form)
    assert linear == 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 14336 * 4096)
    assert 8 * held.by_format[form] / linear == pytest.approx(bits, abs=0.02)


def test_layers_may_have_different_formats() -> None:
    config = {"quant_algo": "MIXED_PRECISION", "quantized_layers": {
        "model.layers.0.mlp.up_proj": {"quant_algo": "NVFP4"}, "model.layers.1.self_attn.q_proj": {"quant_algo": "FP8"},
    }}  # fmt: skip
    scheme = scheme_of(config, "bfloat16", "model")
    assert scheme.of(0, _matrix(8, 16)).name == "nvfp4"
    assert scheme.of(1, _matrix(8, 16)).name == "bf16"
    assert scheme.of(1, Tensor(Part.ATTENTION, "self_attn.q_proj", 8, 16)).name == "fp8-tensor"


@pytest.mark.parametrize(
    ("pattern", "layer", "name", "meant"),
    [
        ("lm_head", None, "lm_head", True),
        ("gate", 3, "mlp.gate", True),
        ("gate", 3, "mlp.gate_proj", False),
        ("model.layers.0*", 0, "self_attn.q_proj", True),
        ("model.layers.1.*", 10, "self_attn.q_proj", False),
        ("model.layers.*.self_attn", 7, "self_attn.q_proj", True),
        ("re:.*self_attn.*", 7, "self_attn.q_proj", True),
        ("re:.*mlp\\.(gate|up|down)_proj.*", 7, "mlp.experts.up_proj", False),
        ("model.language_model.layers.4.mlp.shared_expert", 4, "mlp.shared_experts.up_proj", True),
        ("backbone.layers.4.mixer.experts.17.up_proj", 4, "mlp.experts.up_proj", True),
        ("*.ffn.shared_experts.*", 4, "mlp.shared_experts.up_proj", True),
        ("model.layers.4.block_sparse_moe.gate", 4, "mlp.gate", True),
    ],
)
def test_patterns_of_many_dialects_mean_modules(pattern: str, layer: int | None, name: str, meant: bool) -> None:
    assert matches((pattern,), layer, name) is meant


def test_a_tied_head_is_there_once() -> None:
    made = weights(QWEN3_4B)
    assert made.bytes == 2 * made.shape.parameters
    assert made.shape.parameters == 4_022_468_096


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"torch_dtype": None}, "torch_dtype. is missing"),
        ({"torch_dtype": "posit16"}, "dtype is 'posit16'"),
        ({"quantization_config": {"quant_method": "magic"}}, "quant_method is 'magic'"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config of gptq is not understood"),
        ({"quantization_config": {"quant_algo": "W1A1"}}, "quantization_config of modelopt is not understood"),
    ],
)
def test_bytes_that_are_not_known_are_refused(changes: dict[str, Any], words: str) -> None:
    made = shape({**MISTRAL_7B, **changes})
    with pytest.raises(ModelError, match=words):
        scheme_of(made.quantization, made.dtype, "model")
    assert scheme_of(made.quantization, made.dtype, "model", "bf16").bytes(None, _matrix(2, 3)) == 12


def test_a_format_that_is_not_known_is_refused_with_those_that_are() -> None:
    with pytest.raises(InvalidInput, match=r"'q5' is not known; known are .*nvfp4"):
        weights(LLAMA_8B, "q5")
