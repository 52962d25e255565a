"""Writes GGUF files byte by byte, right or wrong on purpose, and converts golden checkpoints into them."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tailrace.backends.reference import dequantize
from tailrace.models import Checkpoint

U32, I32, F32, BOOL, STRING, ARRAY, U64 = 4, 5, 6, 7, 8, 9, 10


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def typed(value: Any) -> bytes:
    """A metadata value with its type before it; bytes are taken as they are."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, bool):
        return struct.pack("<IB", BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", U32, value)
    if isinstance(value, float):
        return struct.pack("<If", F32, value)
    if isinstance(value, str):
        return struct.pack("<I", STRING) + text(value)
    kind = typed(value[0])[:4]
    return struct.pack("<I", ARRAY) + kind + struct.pack("<Q", len(value)) + b"".join(typed(item)[4:] for item in value)


@dataclass
class Tensor:
    """`shape` is row-major; `kind` is ggml's number; `offset` None lays it after the one before."""

    shape: tuple[int, ...]
    data: bytes
    kind: int = 0
    offset: int | None = None


@dataclass
class GgufBytes:
    """A GGUF file in the making. Everything can be replaced to make it wrong."""

    metadata: list[tuple[str | bytes, Any]] = field(default_factory=list)
    tensors: list[tuple[str | bytes, Tensor]] = field(default_factory=list)
    magic: bytes = b"GGUF"
    version: int = 3
    tensor_count: int | None = None
    key_count: int | None = None
    alignment: int = 32

    def build(self) -> bytes:
        head = self.magic + struct.pack("<I", self.version)
        head += struct.pack("<Q", len(self.tensors) if self.tensor_count is None else self.tensor_count)
        head += struct.pack("<Q", len(self.metadata) if self.key_count is None else self.key_count)
        for key, value in self.metadata:
            head += text(key) + typed(value)
        data = b""
        for name, tensor in self.tensors:
            offset = len(data) if tensor.offset is None else tensor.offset
            head += text(name) + struct.pack("<I", len(tensor.shape))
            head += struct.pack(f"<{len(tensor.shape)}Q", *reversed(tensor.shape))
            head += struct.pack("<IQ", tensor.kind, offset)
            data += tensor.data + b"\0" * (-len(tensor.data) % self.alignment)
        return head + b"\0" * (-len(head) % self.alignment) + data

    def write(self, path: Path) -> Path:
        path.write_bytes(self.build())
        return path


def interleave(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a q or k projection as converters to GGUF order them for llama."""
    rows = values.shape[0]
    split = values.reshape(heads, 2, rows // heads // 2, *values.shape[1:])
    return split.swapaxes(1, 2).reshape(values.shape)


PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
TOP |= {"lm_head.weight": "output.weight"}


def gguf_name(name: str) -> str:
    if name in TOP:
        return TOP[name]
    _, _, layer, rest = name.split(".", 3)
    part, suffix = rest.rsplit(".", 1)
    return f"blk.{layer}.{PARTS[part]}.{suffix}"


def convert(checkpoint: Checkpoint, metadata: Mapping[str, Any] | None = None) -> GgufBytes:
    """A safetensors checkpoint as the usual converter would write it, in F32. `metadata` adds or replaces keys."""
    config = checkpoint.config
    heads = config["num_attention_heads"]
    kv_heads = config["num_key_value_heads"]
    kind = {"mistral": "llama"}.get(config["model_type"], config["model_type"])
    vocab = config["vocab_size"]
    keys: dict[str, Any] = {
        "general.architecture": kind,
        f"{kind}.block_count": config["num_hidden_layers"],
        f"{kind}.context_length": config["max_position_embeddings"],
        f"{kind}.embedding_length": config["hidden_size"],
        f"{kind}.feed_forward_length": config["intermediate_size"],
        f"{kind}.attention.head_count": heads,
        f"{kind}.attention.head_count_kv": kv_heads,
        f"{kind}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{kind}.rope.freq_base": config["rope_parameters"]["rope_theta"],
        f"{kind}.vocab_size": vocab,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": [f"t{index}" for index in range(vocab)],
        "tokenizer.ggml.token_type": [1] * vocab,
        "tokenizer.ggml.merges": ["t 1"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    if config.get("head_dim"):
        for key in ("key_length", "value_length"):
            keys[f"{kind}.attention.{key}"] = config["head_dim"]
        keys[f"{kind}.rope.dimension_count"] = config["head_dim"]
    keys |= metadata or {}
    made = GgufBytes([(key, value) for key, value in keys.items() if value is not None])
    for name, weight in checkpoint.tensors.items():
        values = dequantize(weight)
        if kind == "llama" and ("q_proj" in name or "k_proj" in name):
            values = interleave(values, heads if "q_proj" in name else kv_heads)
        made.tensors.append((gguf_name(name), Tensor(values.shape, values.tobytes())))
    return made
