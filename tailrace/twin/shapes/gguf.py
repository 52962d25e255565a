"""Shapes of GGUF files: their metadata as a configuration, their tensors as a scheme. The two must agree to the last
value."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from tailrace.backends import BLOCK
from tailrace.models.files.gguf import GgufHeader, parse_header
from tailrace.models.files.mapped import map_file
from tailrace.terms import ModelError
from tailrace.twin.shapes.model import ModelShape, shape_of
from tailrace.twin.shapes.precision import BF16, Format, Scheme
from tailrace.twin.shapes.stored import Fetch, Stored
from tailrace.twin.shapes.tensors import Tensor

Header = GgufHeader

FIRST = 1 << 20
MOST = 128 << 20
"""Bytes of a file that are read first, and at most. Vocabularies take some ten of them."""

BLOCKS: dict[str, tuple[int, int]] = {str(kind): block for kind, block in BLOCK.items()} | {
    "Q8_1": (32, 36), "Q8_K": (256, 292), "IQ2_XXS": (256, 66), "IQ2_XS": (256, 74), "IQ3_XXS": (256, 98),
    "IQ1_S": (256, 50), "IQ4_NL": (32, 18), "IQ3_S": (256, 110), "IQ2_S": (256, 82), "IQ4_XS": (256, 136), "I8": (1, 1),
    "I16": (1, 2), "I32": (1, 4), "I64": (1, 8), "F64": (1, 8), "IQ1_M": (256, 56), "TQ1_0": (256, 54),
    "TQ2_0": (256, 66), "MXFP4": (32, 17), "NVFP4": (64, 36), "Q1_0": (128, 18),
}  # fmt: skip
"""Values and bytes of a block of each type, those that our engine cannot compute with too."""

COMMON = {
    "block_count": "num_hidden_layers", "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim", "context_length": "max_position_embeddings", "vocab_size": "vocab_size",
}  # fmt: skip
"""Keys of every architecture, and the fields that they are."""

EXPERTS = {
    "expert_count": "num_experts", "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}  # fmt: skip

LATENT = {
    "leading_dense_block_count": "first_k_dense_replace", "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank", "expert_count": "n_routed_experts",
    "expert_shared_count": "n_shared_experts", "rope.dimension_count": "qk_rope_head_dim",
}  # fmt: skip


@dataclass(frozen=True)
class Dialect:
    """An architecture of GGUF: the `model_type` that it is, further keys, and fields that it always has."""

    model_type: str
    keys: dict[str, str]
    fields: dict[str, Any]
    slides: bool = False


DIALECTS: dict[str, Dialect] = {
    "llama": Dialect("llama", {}, {}),
    "qwen2": Dialect("qwen2", {}, {}),
    "qwen3": Dialect("qwen3", {}, {}),
    "qwen3moe": Dialect("qwen3_moe", EXPERTS, {"decoder_sparse_step": 1}),
    "gemma2": Dialect("gemma2", {}, {}, slides=True),
    "gemma3": Dialect("gemma3_text", {}, {}, slides=True),
    "gpt-oss": Dialect("gpt_oss", {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}, {},
                       slides=True),
    "deepseek2": Dialect("deepseek_v3", {**EXPERTS, **LATENT}, {}),
}  # fmt: skip

_HARMLESS = (
    "rope.", "attention.layer_norm", "attention.scale", "attention.causal", "use_parallel_residual", "logit_scale",
    "expert_weights", "expert_gating_func", "expert_group", "attn_logit_softcapping", "final_logit_softcapping",
    "tensor_data_layout", "attention.value_length", "attention.key_length", "attention.sliding_window", "expert_shared",
)  # fmt: skip
"""Keys that change no size, or that are read below."""

_NAMES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_a": "self_attn.q_a_proj", "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.kv_b_proj", "attn_v_b": "self_attn.kv_b_proj",
    "attn_sinks": "self_attn.sinks",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj", "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj", "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}  # fmt: skip
_TOP = {"token_embd": "embed_tokens", "output": "lm_head", "output_norm": "norm"}
_BLOCK = re.compile(r"blk\.(\d+)\.([a-z_0-9]+?)\.(weight|bias)")
_BESIDE = re.compile(r"rope_freqs\.weight|blk\.\d+\.(exp_probs_b\.bias|ffn_gate_inp_b\.bias|rope_.*)")
"""Tensors that hold no parameters."""


@dataclass(frozen=True)
class GgufScheme(Scheme):
    """What each tensor is stored in, as the header says."""

    stored: dict[tuple[int | None, str], Format] | None = None

    def of(self, layer: int | None, tensor: Tensor) -> Format:
        return (self.stored or {}).get((layer, tensor.name), FLOAT if tensor.columns == 1 else self.own)


FLOAT = Format("F32", 32)


def local(path: Path) -> Header:
    """The header of a file on this machine."""
    return parse_header(path, map_file(path))


def remote(fetch: Fetch, name: str, where: str) -> Header:
    """The header of a file that is read piece by piece, each as long as all before it. Raises ModelError where there
    is no such file, where the header is wrong, and where it is longer than any real one."""
    data = fetch(name, FIRST, 0)
    if data is None:
        raise ModelError(f"{where}: there is no {name}")
    while True:
        try:
            return parse_header(Path(f"{where}/{name}"), data)
        except ModelError:
            more = fetch(name, len(data), len(data)) if len(data) < MOST else b""
            if not more:
                raise
            data += more


def described(file: Header) -> tuple[ModelShape, Scheme, Stored]:
    """A file's shape, the scheme of its tensors, and what its header says. Raises ModelError for an architecture or key
    that is not understood, and where metadata and tensors do not mean the same model."""
    shape = shape_of(_config(file), file.path.stem)
    stored: dict[tuple[int | None, str], Format] = {}
    by_type: dict[str, int] = {}
    values = 0
    for name, (kind, dims) in file.tensors.items():
        form = _format(kind)
        by_type[kind] = by_type.get(kind, 0) + _bytes(file, name, kind, dims)
        if not _BESIDE.fullmatch(name):
            values += prod(dims)
        match = _BLOCK.fullmatch(name)
        if match and match[2] in _NAMES:
            suffix = ".bias" if match[3] == "bias" else ""
            stored |= {(int(match[1]), own + suffix): form for own in _NAMES[match[2]].split()}
        elif (top := _TOP.get(name.removesuffix(".weight"))) is not None:
            stored[None, top] = form
    counted = shape.text_parameters
    if values != counted:
        raise ModelError(
            f"{file.path}: its tensors hold {values:,} parameters, but its metadata describe {counted:,}; what it is "
            "cannot be told from its header"
        )
    for layer, tensor in shape.located:
        if tensor.columns > 1 and (layer, tensor.name) not in stored:
            where = "" if layer is None else f" of layer {layer}"
            raise ModelError(
                f"{file.path}: no tensor in it is known to be {tensor.name}{where}; give config.json instead"
            )
    scheme = GgufScheme(
        f"GGUF ({', '.join(sorted(by_type, key=lambda kind: -by_type[kind])[:3])})", BF16, stored=stored
    )
    return shape, scheme, Stored(sum(by_type.values()), values, by_type, 1, True)


def _config(file: Header) -> dict[str, Any]:
    """The metadata as fields of a configuration."""
    architecture = file.metadata.get("general.architecture")
    dialect = DIALECTS.get(str(architecture))
    if dialect is None:
        raise ModelError(
            f"{file.path}: the architecture {str(architecture)[:40]!r} is not known of GGUF files; known are "
            f"{', '.join(DIALECTS)}. Give the model's config.json instead"
        )
    if file.metadata.get("split.count", 1) not in (0, 1):
        raise ModelError(f"{file.path}: this is one of {file.metadata['split.count']} parts; give config.json instead")
    own = {key.removeprefix(f"{architecture}."): value for key, value in file.metadata.items()
           if key.startswith(f"{architecture}.")}  # fmt: skip
    return _fields(file, dialect, own)


def _fields(file: Header, dialect: Dialect, own: dict[str, Any]) -> dict[str, Any]:
    keys = COMMON | dialect.keys
    mixtral = dialect.model_type == "llama" and own.get("expert_count")
    if mixtral:
        keys |= {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
    unknown = [key for key, value in own.items()
               if key not in keys and not key.startswith(_HARMLESS) and value not in (0, None)]  # fmt: skip
    if unknown:
        raise ModelError(f"{file.path}: {', '.join(unknown)[:200]} are not understood, and might change sizes")
    config = {
        field: own[key] for key, field in keys.items() if own.get(key) is not None and (own[key] or key in LATENT)
    }
    config |= dialect.fields | {"model_type": "mixtral" if mixtral else dialect.model_type, "dtype": "bfloat16"}
    if not mixtral:
        config = {
            field: value for field, value in config.items() if field not in ("num_local_experts",) or dialect.keys
        }
    config["vocab_size"] = file.tensors["token_embd.weight"][1][0] if "token_embd.weight" in file.tensors else 0
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    if "blk.0.attn_q.bias" in file.tensors and dialect.model_type in ("llama", "qwen3"):
        config["attention_bias"] = True
    if dialect.slides and own.get("attention.sliding_window"):
        config["sliding_window"] = own["attention.sliding_window"]
    if dialect.model_type == "deepseek_v3":
        _latent(config, own)
    return config


def _latent(config: dict[str, Any], own: dict[str, Any]) -> None:
    """The sizes of heads, which these files have with the rope's part in them."""
    rope = config.get("qk_rope_head_dim", 0)
    config["qk_nope_head_dim"] = own.get("attention.key_length_mla", own.get("attention.key_length", 0)) - rope
    config["v_head_dim"] = own.get("attention.value_length_mla", own.get("attention.value_length"))
    config.pop("head_dim", None)
    config.pop("num_experts", None)


def _format(kind: str) -> Format:
    values, size = BLOCKS.get(kind, (1, 0))
    if not size:
        raise ModelError(f"the type {kind} of GGUF has no size that is known")
    return Format(kind, 8 * size) if values == 1 else Format(kind, 0, group=values, group_bits=8 * size)


def _bytes(file: Header, name: str, kind: str, dims: tuple[int, ...]) -> int:
    values, size = BLOCKS.get(kind, (1, 0))
    if not size or dims[-1] % values:
        raise ModelError(f"{file.path}: tensor {name} of {list(dims)} cannot be stored as {kind}")
    return prod(dims) // values * size
