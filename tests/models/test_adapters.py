"""LoRA adapters are read as PEFT means them, or refused with what is wrong with them."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tailrace.models import Model, load_model, open_checkpoint
from tailrace.models.adapters import PROJECTIONS, read_adapter
from tailrace.terms import ModelError
from tests.models import random_llama, random_lora

Q = "model.layers.0.self_attn.q_proj"
Q_A, Q_B = (f"base_model.model.{Q}.lora_{half}.weight" for half in "AB")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(open_checkpoint(random_llama.write(tmp_path_factory.mktemp("models") / "llama")), max_context=64)


def test_every_projection_of_every_layer_is_read(model: Model, tmp_path: Path) -> None:
    found = read_adapter(random_lora.make(tmp_path, model, 1), model)
    tensors = random_lora.tensors(model, 1)
    assert len(found.adapter.parts) == 7 * random_llama.LAYERS
    assert found.rank == 8
    for name, part in found.adapter.parts.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        assert np.array_equal(part.a, tensors[f"{module}.lora_A.weight"])
        assert np.array_equal(part.b, tensors[f"{module}.lora_B.weight"])
        assert part.scale == 2.0


@pytest.mark.parametrize(
    ("changes", "q", "other"),
    [
        ({"lora_alpha": 4}, 0.5, 0.5),
        ({"lora_alpha": 0}, 0.0, 0.0),
        ({"lora_alpha": 6.0, "use_rslora": True}, 6 / 8**0.5, 6 / 8**0.5),
        ({"alpha_pattern": {"q_proj": 32}}, 4.0, 2.0),
        ({"alpha_pattern": {"layers.0.self_attn.q_proj": 32}}, 4.0, 2.0),
        ({"alpha_pattern": {f"^{Q}": 32}}, 4.0, 2.0),
        ({"alpha_pattern": {f"^{Q}".replace(".", r"\."): 32}}, 4.0, 2.0),
        ({"alpha_pattern": {"proj": 32}}, 2.0, 2.0),
        ({"alpha_pattern": {"up_proj": 1, "q_proj": 32}}, 4.0, 2.0),
    ],
    ids=str,
)
def test_the_scale_is_what_peft_makes_of_the_configuration(
    model: Model, tmp_path: Path, changes: dict[str, Any], q: float, other: float
) -> None:
    targets = ("q_proj", "k_proj")
    config = random_lora.config(targets=targets, **changes)
    parts = read_adapter(
        random_lora.write(tmp_path, random_lora.tensors(model, 1, targets=targets), config), model
    ).adapter.parts
    assert parts[f"{Q}.weight"].scale == pytest.approx(q)
    assert parts["model.layers.1.self_attn.k_proj.weight"].scale == pytest.approx(other)


def test_a_gguf_models_weights_go_by_the_same_names(smollm2: Path, tmp_path: Path) -> None:
    model = load_model(open_checkpoint(smollm2), max_context=64)
    found = read_adapter(random_lora.make(tmp_path, model, 1, rank=2), model).adapter.parts
    tensors = random_lora.tensors(model, 1, rank=2)
    assert len(found) == 7 * len(model.layers)
    for number in (0, 29):
        for name, block in PROJECTIONS.items():
            module = f"base_model.model.model.layers.{number}.{block}.{name}_proj"
            part = found[getattr(model.layers[number], name).name]
            assert np.array_equal(part.b, tensors[f"{module}.lora_B.weight"])


def test_modules_may_have_ranks_of_their_own(model: Model, tmp_path: Path) -> None:
    found = read_adapter(random_lora.make(tmp_path, model, 1, ranks={"q_proj": 3, "down_proj": 40}), model)
    assert found.rank == 40
    assert found.adapter.parts[f"{Q}.weight"].a.shape == (3, random_llama.HIDDEN)
    assert found.adapter.parts[f"{Q}.weight"].scale == pytest.approx(16 / 3)


def test_the_digest_is_that_of_both_files(model: Model, tmp_path: Path) -> None:
    one = read_adapter(random_lora.make(tmp_path / "one", model, 1), model).digest
    assert read_adapter(random_lora.make(tmp_path / "same", model, 1), model).digest == one
    assert read_adapter(random_lora.make(tmp_path / "other", model, 2), model).digest != one
    config = random_lora.config(lora_alpha=1)
    other = random_lora.write(tmp_path / "alpha", random_lora.tensors(model, 1), config)
    assert read_adapter(other, model).digest != one


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"peft_type": None}, "peft_type is missing"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"use_dora": True}, "use_dora is True, which is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is .'lm_head'., which is not supported"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices"),
        ({"lora_bias": True}, "lora_bias"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"target_parameters": ["x"]}, "target_parameters"),
        ({"a_field_of_2030": {"x": 1}}, "a_field_of_2030"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4'.*converted to plain LoRA"),
        ({"r": 0}, "r is 0; expected a whole number from 1 to 512"),
        ({"r": 513}, "r is 513"),
        ({"r": "8"}, "r is '8'"),
        ({"r": 4}, r"lora_A.weight has the shape \[8, 224\]; the model and adapter_config.json say \[4, 224\]"),
        ({"lora_alpha": None}, "lora_alpha is missing"),
        ({"lora_alpha": -1}, "lora_alpha is -1"),
        ({"lora_alpha": 1e400}, "lora_alpha is inf"),
        ({"use_rslora": "yes"}, "use_rslora is 'yes'"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern: q_proj is 0"),
        ({"rank_pattern": {"(a+)+$": 4}}, r"rank_pattern has the regular expression '\(a\+\)\+\$'"),
        ({"alpha_pattern": [1]}, "alpha_pattern is list; expected an object"),
    ],
    ids=str,
)
def test_a_configuration_that_is_not_supported_is_refused_by_name(
    model: Model, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    random_lora.write(tmp_path, random_lora.tensors(model, 1), random_lora.config(**changes))
    with pytest.raises(ModelError, match=message):
        read_adapter(tmp_path, model)


Tensors = dict[str, np.ndarray]


def changed(name: str, values: np.ndarray | None, *, to: str = "") -> Callable[[Tensors], Tensors]:
    """Puts other values in a tensor's place, under another name; None: takes it out."""

    def change(tensors: Tensors) -> Tensors:
        tensors = {key: value for key, value in tensors.items() if key != name}
        return tensors if values is None else {**tensors, to or name: values}

    return change


def filled(value: float) -> np.ndarray:
    values = np.zeros((8, random_llama.HIDDEN), np.float32)
    values[3, 5] = value
    return values


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed(Q_B, None), f"tensor {Q_B} is missing"),
        (changed(Q_A, None), f"tensor {Q_A} is missing"),
        (changed(Q_A, filled(np.nan)), f"tensor {Q_A} has values that are not finite"),
        (changed(Q_A, filled(np.inf)), f"tensor {Q_A} has values that are not finite"),
        (changed(Q_A, filled(0).T.copy()), rf"{Q_A} has the shape \[128, 8\]"),
        (changed(Q_A, np.zeros(8, np.float32)), rf"{Q_A} has the shape \[8\]"),
        (changed(Q_A, np.zeros((8, 128), np.int8)), "is stored as I8"),
        (changed(Q_A, filled(0), to="model.embed_tokens.lora_embedding_A"), "lora_embedding_A is not supported"),
        (changed(Q_A, filled(0), to="base_model.model.lm_head.lora_A.weight"), "is of lm_head, which is not supported"),
        (
            changed("none", filled(0), to="base_model.model.model.layers.7.mlp.up_proj.lora_A.weight"),
            "is of model.layers.7.mlp.up_proj, which is not supported",
        ),
        (
            changed(Q_A, filled(0), to=f"base_model.model.{Q}.lora_magnitude_vector"),
            "lora_magnitude_vector is not supported",
        ),
        (lambda _: {}, "there are no tensors"),
    ],
)
def test_tensors_that_are_not_supported_are_refused_by_name(
    model: Model, tmp_path: Path, change: Callable[[Tensors], Tensors], message: str
) -> None:
    random_lora.write(tmp_path, change(random_lora.tensors(model, 1)), random_lora.config())
    with pytest.raises(ModelError, match=message):
        read_adapter(tmp_path, model)


def test_files_that_are_missing_or_damaged_are_named(model: Model, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no such directory"):
        read_adapter(tmp_path / "none", model)
    folder = random_lora.make(tmp_path / "a", model, 1)
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-4])
    with pytest.raises(ModelError, match="cut short or damaged"):
        read_adapter(folder, model)
    weights.write_bytes(b"")
    with pytest.raises(ModelError, match="too short"):
        read_adapter(folder, model)
    weights.unlink()
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors: no such file"):
        read_adapter(folder, model)
    weights.write_bytes(whole)
    config.write_text(json.dumps(random_lora.config())[:-3])
    with pytest.raises(ModelError, match="not valid JSON"):
        read_adapter(folder, model)
    config.unlink()
    config.mkdir()
    with pytest.raises(ModelError, match="cannot be read"):
        read_adapter(folder, model)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_what_is_no_regular_file_is_refused_at_once(model: Model, tmp_path: Path, name: str) -> None:
    folder = random_lora.make(tmp_path / "a", model, 1)
    (folder / name).unlink()
    os.mkfifo(folder / name)  # opening it would wait for a writer that never comes
    with pytest.raises(ModelError, match=rf"{name}: not a regular file"):
        read_adapter(folder, model)
    (folder / name).unlink()
    (folder / name).symlink_to("/dev/zero")
    with pytest.raises(ModelError, match=rf"{name}: not a regular file"):
        read_adapter(folder, model)


def test_nothing_is_ever_unpickled(model: Model, tmp_path: Path) -> None:
    touched = tmp_path / "touched"

    class Touch:
        def __reduce__(self) -> tuple[object, tuple[Path]]:
            return Path.touch, (touched,)

    folder = random_lora.make(tmp_path / "a", model, 1)
    weights = folder / "adapter_model.safetensors"
    for name in ("adapter_model.safetensors", "adapter_model.bin"):
        weights.unlink(missing_ok=True)
        (folder / name).write_bytes(pickle.dumps(Touch()))
        with pytest.raises(ModelError, match=r"adapter_model\.safetensors"):
            read_adapter(folder, model)
    assert not touched.exists()
    pickle.loads((folder / "adapter_model.bin").read_bytes())
    assert touched.exists()
