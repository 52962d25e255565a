"""A small llama checkpoint with random weights in bfloat16, as a folder that can be served."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

VOCAB, HIDDEN, INNER, LAYERS, HEADS, KV_HEADS = 200, 128, 224, 2, 4, 2
HEAD_DIM = HIDDEN // HEADS


def shapes(*, tied: bool) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model."""
    layer = {
        "input_layernorm": (HIDDEN,),
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "post_attention_layernorm": (HIDDEN,),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    made: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    if not tied:
        made["lm_head.weight"] = (VOCAB, HIDDEN)
    for index in range(LAYERS):
        made |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    return made


def write(folder: Path, *, tied: bool = False, spoil: dict[str, float] | None = None) -> Path:
    """Makes the folder. `spoil` sets the first value of a tensor."""
    folder.mkdir()
    rng = np.random.default_rng(5)
    header: dict[str, Any] = {}
    data = b""
    for name, shape in shapes(tied=tied).items():
        values = rng.standard_normal(shape, dtype=np.float32) * np.float32(shape[-1] ** -0.5)
        if len(shape) == 1:
            values = 1 + values
        if spoil and name in spoil:
            values.flat[0] = spoil[name]
        raw = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16).tobytes()
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    config = {
        "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "vocab_size": VOCAB, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512, "hidden_act": "silu", "tie_word_embeddings": tied, "eos_token_id": 0,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer()))
    return folder


def _tokenizer() -> dict[str, Any]:
    pieces = ["<unk>", "\u2581", *(chr(ord("a") + index) for index in range(26))]
    decoders = [{"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}, {"type": "Fuse"}]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": {"type": "Prepend", "prepend": "\u2581"},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [], "unk_token": "<unk>", "fuse_unk": True},
    }
