"""What rounding costs: perplexity and divergence of the cpu backend beside the reference in float32, on real text.

The text is the Python language reference that every interpreter carries (`pydoc_data.topics`).
"""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics

import numpy as np

from bench.batches import step
from tailrace.backends import Backend
from tailrace.backends.cpu import CpuBackend
from tailrace.backends.reference import ReferenceBackend
from tailrace.models import load_model, open_checkpoint
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


def run(path: Path, tokens: int, passages: int) -> None:
    """Prints the table, over `passages` passages of `tokens` tokens each."""
    checkpoint = open_checkpoint(path)
    model = load_model(checkpoint, max_context=tokens + CHUNK)
    text = load_text(checkpoint.text, vocab=model.vocab)
    names = [name for name in sorted(topics) if len(topics[name]) > 6 * tokens][:passages]
    pages = tokens // 16 + 16
    candidates: dict[str, Backend] = {
        "reference, float32": ReferenceBackend(model, pages=pages),
        "reference, KV as bf16": ReferenceBackend(model, pages=pages, kv_dtype="bf16"),
        "cpu": CpuBackend(model, pages=pages, max_context=tokens + CHUNK, step_tokens=CHUNK, max_running=1),
    }
    losses: dict[str, list[float]] = {name: [] for name in candidates}
    divergence: dict[str, list[float]] = {name: [] for name in candidates}
    same: dict[str, list[float]] = {name: [] for name in candidates}
    for topic in names:
        ids = text.encode(topics[topic])[:tokens]
        truth = None
        for name, backend in candidates.items():
            found = log_probabilities(backend, ids)
            truth = found if truth is None else truth
            losses[name].extend(-found[np.arange(len(found)), ids[1:]])
            divergence[name].extend((np.exp(truth) * (truth - found)).sum(axis=1))
            same[name].extend(found.argmax(axis=1) == truth.argmax(axis=1))
    print(f"{path.name}: {len(losses['cpu'])} tokens of {len(names)} passages ({', '.join(names)})\n")
    print(f"{'':24}{'perplexity':>12}{'mean KL':>10}{'same first choice':>20}")
    for name in candidates:
        perplexity = np.exp(np.mean(losses[name]))
        print(f"{name:24}{perplexity:12.3f}{np.mean(divergence[name]):10.5f}{np.mean(same[name]):20.1%}")
