"""A checkpoint opens the same whatever its format; what it lacks, contradicts or hides is refused by name."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tailrace.backends import Format
from tailrace.backends.reference import ReferenceBackend, dequantize
from tailrace.models import load_model, open_checkpoint
from tailrace.models.files.mapped import PermutedWeight
from tailrace.terms import ModelError
from tests.batches import logits_of
from tests.models.gguf_bytes import GgufBytes, Tensor, convert

GOLDEN = Path(__file__).parent.parent / "golden"
PROMPT = np.load(GOLDEN / "prompt.npy").tolist()
LOGITS = np.load(GOLDEN / "logits.npz")


def copy(name: str, folder: Path) -> Path:
    """A golden checkpoint that may be spoilt."""
    shutil.copytree(GOLDEN / "models" / name, folder, dirs_exist_ok=True)
    return folder


def edit(folder: Path, **fields: Any) -> Path:
    """Changes fields of config.json; `...` takes one away."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
    return folder


def gguf_of(name: str, **metadata: Any) -> GgufBytes:
    return convert(open_checkpoint(GOLDEN / "models" / name), metadata)


@pytest.mark.parametrize("name", ["llama", "llama-biased", "mistral-full", "qwen2", "qwen3", "rope-default-qwen3"])
def test_a_gguf_file_gives_the_same_tensors_and_logits_as_safetensors(name: str, tmp_path: Path) -> None:
    folder = open_checkpoint(GOLDEN / "models" / name)
    file = open_checkpoint(convert(folder).write(tmp_path / "x.gguf"))
    assert set(file.tensors) == set(folder.tensors)
    for key, weight in folder.tensors.items():
        assert np.array_equal(dequantize(file.tensors[key]), dequantize(weight)), key
    found = logits_of(ReferenceBackend(load_model(file), pages=5), PROMPT[:80], range(80))
    expected = LOGITS[name] if name in ARCHITECTURES else None
    if expected is not None:
        assert np.abs(found - expected).max() < 1e-4


ARCHITECTURES = {name for name in LOGITS.files if not name.startswith("rope-")}


def test_a_window_in_a_gguf_file_is_mistrals(tmp_path: Path) -> None:
    made = gguf_of("mistral-window", **{"llama.attention.sliding_window": 16})
    model = load_model(open_checkpoint(made.write(tmp_path / "x.gguf")))
    assert model.config.model_type == "mistral"
    found = logits_of(ReferenceBackend(model, pages=5), PROMPT[:80], range(80))
    assert np.abs(found - LOGITS["mistral-window"]).max() < 1e-4


def test_permuted_rows_are_put_right_only_when_touched(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(gguf_of("llama").write(tmp_path / "x.gguf"))
    weight = checkpoint.tensors["model.layers.0.self_attn.k_proj.weight"]
    assert isinstance(weight, PermutedWeight)
    load_model(checkpoint)
    assert "data" not in weight.__dict__
    original = open_checkpoint(GOLDEN / "models" / "llama").tensors[weight.name]
    assert np.array_equal(dequantize(weight), dequantize(original))
    assert np.array_equal(dequantize(weight.rows(np.array([3, 1]))), dequantize(original)[[3, 1]])


def test_quantised_rows_are_put_right_exactly(tmp_path: Path) -> None:
    made = gguf_of("llama")
    rng = np.random.default_rng(3)
    raw = rng.integers(0, 64, (32, 20), dtype=np.uint8)  # 32 rows of one Q4_1 block
    made.tensors = [
        (name, Tensor((32, 32), raw.tobytes(), kind=3) if name == "blk.0.attn_q.weight" else tensor)
        for name, tensor in made.tensors
    ]
    weight = open_checkpoint(made.write(tmp_path / "x.gguf")).tensors["model.layers.0.self_attn.q_proj.weight"]
    assert weight.format is Format.Q4_1
    # Head 1's row 1 of the second half (dimension 4 + 1 of 8) is stored as its row 2 * 1 + 1.
    assert weight.data[8 + 4 + 1].tobytes() == raw[8 + 3].tobytes()


def test_llama3_scaling_comes_as_factors_in_a_gguf_file(tmp_path: Path) -> None:
    folder = open_checkpoint(GOLDEN / "models" / "rope-llama3")
    scaled = load_model(folder).rope.inv_freq
    made = convert(folder)
    plain = 1 / 500000.0 ** (np.arange(0, 16, 2) / 16)
    made.tensors.append(("rope_freqs.weight", Tensor((8,), (plain / scaled).astype(np.float32).tobytes())))
    model = load_model(open_checkpoint(made.write(tmp_path / "x.gguf")))
    np.testing.assert_allclose(model.rope.inv_freq, scaled, rtol=1e-6)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (Tensor((7,), bytes(28)), r"rope_freqs\.weight is F32 of shape \[7\]"),
        (Tensor((8,), bytes(32)), r"rope_freqs\.weight holds a factor that is not above zero"),
        (Tensor((8,), np.full(8, np.nan, np.float32).tobytes()), "holds a factor that is not above zero"),
        (Tensor((8,), bytes(16), kind=1), r"rope_freqs\.weight is F16"),
    ],
)
def test_wrong_rope_factors_are_refused(tensor: Tensor, message: str, tmp_path: Path) -> None:
    made = gguf_of("rope-default")
    made.tensors.append(("rope_freqs.weight", tensor))
    with pytest.raises(ModelError, match=message):
        load_model(open_checkpoint(made.write(tmp_path / "x.gguf")))


@pytest.mark.parametrize(
    ("metadata", "kind"),
    [
        ({"llama.rope.scaling.type": "none"}, "default"),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 8.0}, "linear"),
        ({"llama.rope.scale_linear": 8.0}, "linear"),
        (
            {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
            | {"llama.rope.scaling.original_context_length": 128},
            "yarn",
        ),
    ],
)
def test_rope_scaling_of_a_gguf_file(metadata: dict[str, Any], kind: str, tmp_path: Path) -> None:
    model = load_model(open_checkpoint(gguf_of("llama", **metadata).write(tmp_path / "x.gguf")))
    assert model.config.rope.kind == kind
    if kind == "linear":
        expected = load_model(open_checkpoint(GOLDEN / "models" / "llama")).rope.inv_freq / np.float32(8)
        assert np.array_equal(model.rope.inv_freq, expected)


GGUF_WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"general.architecture": "gemma2"}, "architecture 'gemma2' is not supported"),
    "no architecture": ({"general.architecture": None}, "architecture None is not supported"),
    "number as architecture": ({"general.architecture": 3}, "architecture 3 is not supported"),
    "experts": ({"llama.expert_count": 8}, "expert_count is 8, which is not supported"),
    "split": ({"split.count": 2}, "one of 2 parts"),
    "adapter": ({"general.type": "adapter"}, "general.type is 'adapter'"),
    "unknown key": ({"llama.attention.scale": 0.5}, "attention.scale is not understood"),
    "soft cap": ({"llama.attn_logit_softcapping": 50.0}, "attn_logit_softcapping is not understood"),
    "rope kind": (
        {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0},
        "'longrope', which is not",
    ),
    "no rope factor": ({"llama.rope.scaling.type": "linear"}, "rope.scaling.factor is missing"),
    "half a head": ({"llama.rope.dimension_count": 4}, "rope.dimension_count is 4, not the head's 8"),
    "value length": ({"llama.attention.value_length": 4}, "attention.value_length is 4, not the head's 8"),
    "vocabulary": ({"llama.vocab_size": 95}, "vocab_size is 95, but token_embd.weight has 96 rows"),
    "layers": ({"llama.block_count": 3}, r"tensor model\.layers\.2\.input_layernorm\.weight is missing"),
    "fewer layers": ({"llama.block_count": 1}, r"tensor model\.layers\.1\.[a-z_.]+ is not one that llama models have"),
    "no layers": ({"llama.block_count": 0}, "block_count is 0"),
    "absurd layers": ({"llama.block_count": (1 << 32) - 1}, "block_count is 4294967295"),
    "hidden size": ({"llama.embedding_length": 64}, r"embed_tokens\.weight has the shape"),
    "heads": ({"llama.attention.head_count": 8}, r"attn_q\.weight has the shape \[32, 32\], but 8 heads of 8"),
    "no eps": ({"llama.attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon is missing"),
    "no context": ({"llama.context_length": None}, "context_length is missing"),
    "rope base": ({"llama.rope.freq_base": -1.0}, r"rope\.freq_base is -1\.0"),
    "no heads": ({"llama.attention.head_count": None}, "attention.head_count is missing"),
    "zero heads": ({"llama.attention.head_count": 0}, "attention.head_count is 0"),
    "heads a layer": ({"llama.attention.head_count_kv": [2, 1]}, "differs from layer to layer"),
    "text as a size": ({"llama.embedding_length": "32"}, "is '32'; expected a whole number"),
    "eps": ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "attention.layer_norm_rms_epsilon is nan"),
    "window": ({"llama.attention.sliding_window": "x"}, "sliding_window is 'x'"),
    "bos": ({"tokenizer.ggml.bos_token_id": 96}, "bos_token_id is 96; expected a token id below 96"),
    "eos": ({"tokenizer.ggml.eos_token_id": 1 << 20}, "eos_token_id is 1048576"),
    "no tokenizer": ({"tokenizer.ggml.tokens": None}, r"tokenizer\.ggml\.tokens is missing"),
    "tokens of numbers": ({"tokenizer.ggml.tokens": [1, 2]}, r"tokenizer\.ggml\.tokens is missing or not a list of"),
    "too many tokens": ({"tokenizer.ggml.tokens": ["t"] * 97}, "has 97 entries, but the model has 96 rows"),
    "causal": ({"llama.attention.causal": False}, "attention.causal is False"),
}


@pytest.mark.parametrize("wrong", sorted(GGUF_WRONG))
def test_a_gguf_file_that_is_not_understood_is_refused_by_name(wrong: str, tmp_path: Path) -> None:
    metadata, message = GGUF_WRONG[wrong]
    path = gguf_of("llama", **metadata).write(tmp_path / "x.gguf")
    with pytest.raises(ModelError, match=message) as refused:
        load_model(open_checkpoint(path))
    assert str(path) in str(refused.value)


def test_equal_numbers_of_every_layer_count_as_one(tmp_path: Path) -> None:
    made = gguf_of("llama", **{"llama.attention.head_count_kv": [2, 2], "llama.feed_forward_length": [48, 48]})
    assert load_model(open_checkpoint(made.write(tmp_path / "x.gguf"))).config.kv_heads == 2


@pytest.mark.parametrize(
    "name",
    [
        "blk.0.attn_sinks.weight",
        "blk.0.attn_q_norm.weight",
        "blk.00.attn_q.weight",
        "model.norm.weight",
        "x",
        "blk.7.attn_q.bias",
    ],
)
def test_a_tensor_that_the_architecture_does_not_have_is_refused(name: str, tmp_path: Path) -> None:
    """Also one that has a Hugging Face name already, which must not take another's place."""
    made = gguf_of("llama")
    made.tensors.append((name, Tensor((32,), bytes(128))))
    with pytest.raises(ModelError, match=r"tensor [a-z0-9_.]+ is not one that llama models have"):
        load_model(open_checkpoint(made.write(tmp_path / "x.gguf")))


def test_yarn_in_a_gguf_file_is_yarn_in_a_folder(tmp_path: Path) -> None:
    folder = open_checkpoint(GOLDEN / "models" / "rope-yarn-mscale")
    scaling = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128}
    scaling |= {"rope.scaling.yarn_beta_fast": 24.0, "rope.scaling.yarn_beta_slow": 2.0}
    made = convert(folder, {f"llama.{key}": value for key, value in scaling.items()})
    found = load_model(open_checkpoint(made.write(tmp_path / "x.gguf")))
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 24.0}
    spelled = edit(copy("rope-yarn-mscale", tmp_path / "model"), rope_parameters=rope | {"beta_slow": 2.0})
    expected = load_model(open_checkpoint(spelled))
    assert np.array_equal(found.rope.inv_freq, expected.rope.inv_freq)
    assert found.rope.scale == expected.rope.scale > 1


def test_text_assets_of_a_gguf_file(tmp_path: Path) -> None:
    made = gguf_of("llama", **{"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.add_bos_token": True})
    made.metadata.append(("tokenizer.chat_template", "{{ messages }}"))
    text = open_checkpoint(made.write(tmp_path / "x.gguf")).text
    assert (text.bos_id, text.eos_ids, text.add_bos) == (1, (2, 5), True)
    assert text.chat_template == "{{ messages }}"
    assert text.tokenizer_json is None
    assert text.gguf is not None
    assert text.gguf["tokenizer.ggml.tokens"][:2] == ["t0", "t1"]
    assert all(key.startswith("tokenizer.") for key in text.gguf)


def test_text_assets_of_a_folder(tmp_path: Path) -> None:
    folder = copy("llama", tmp_path)
    (folder / "tokenizer.json").write_bytes(b'{"x": 1}')
    (folder / "special_tokens_map.json").write_text('{"eos_token": "a", "pad_token": "b"}')
    template = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    settings = {"eos_token": "c", "add_bos_token": False, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    text = open_checkpoint(folder).text
    assert text.tokenizer_json == b'{"x": 1}'
    assert text.tokenizer_config["eos_token"] == "c"
    assert text.tokenizer_config["pad_token"] == "b"
    assert (text.bos_id, text.eos_ids, text.add_bos, text.chat_template) == (1, (7, 9, 2), False, "D")
    (folder / "chat_template.jinja").write_text("J")
    assert open_checkpoint(folder).text.chat_template == "J"


@pytest.mark.parametrize(
    ("settings", "tokenizer"),
    [
        ({"eos_token": "</s>", "added_tokens_decoder": {"5": {"content": "</s>"}}}, {}),
        ({"eos_token": {"content": "</s>"}}, {"added_tokens": [{"id": 5, "content": "</s>"}]}),
        ({"eos_token": "</s>"}, {"model": {"vocab": {"a": 1, "</s>": 5}}}),
    ],
)
def test_an_end_that_only_the_tokenizer_names_is_found(settings: Any, tokenizer: Any, tmp_path: Path) -> None:
    folder = edit(copy("llama", tmp_path), eos_token_id=...)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert open_checkpoint(folder).text.eos_ids == (5,)


@pytest.mark.parametrize("settings", [{}, {"eos_token": None}, {"eos_token": "x"}, {"eos_token": 7}, {"eos_token": []}])
def test_a_model_without_an_end_has_none(settings: Any, tmp_path: Path) -> None:
    folder = edit(copy("llama", tmp_path), eos_token_id=...)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "tokenizer.json").write_text('{"model": {"vocab": ["x"]}, "added_tokens": {"x": 1}}')
    assert open_checkpoint(folder).text.eos_ids == ()


@pytest.mark.parametrize("eos", [96, -2, "2", 1.5, True, [2, 96], {"a": 1}])
def test_an_end_token_that_is_no_token_is_refused(eos: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json: eos_token_id is"):
        open_checkpoint(edit(copy("llama", tmp_path), eos_token_id=eos))


class Touch:
    """Unpickling this would leave a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt", "model.ckpt"])
def test_pickled_weights_are_refused_and_never_opened(name: str, tmp_path: Path) -> None:
    folder = copy("llama", tmp_path / "model")
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Touch(tmp_path / "touched")))
    for path in (folder, folder / name):
        with pytest.raises(ModelError, match="pickled") as refused:
            open_checkpoint(path)
        assert name in str(refused.value)
    assert not (tmp_path / "touched").exists()


def test_a_pickle_beside_safetensors_is_left_alone(tmp_path: Path) -> None:
    folder = copy("llama", tmp_path / "model")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Touch(tmp_path / "touched")))
    load_model(open_checkpoint(folder))
    assert not (tmp_path / "touched").exists()


def test_a_pickle_named_as_safetensors_or_gguf_is_refused(tmp_path: Path) -> None:
    folder = copy("llama", tmp_path / "model")
    for path in (folder / "model.safetensors", tmp_path / "x.gguf"):
        path.write_bytes(pickle.dumps(Touch(tmp_path / "touched")))
    for path in (folder, tmp_path / "x.gguf"):
        with pytest.raises(ModelError):
            open_checkpoint(path)
    assert not (tmp_path / "touched").exists()


def test_a_folder_with_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    gguf_of("llama").write(tmp_path / "x.gguf")
    assert open_checkpoint(tmp_path).path == tmp_path / "x.gguf"
    gguf_of("llama").write(tmp_path / "y.gguf")
    with pytest.raises(ModelError, match=r"2 \.gguf files; name one"):
        open_checkpoint(tmp_path)


def test_nothing_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="the weights are missing"):
        open_checkpoint(tmp_path)
    with pytest.raises(ModelError, match="no such file or folder"):
        open_checkpoint(tmp_path / "none")
    with pytest.raises(ModelError, match="name the folder that holds this file"):
        open_checkpoint(GOLDEN / "models" / "llama" / "model.safetensors")
    folder = copy("llama", tmp_path / "model")
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json: cannot be read"):
        open_checkpoint(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"config\.json: expected a JSON object"):
        open_checkpoint(folder)


def test_files_with_a_byte_order_mark_or_broken_json_are_refused(tmp_path: Path) -> None:
    folder = copy("llama", tmp_path)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: not valid JSON"):
        open_checkpoint(folder)
