"""Models of larger shapes through HTTP: GGUF files with the sizes of well-known models and random weights.

Speed depends on shapes and formats, not on what the weights say. So the files are made here, tensor by tensor, out of
random blocks whose scales keep activations finite, with the default model's tokenizer cut or filled up to the
vocabulary. They are laid out as llama-quantize leaves such models: matrices in the format of the name, the output head
(or the embedding, where it is the head too) in Q6_K, or Q8_0 where the rest is that. Files are kept in the cache beside
the models, and so are Tailrace's repacked weights of them: delete the folder that is printed to have the space back.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter

from bench import serve
from tailrace.models.files.gguf import read_gguf

VERSION = 1
"""Changes whenever the same shape may become another file."""

WORKLOADS = ("a", "b512")
FORMATS = {"q4_0": Kind.Q4_0, "q8_0": Kind.Q8_0}
SPREAD = 0.0115
"""Standard deviation of the weights, as in trained models of this width."""


@dataclass(frozen=True)
class Shape:
    """A decoder's sizes. `factor` > 1: Llama 3's smoothed rope scaling, from 8,192 tokens on."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    vocab: int
    theta: float
    context: int
    tied: bool
    factor: float = 1.0

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


SHAPES = {
    "llama-1b": Shape(16, 2048, 32, 8, 8192, 128_256, 500_000.0, 131_072, tied=True, factor=32.0),
    "mistral-7b": Shape(32, 4096, 32, 8, 14_336, 32_768, 1_000_000.0, 32_768, tied=False),
}
NAMES = [f"{shape}-{kind}" for shape in SHAPES for kind in FORMATS]


def tensors(shape: Shape, kind: Kind) -> Iterator[tuple[str, tuple[int, ...], Kind]]:
    """Name, shape (row-major) and format of every tensor, in the file's order."""
    head = kind if kind is Kind.Q8_0 else Kind.Q6_K
    yield "token_embd.weight", (shape.vocab, shape.hidden), head if shape.tied else kind
    yield "output_norm.weight", (shape.hidden,), Kind.F32
    if not shape.tied:
        yield "output.weight", (shape.vocab, shape.hidden), head
    if shape.factor != 1:
        yield "rope_freqs.weight", (shape.head_dim // 2,), Kind.F32
    kv = shape.kv_heads * shape.head_dim
    for layer in range(shape.layers):
        for name, rows, columns in (
            ("attn_q", shape.hidden, shape.hidden),
            ("attn_k", kv, shape.hidden),
            ("attn_v", kv, shape.hidden),
            ("attn_output", shape.hidden, shape.hidden),
            ("ffn_gate", shape.inner, shape.hidden),
            ("ffn_up", shape.inner, shape.hidden),
            ("ffn_down", shape.hidden, shape.inner),
        ):
            yield f"blk.{layer}.{name}.weight", (rows, columns), kind
        yield f"blk.{layer}.attn_norm.weight", (shape.hidden,), Kind.F32
        yield f"blk.{layer}.ffn_norm.weight", (shape.hidden,), Kind.F32


def stored(shape: tuple[int, ...], kind: Kind) -> tuple[int, ...]:
    """The shape in bytes of a tensor of this many values."""
    values, size = gguf.GGML_QUANT_SIZES[kind]
    return (*shape[:-1], shape[-1] // values * size)


def blocks(kind: Kind, count: int, rng: np.random.Generator) -> np.ndarray:
    """Random blocks of a format: uint8 [count, bytes of a block]. Quants are uniform, scales vary by half around what
    gives the wanted spread."""
    size = gguf.GGML_QUANT_SIZES[kind][1]
    made = np.frombuffer(rng.bytes(count * size), np.uint8).reshape(count, size).copy()
    vary = rng.uniform(0.5, 1.5, count)
    if kind is Kind.Q4_0:  # float16 scale, 16 bytes of quants -8 to 7
        made[:, :2] = _halves(SPREAD / 4.6 * vary)
    elif kind is Kind.Q8_0:  # float16 scale, quants -127 to 127
        quants = made[:, 2:].view(np.int8)
        np.maximum(quants, -127, out=quants)
        made[:, :2] = _halves(SPREAD / 73.6 * vary)
    elif kind is Kind.Q6_K:  # 192 bytes of quants -32 to 31, 16 scales of 8 bits, their float16 factor
        made[:, 192:208] = rng.integers(32, 96, (count, 16), np.uint8)
        made[:, 208:] = _halves(SPREAD / 18.5 / 64 * vary)
    else:
        raise ValueError(f"no random blocks of {kind.name}")
    return made


def _halves(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).view(np.uint8).reshape(-1, 2)


def rope_divisors(shape: Shape) -> np.ndarray:
    """What each frequency is divided by, as converters write it: 1 for short waves, the factor for long ones."""
    inverse = shape.theta ** -(np.arange(0, shape.head_dim, 2) / shape.head_dim)
    turns = 8192 * inverse / (2 * np.pi)  # over the original context
    blend = np.clip((turns - 1) / (4 - 1), 0, 1)
    return (1 / ((1 - blend) / shape.factor + blend)).astype(np.float32)


def tokenizer(source: Path, vocab: int) -> dict[str, Any]:
    """The `tokenizer.*` metadata of a GGUF file for exactly `vocab` ids: cut (with the merges that need what is gone),
    or filled up with tokens that no text gives."""
    found = {key: value for key, value in read_gguf(source).metadata.items() if key.startswith("tokenizer.")}
    tokens = found["tokenizer.ggml.tokens"][:vocab]
    kinds = found["tokenizer.ggml.token_type"][:vocab]
    there = set(tokens)
    merges = [merge for merge in found["tokenizer.ggml.merges"] if {*merge.split(" "), merge.replace(" ", "")} <= there]
    filler = [f"<filler-{index}>" for index in range(len(tokens), vocab)]
    return found | {
        "tokenizer.ggml.tokens": tokens + filler,
        "tokenizer.ggml.token_type": kinds + [int(gguf.TokenType.NORMAL)] * len(filler),
        "tokenizer.ggml.merges": merges,
    }


def write(path: Path, name: str, source: Path) -> None:
    """Makes the file of one of NAMES; `source` is a GGUF file with a tokenizer."""
    label, _, kind_name = name.rpartition("-")
    shape, kind = SHAPES[label], FORMATS[kind_name]
    writer = GGUFWriter(None, "llama")
    writer.add_name(f"{name}, random weights")
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(shape.theta)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_vocab_size(shape.vocab)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind_name.upper()}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for key, value in tokenizer(source, shape.vocab).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}
        add[type(value)](key, value)
    listed = list(tensors(shape, kind))
    for tensor, axes, stored_as in listed:
        floats = stored_as is Kind.F32
        wide = axes if floats else stored(axes, stored_as)
        item = np.dtype(np.float32 if floats else np.uint8)
        writer.add_tensor_info(tensor, wide, item, prod(wide) * item.itemsize, raw_dtype=stored_as)
    partial = path.with_suffix(".partial")
    writer.write_header_to_file(partial)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rng = np.random.default_rng(0)
    for tensor, axes, stored_as in listed:
        if tensor == "rope_freqs.weight":
            writer.write_tensor_data(rope_divisors(shape))
        elif stored_as is Kind.F32:
            writer.write_tensor_data(np.ones(axes, np.float32))
        else:
            count = prod(axes) // gguf.GGML_QUANT_SIZES[stored_as][0]
            writer.write_tensor_data(blocks(stored_as, count, rng).reshape(stored(axes, stored_as)))
    writer.close()
    partial.replace(path)


def size_of(name: str) -> int:
    """Bytes of the weights of one of NAMES."""
    label, _, kind = name.rpartition("-")
    listed = tensors(SHAPES[label], FORMATS[kind])
    return sum(prod(stored(axes, stored_as)) * (4 if stored_as is Kind.F32 else 1) for _, axes, stored_as in listed)


def path_of(name: str, folder: Path) -> Path:
    """Where the file of one of NAMES is kept."""
    return folder / f"{name}.v{VERSION}.gguf"


def file_of(name: str, folder: Path, source: Path) -> Path:
    """The file of one of NAMES, made where it is not there. SystemExit where the disk is too full."""
    path = path_of(name, folder)
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        needed = int(2.2 * size_of(name))  # the file, and Tailrace's repacked weights
        free = shutil.disk_usage(folder).free
        if free < needed:
            sys.exit(f"{folder}: {name} needs {needed / 1e9:.0f} GB, but {free / 1e9:.0f} GB are free")
        print(f"making {path} ({size_of(name) / 1e9:.1f} GB) ...", flush=True)
        write(path, name, source)
    return path


def run(names: list[str], against: str | None, workloads: list[str], repeats: int, source: Path) -> None:
    """Prints a table for each of `names`. `against` is another server's command line, with {port} and {model}."""
    root = Path(os.environ.get("TAILRACE_CACHE") or Path.home() / ".cache" / "tailrace")
    folder = root / "bench"
    for name in names:
        new = not path_of(name, folder).exists()
        path = shlex.quote(str(file_of(name, folder, source)))
        shape = SHAPES[name.rpartition("-")[0]]
        ours = f"{sys.executable} -m tailrace.cli serve {path} --port {{port}} --kv-tokens 16384 --max-context 4096"
        ours += f" --draft-tokens 0 --cache {shlex.quote(str(folder / 'prepared'))}"
        if new:  # the first start repacks the weights; it is the next that is measured
            serve.Server("ours", ours).stop()
        print(f"\n### {name}, {size_of(name) / 1e6:,.0f} MB of weights\n", flush=True)
        commands = [ours, *([against.replace("{model}", path)] if against else [])]
        serve.run(commands, workloads, repeats, below=min(48_000, shape.vocab))
    print(f"\nFiles are kept in {folder}")
