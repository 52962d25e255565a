"""Makes the golden data beside this file, with Hugging Face transformers as the oracle. Needs torch and transformers:

    python tests/golden/make.py models            # small random checkpoints and their logits
    python tests/golden/make.py text FOLDER       # SmolLM2's greedy continuations, from a float32 copy of its GGUF

Everything is float32 on the CPU. The tests need neither torch nor transformers.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.mistral import MistralConfig, MistralForCausalLM
from transformers.models.qwen2 import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen3 import Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).parent
VOCAB = 96
LONG = (0, 1000, 8000, 20000)
"""Positions whose logits are kept of a long prompt."""

MODELS = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}

TINY = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NARROW = {**TINY, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}

THETA = {"rope_type": "default", "rope_theta": 10000.0}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any], torch.dtype]] = {
    "llama": ("llama", {**TINY, "rope_parameters": THETA}, torch.bfloat16),
    "llama-biased": (
        "llama",
        {**TINY, "head_dim": 24, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        torch.float32,
    ),
    "mistral-window": ("mistral", {**TINY, "sliding_window": 16}, torch.float16),
    "mistral-full": ("mistral", {**TINY, "sliding_window": None, "head_dim": 16}, torch.bfloat16),
    "qwen2": ("qwen2", {**TINY, "rope_parameters": {**THETA, "rope_theta": 1000000.0}}, torch.bfloat16),
    "qwen2-window": (
        "qwen2",
        {**TINY, "num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
        | {"tie_word_embeddings": True},
        torch.bfloat16,
    ),
    "qwen3": ("qwen3", {**TINY, "head_dim": 16, "tie_word_embeddings": True}, torch.bfloat16),
    "qwen3-biased-window": (
        "qwen3",
        {**TINY, "head_dim": 12, "attention_bias": True, "use_sliding_window": True, "sliding_window": 10}
        | {"layer_types": ["sliding_attention", "full_attention"]},
        torch.float32,
    ),
}
"""Name to model_type, configuration, and the type that its weights are stored in."""

ROPES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "default": ("llama", {"rope_theta": 10000.0}, {}),
    "default-qwen2": ("qwen2", {"rope_theta": 1000000.0}, {}),
    "default-qwen3": ("qwen3", {"rope_theta": 1000000.0}, {"head_dim": 16}),
    "window": ("mistral", {"rope_theta": 10000.0}, {"sliding_window": 4096}),
    "linear": ("llama", {"rope_type": "linear", "factor": 8.0}, {}),
    "llama3": (
        "llama",
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 500000.0}
        | {"original_max_position_embeddings": 2048},
        {"max_position_embeddings": 32768},
    ),
    "yarn": ("qwen2", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}, {}),
    "yarn-mscale": (
        "llama",
        {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0}
        | {"mscale_all_dim": 0.7, "beta_fast": 24.0, "beta_slow": 2.0},
        {},
    ),
    "yarn-declared": (
        "qwen3",
        {"rope_type": "yarn", "factor": 16.0, "attention_factor": 1.13, "truncate": False}
        | {"original_max_position_embeddings": 2048},
        {"head_dim": 16},
    ),
}
"""Name to model_type, rope, and the rest of the configuration. Logits at LONG of one long prompt."""

DYNAMIC = (64, 1001, 8001, 20001)
"""Prompt lengths of the dynamic rope, whose base transformers takes from the length: logits of the last position."""

TABLES: dict[str, dict[str, Any]] = {
    "llama-2": {"head_dim": 128, "rope": {"rope_theta": 10000.0}},
    "llama-3.1": {
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rope": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
        | {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    },
    "llama-3.2": {
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rope": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0}
        | {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    },
    "vicuna-16k": {"head_dim": 128, "max_position_embeddings": 4096, "rope": {"rope_type": "linear", "factor": 4.0}},
    "qwen2.5-yarn": {
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "rope": {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0}
        | {"original_max_position_embeddings": 32768},
    },
    "yarn-64k": {
        "head_dim": 128,
        "max_position_embeddings": 65536,
        "rope": {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096},
    },
}
"""Ropes of published models: frequencies and scale alone."""

PROMPTS = [
    "The capital of France is",
    "Once upon a time there was a small robot who",
    "def fibonacci(n):\n",
    "Water boils at",
    "1, 2, 3, 4, 5, 6,",
    "The three primary colours are",
]
CHATS = [
    "What is the capital of France?",
    "Give me three tips for staying healthy.",
    "Write a haiku about rivers.",
    "Explain what a prime number is in one sentence.",
    "Translate 'good morning' into Spanish.",
    "What is 12 times 7?",
]
TEXT_TOKENS = 40


def main(arguments: list[str]) -> None:
    torch.set_grad_enabled(False)
    if arguments[:1] == ["models"]:
        make_models()
    elif arguments[:1] == ["text"] and len(arguments) == 2:
        make_text(Path(arguments[1]))
    else:
        sys.exit(__doc__)


def make_models() -> None:
    prompt = np.random.default_rng(7).integers(3, VOCAB, max(DYNAMIC), dtype=np.uint8)
    np.save(HERE / "prompt.npy", prompt)
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    folder = HERE / "models"
    shutil.rmtree(folder, ignore_errors=True)
    logits: dict[str, np.ndarray] = {}
    for name, (kind, config, dtype) in ARCHITECTURES.items():
        model = make_checkpoint(folder / name, kind, config, dtype)
        logits[name] = model(ids[:, :80]).logits[0].numpy()
    for name, (kind, rope, rest) in ROPES.items():
        config = {**NARROW, **rest, "rope_parameters": {**THETA, **rope}}
        model = make_checkpoint(folder / f"rope-{name}", kind, config, torch.bfloat16)
        kept = model(ids[:, : max(LONG) + 1], logits_to_keep=torch.tensor(LONG)).logits[0]
        logits[f"rope-{name}"] = kept.numpy()
        print(name, flush=True)
    dynamic = {**NARROW, "rope_parameters": {**THETA, "rope_type": "dynamic", "factor": 4.0}}
    for length in DYNAMIC:  # a fresh model each time: transformers remembers the longest prompt that it has seen
        model = make_checkpoint(folder / "rope-dynamic", "llama", dynamic, torch.bfloat16)
        logits[f"rope-dynamic-{length}"] = model(ids[:, :length], logits_to_keep=1).logits[0].numpy()
    np.savez_compressed(HERE / "logits.npz", **logits)
    np.savez_compressed(HERE / "ropes.npz", **make_tables())
    (HERE / "ropes.json").write_text(json.dumps(TABLES, indent=1) + "\n")


def make_checkpoint(folder: Path, kind: str, config: dict[str, Any], dtype: torch.dtype) -> torch.nn.Module:
    """Random weights, rounded to the stored type, saved as transformers names them; the model in float32."""
    config_class, model_class = MODELS[kind]
    model = model_class(config_class(**config)).eval()
    generator = torch.Generator().manual_seed(sum(map(ord, folder.name)))
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        if name.endswith("norm.weight"):
            values = 1 + 0.2 * values
        elif name.endswith("bias"):
            values = 0.3 * values
        elif "embed_tokens" not in name:
            # Sharp attention, so that a wrong position or window shows in the logits.
            gain = 2.0 if "q_proj" in name or "k_proj" in name else 1.0
            values = values * gain / parameter.shape[1] ** 0.5
        parameter.copy_(values.to(dtype).float())
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: parameter.to(dtype).contiguous() for name, parameter in model.named_parameters()}
    save_file(tensors, folder / "model.safetensors")
    described = model.config.to_dict() | {"architectures": [model_class.__name__]}
    described.pop("transformers_version")
    (folder / "config.json").write_text(json.dumps(described, indent=1, sort_keys=True) + "\n")
    return model


def make_tables() -> dict[str, np.ndarray]:
    tables = {}
    for name, table in TABLES.items():
        head_dim = table["head_dim"]
        config = LlamaConfig(
            hidden_size=2 * head_dim,
            num_attention_heads=2,
            max_position_embeddings=table.get("max_position_embeddings", 4096),
            rope_parameters={**THETA, **table["rope"]},
        )
        rope = LlamaRotaryEmbedding(config)
        tables[f"{name}.inv_freq"] = rope.inv_freq.numpy()
        tables[f"{name}.scale"] = np.float64(rope.attention_scaling)
    return tables


def make_text(folder: Path) -> None:
    """Greedy continuations, with the smallest gap between the best two logits, which says how safe equality is."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    cases = []
    for prompt, chat in [(prompt, False) for prompt in PROMPTS] + [(prompt, True) for prompt in CHATS]:
        if chat:
            messages = [{"role": "user", "content": prompt}]
            rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
            ids = list(rendered["input_ids"])
        else:
            ids = tokenizer(prompt)["input_ids"]
        output = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            max_new_tokens=TEXT_TOKENS,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        new = output.sequences[0, len(ids) :].tolist()
        gaps = [float(best[0] - best[1]) for best in (step[0].topk(2).values for step in output.logits)]
        text = tokenizer.decode(new, skip_special_tokens=True)
        cases.append({"prompt": prompt, "chat": chat, "prompt_ids": ids, "ids": new, "text": text, "gap": min(gaps)})
        print(min(gaps), repr(text[:70]), flush=True)
    (HERE / "smollm2-135m.json").write_text(json.dumps(cases, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
