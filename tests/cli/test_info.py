"""`tailrace info` of the real model."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

from tests.cli.conftest import Run
from tests.models import random_llama


def test_the_table_says_what_the_model_is(run: Run, smollm2: Path) -> None:
    shown = run("info", str(smollm2)).stdout
    for words in ("llama", "GGUF", "134.5 M", "30 of width 576", "9 heads on 3 KV heads of 64", "49,152", "tied",
                  "8,192 tokens", "92.1 MiB", "Q4_1: 63.3 MiB in 210", "22.5 KiB a token", "180.0 MiB"):  # fmt: skip
        assert words in shown


def test_json_is_for_programs(run: Run, smollm2: Path) -> None:
    info = json.loads(run("info", str(smollm2), "--json").stdout)
    assert info["parameters"] == info["active_parameters"] == 134_515_008
    assert info["weight_bytes"] == sum(kind["bytes"] for kind in info["formats"].values())
    assert info["kv_bytes_per_token"] == 2 * 30 * 3 * 64 * 2
    assert info["config"]["head_dim"] == 64


def test_kv_in_fewer_bits_is_counted_with_its_scales(run: Run, smollm2: Path) -> None:
    info = json.loads(run("info", str(smollm2), "--kv-dtype", "k8v4", "--json").stdout)
    assert (info["kv_dtype"], info["kv_bytes_per_token"]) == ("k8v4", 30 * 3 * 106)
    shown = run("info", str(smollm2), "--kv-dtype", "k8v4", "--kv-dtype-skip", "0").stdout
    assert "k8v4 but 0: 9.8 KiB a token" in shown
    ended = run("info", str(smollm2), "--kv-dtype", "k8v4", "--kv-dtype-skip", "30")
    assert ended.returncode == 1
    assert "0 .. 29" in ended.stderr


def test_kv_of_the_shape_of_qwen3_4b(run: Run, tmp_path: Path) -> None:
    """Its heads are of 128, not of 2560 / 32. The weights are a hole in a file."""
    folder = qwen3_4b(tmp_path / "qwen3-4b")
    info = json.loads(run("info", folder, "--kv-tokens", "8192", "--json").stdout)
    assert info["parameters"] == 4_022_468_096
    assert info["config"]["head_dim"] == 128
    assert info["kv_bytes_per_token"] == 2 * 36 * 8 * 128 * 2 == 147_456
    assert info["kv_bytes_per_context"] == 40_960 * 147_456
    assert info["kv_pool_bytes"] == 8192 * 147_456
    assert "144.0 KiB a token, 5.6 GiB a full context" in run("info", folder).stdout
    info = json.loads(run("info", folder, "--kv-dtype", "k8v4", "--kv-dtype-skip", "0,35", "--json").stdout)
    key, value = 128 + 2, 128 // 2 + 4 * (2 + 2)  # a scale; for each 32 a scale and a minimum
    assert info["kv_bytes_per_token"] == 34 * 8 * (key + value) + 2 * 8 * 512


def qwen3_4b(folder: Path) -> str:
    """A checkpoint with its configuration and its tensors' shapes."""
    hidden, inner, vocab, layers = 2560, 9728, 151_936, 36
    shapes = {"model.embed_tokens.weight": [vocab, hidden], "model.norm.weight": [hidden]}
    for layer in range(layers):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": [hidden], "post_attention_layernorm": [hidden], "self_attn.q_norm": [128],
                "self_attn.k_norm": [128], "self_attn.q_proj": [32 * 128, hidden],
                "self_attn.k_proj": [8 * 128, hidden], "self_attn.v_proj": [8 * 128, hidden],
                "self_attn.o_proj": [hidden, 32 * 128],
                "mlp.gate_proj": [inner, hidden], "mlp.up_proj": [inner, hidden], "mlp.down_proj": [hidden, inner],
            }.items()
        }  # fmt: skip
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    folder.mkdir()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
    config = {
        "model_type": "qwen3", "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": vocab, "rope_theta": 1e6,
        "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": True,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_a_file_that_is_no_model_is_refused_by_name(run: Run, tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"not a model at all")
    ended = run("info", str(tmp_path / "broken.gguf"))
    assert ended.returncode == 1
    assert "broken.gguf" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_quantize_shows_the_weights_as_serve_would_load_them(run: Run, tmp_path: Path) -> None:
    folder = str(random_llama.write(tmp_path / "m"))
    shown = run("info", folder, "--quantize", "int4").stdout
    for words in ("Q4_1:", "Q8_0:", "in 14", "in 2", "16 matrices quantised from"):
        assert words in shown
    stored, rounded = (json.loads(run("info", folder, "--json", *more).stdout) for more in ((), ("--quantize", "int8")))
    assert rounded["weight_bytes"] < 0.6 * stored["weight_bytes"] == 0.6 * rounded["stored_bytes"]


def test_a_model_with_nothing_to_quantise_is_shown_and_said_to_be_so(run: Run, smollm2: Path) -> None:
    ended = run("info", str(smollm2), "--quantize", "int4")
    assert ended.returncode == 0
    assert "92.1 MiB" in ended.stdout
    assert "--quantize int4 changes nothing" in ended.stderr


def test_the_pool_that_serve_would_make(run: Run, tmp_path: Path) -> None:
    folder = str(random_llama.write(tmp_path / "m"))
    info = json.loads(run("info", folder, "--json", "--kv-tokens", "4096").stdout)
    assert info["kv_pool_bytes"] == 4096 * info["kv_bytes_per_token"]
    assert info["groups"] == [{"window": None, "layers": 2}]
    assert "KV pool" in run("info", folder, "--kv-tokens", "4096").stdout
