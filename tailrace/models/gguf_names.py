"""What a GGUF file says, as Hugging Face says it: configuration, tensor names, and the order of rows."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from tailrace.backends import Weight
from tailrace.models.fields import Fields
from tailrace.models.files.gguf import GgufFile
from tailrace.models.files.mapped import PermutedWeight
from tailrace.models.rope import ROPE_FACTORS
from tailrace.terms import ModelError

ARCHITECTURES = ("llama", "qwen2", "qwen3")

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.([a-z_]+)\.(weight|bias)")

_KEYS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "context_length": "max_position_embeddings",
    "rope.freq_base": "rope_theta",
}
"""Keys that mean what a Hugging Face field means."""

_UNDERSTOOD = {
    *_KEYS,
    *("vocab_size", "attention.value_length", "attention.sliding_window", "rope.dimension_count", "rope.scale_linear"),
    *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.finetuned"),
    *("rope.scaling.attn_factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
    *("rope.scaling.yarn_attn_factor", "rope.scaling.yarn_ext_factor", "attention.causal", "tensor_data_layout"),
    *("expert_count", "expert_used_count", "attention.layer_norm_epsilon", "use_parallel_residual"),
}
"""Every key that is read below; any other would change the numbers in a way that is not known here."""


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """The Hugging Face configuration that a GGUF file's metadata and tensors amount to. Raises ModelError for an
    architecture or a key that is not understood."""
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{file.path}: the architecture {architecture!r} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    _refuse_parts(file)
    prefix = f"{architecture}."
    keys = Fields(f"{file.path}: {architecture}", _own_keys(file, prefix))
    for key in keys.values:
        if key not in _UNDERSTOOD:
            raise keys.refuse(key, "is not understood, and might change the model's numbers")
    keys.absent(("expert_count", "expert_used_count", "use_parallel_residual"))
    keys.only("attention.causal", True)
    keys.only("tensor_data_layout", "Meta AI original pth")
    config = _sizes(keys)
    config |= {"model_type": architecture, "hidden_act": "silu", "vocab_size": _vocab(file, keys)}
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    config["mlp_bias"] = "blk.0.ffn_gate.bias" in file.tensors
    _check_heads(keys, config["head_dim"])
    if rope := _rope_scaling(keys):
        config["rope_scaling"] = rope
    if keys.values.get("attention.sliding_window"):
        if architecture != "llama":
            raise keys.refuse("attention.sliding_window", "is not supported for this architecture")
        config |= {"model_type": "mistral", "sliding_window": keys.count("attention.sliding_window")}
    return config


def _refuse_parts(file: GgufFile) -> None:
    """One file of several, an adapter, a projector: not a model by itself."""
    if file.metadata.get("split.count", 1) not in (0, 1):
        raise ModelError(
            f"{file.path}: this is one of {file.metadata['split.count']} parts; merge them first "
            "(llama-gguf-split --merge)"
        )
    kind = file.metadata.get("general.type", "model")
    if kind != "model":
        raise ModelError(f"{file.path}: general.type is {kind!r}; expected 'model'")


def _own_keys(file: GgufFile, prefix: str) -> dict[str, Any]:
    """The architecture's keys without its name. A list of one number a layer counts as that number when all agree."""
    own = {}
    for key, value in file.metadata.items():
        if key.startswith(prefix):
            if isinstance(value, list):
                if not value or any(item != value[0] for item in value):
                    raise ModelError(f"{file.path}: {key} differs from layer to layer, which is not supported")
                value = value[0]
            own[key.removeprefix(prefix)] = value
    return own


def _vocab(file: GgufFile, keys: Fields) -> int:
    """Rows of the embedding; what the metadata says of it must agree."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{file.path}: tensor token_embd.weight is missing or not a matrix")
    vocab = embedding.shape[0]
    if keys.has("vocab_size") and keys.count("vocab_size") != vocab:
        raise keys.refuse("vocab_size", f"is {keys.count('vocab_size')}, but token_embd.weight has {vocab} rows")
    return vocab


def _sizes(keys: Fields) -> dict[str, Any]:
    """The numbers that have a Hugging Face name, checked under the names that the file gives them."""
    config: dict[str, Any] = {}
    for key, name in _KEYS.items():
        if key in ("attention.layer_norm_rms_epsilon", "rope.freq_base"):
            config[name] = keys.number(key, 10000.0 if key == "rope.freq_base" else None)
        elif key == "attention.head_count_kv":
            config[name] = keys.count(key, config["num_attention_heads"])
        elif key == "attention.key_length":
            # A whole head must be left, or the model will say what is wrong with the two sizes.
            config[name] = keys.count(key, config["hidden_size"] // config["num_attention_heads"] or 1)
        else:
            config[name] = keys.count(key)
    return config


def _check_heads(keys: Fields, head_dim: int) -> None:
    """Keys, values and rope must all span a whole head."""
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.has(key) and keys.count(key) != head_dim:
            raise keys.refuse(key, f"is {keys.count(key)}, not the head's {head_dim}, which is not supported")


def _rope_scaling(keys: Fields) -> dict[str, Any] | None:
    kind = keys.text("rope.scaling.type", "linear" if keys.has("rope.scale_linear") else "none")
    for key in ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"):
        keys.only(key, 1.0)
    keys.only("rope.scaling.yarn_ext_factor", 1.0, -1.0)
    if kind == "none":
        return None
    factor = keys.number("rope.scaling.factor", keys.values.get("rope.scale_linear"))
    if kind == "linear":
        return None if factor == 1.0 else {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise keys.refuse("rope.scaling.type", f"is {kind!r}, which is not supported; supported are none, linear, yarn")
    scaling = {"rope_type": "yarn", "factor": factor}
    for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        if keys.has(f"rope.scaling.{key}"):
            scaling[name] = keys.number(f"rope.scaling.{key}")
    if keys.has("rope.scaling.original_context_length"):
        scaling["original_max_position_embeddings"] = keys.count("rope.scaling.original_context_length")
    return scaling


def gguf_tensors(file: GgufFile, config: dict[str, Any]) -> dict[str, Weight]:
    """The file's tensors by Hugging Face name, q and k rows of a llama in Hugging Face order (lazily). Raises
    ModelError for a name that is not known: what it stands for would be left out."""
    heads, kv_heads, head_dim = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    permuted = {}
    if file.metadata["general.architecture"] == "llama":
        permuted = {"attn_q": heads, "attn_k": kv_heads}
    tensors: dict[str, Weight] = {}
    for stored_name, stored in file.tensors.items():
        name, part = _huggingface_name(stored_name)
        if not name:
            raise ModelError(
                f"{file.path}: tensor {stored_name} is not one that {config['model_type']} models have in a GGUF file"
            )
        tensor = replace(stored, name=name)
        tensors[name] = tensor
        if part in permuted:
            if head_dim % 2 or tensor.shape[0] != permuted[part] * head_dim:
                raise ModelError(
                    f"{file.path}: tensor {stored_name} has the shape {list(tensor.shape)}, but {permuted[part]} heads "
                    f"of {head_dim} are declared"
                )
            tensors[name] = PermutedWeight(tensor, permuted[part])
    return tensors


def _huggingface_name(name: str) -> tuple[str, str]:
    """The Hugging Face name of a GGUF tensor ("" for an unknown one), and which part of a layer it is."""
    if name in _TOP or name == ROPE_FACTORS:
        return _TOP.get(name, name), ""
    match = _BLOCK.fullmatch(name)
    if match is None or match[2] not in _LAYER:
        return "", ""
    return f"model.layers.{match[1]}.{_LAYER[match[2]]}.{match[3]}", match[2]
