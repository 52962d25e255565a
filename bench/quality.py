"""What rounding costs: perplexity and divergence of the cpu backend beside the reference in float32, on real text.

The text is the Python language reference that every interpreter carries (`pydoc_data.topics`). What `--quantize` costs
is measured on a bfloat16 copy of the model, made for the occasion where its own weights are quantised already.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np

from bench.batches import step
from tailrace.backends import Backend
from tailrace.backends.cpu import CpuBackend
from tailrace.backends.reference import ReferenceBackend, dequantize
from tailrace.models import Checkpoint, Model, ModelConfig, load_model, open_checkpoint
from tailrace.models.quantise import KINDS, quantise
from tailrace.models.rope import ROPE_FACTORS
from tailrace.text import load_text

CHUNK = 128


def log_probabilities(backend: Backend, ids: list[int]) -> np.ndarray:
    """Of every next token at every position but the last: float64 [len(ids) - 1, vocab]."""
    rows = []
    for at in range(0, len(ids), CHUNK):
        logits = backend.run(step([(ids[at : at + CHUNK], at)], all_rows=True)).logits
        assert logits is not None
        rows.append(logits.astype(np.float64))
    x = np.concatenate(rows)[:-1]
    x -= x.max(axis=1, keepdims=True)
    return np.asarray(x - np.log(np.exp(x).sum(axis=1, keepdims=True)))


def copy_as_bf16(checkpoint: Checkpoint, config: ModelConfig, folder: Path) -> Path:
    """The model as a safetensors folder in bfloat16, with its channels shuffled.

    A model whose weights lie on a 4-bit grid would be rounded to that same grid again, at next to no cost. So the
    channels of the residual stream, of each feed-forward layer and of each value head change places: the same
    function, but blocks of 32 that hold values of many former blocks."""
    if ROPE_FACTORS in checkpoint.tensors:
        raise SystemExit(f"{checkpoint.path}: a rope with factors of its own has no place in a configuration")
    order = _orders(config)
    header, begin, tensors = {}, 0, sorted(checkpoint.tensors.items())
    for name, weight in tensors:
        end = begin + 2 * int(np.prod(weight.shape))
        header[name] = {"dtype": "BF16", "shape": list(weight.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, weight in tensors:
            values = dequantize(weight)
            for axis, places in order(name, values.ndim):
                values = values.take(places, axis)
            bits = np.ascontiguousarray(values).view(np.uint32)
            nearest = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
            file.write(nearest.astype(np.uint16).tobytes())
    (folder / "config.json").write_text(json.dumps(checkpoint.config))
    return folder


def _orders(config: ModelConfig) -> Callable[[str, int], Iterator[tuple[int, np.ndarray]]]:
    """Gives, for a tensor's name and number of axes, the axes that are shuffled and their new orders."""
    rng = np.random.default_rng(0)
    stream = rng.permutation(config.hidden)
    inner = [rng.permutation(config.intermediate) for _ in range(config.layers)]
    heads = [[rng.permutation(config.head_dim) for _ in range(config.kv_heads)] for _ in range(config.layers)]
    group = config.heads // config.kv_heads

    def across(layer: int, repeat: int) -> np.ndarray:
        """Each value head's order, `repeat` times over."""
        orders = [order for order in heads[layer] for _ in range(repeat)]
        return np.concatenate([config.head_dim * index + order for index, order in enumerate(orders)])

    def order(name: str, axes: int) -> Iterator[tuple[int, np.ndarray]]:
        found = re.search(r"layers\.(\d+)\.", name)
        layer, part = int(found[1]) if found else 0, name.split(".")[-2]
        if part in ("norm", "input_layernorm", "post_attention_layernorm", "o_proj", "down_proj"):
            yield 0, stream
        elif part in ("gate_proj", "up_proj"):
            yield 0, inner[layer]
        elif part == "v_proj":
            yield 0, across(layer, 1)
        if axes == 2:
            yield 1, inner[layer] if part == "down_proj" else across(layer, group) if part == "o_proj" else stream

    return order


def candidates(model: Model, floats: Model, pages: int, tokens: int) -> Iterator[tuple[str, Backend]]:
    """Every way to compute, the truth first. `floats` is the model with matrices that can be quantised."""
    yield "reference, float32", ReferenceBackend(model, pages=pages)
    yield "reference, KV as bf16", ReferenceBackend(model, pages=pages, kv_dtype="bf16")
    on_cpu = {"cpu": model, "cpu, weights as bf16": floats} if floats is not model else {"cpu": model}
    on_cpu |= {f"cpu, --quantize {kind}": quantise(floats, kind, threads=2) for kind in KINDS}
    for name, made in on_cpu.items():
        yield name, CpuBackend(made, pages=pages, max_context=tokens + CHUNK, step_tokens=CHUNK, max_running=1)


def run(path: Path, tokens: int, passages: int) -> None:
    """Prints the table, over `passages` passages of `tokens` tokens each."""
    checkpoint = open_checkpoint(path)
    model = load_model(checkpoint, max_context=tokens + CHUNK)
    text = load_text(checkpoint.text, vocab=model.vocab)
    names = [name for name in sorted(topics) if len(topics[name]) > 6 * tokens][:passages]
    prompts = [text.encode(topics[name])[:tokens] for name in names]
    truths: list[np.ndarray] = []
    with tempfile.TemporaryDirectory() as folder:
        floats = model
        if quantise(model, "int8") is model:
            copied = open_checkpoint(copy_as_bf16(checkpoint, model.config, Path(folder)))
            floats = load_model(copied, max_context=tokens + CHUNK)
        count = sum(len(ids) - 1 for ids in prompts)
        print(f"{path.name}: {count} tokens of {len(names)} passages ({', '.join(names)})")
        print(f"\n{'':24}{'perplexity':>12}{'mean KL':>10}{'same first choice':>20}")
        for name, backend in candidates(model, floats, tokens // 16 + 16, tokens):
            losses, divergence, same = [], [], []
            for index, ids in enumerate(prompts):
                found = log_probabilities(backend, ids)
                if len(truths) == index:
                    truths.append(found)
                losses.extend(-found[np.arange(len(found)), ids[1:]])
                divergence.extend((np.exp(truths[index]) * (truths[index] - found)).sum(axis=1))
                same.extend(found.argmax(axis=1) == truths[index].argmax(axis=1))
            perplexity = np.exp(np.mean(losses))
            print(f"{name:24}{perplexity:12.3f}{np.mean(divergence):10.5f}{np.mean(same):20.1%}", flush=True)
