"""KV in fewer bits: what `tailrace eval kv` says, of the types that docs/kv.md lists."""

from __future__ import annotations

from pathlib import Path

from tailrace.backends.kvdtype import parse
from tailrace.cli.evaluate import show
from tailrace.improve.compare import PREFILL
from tailrace.improve.kv import Setting, evaluate
from tailrace.improve.text import passages
from tailrace.models import load_model, open_checkpoint
from tailrace.models.entry import prepared_dir
from tailrace.text import load_text

KINDS = ("fp16", "int8", "k8v4", "int4")


def run(model: Path, tokens: int, count: int, pairs: int, threads: int | None, kernels: str | None) -> None:
    """Prints the tables, over `count` passages of `tokens` tokens each, and `pairs` timed steps of each kind."""
    setting = Setting(pairs=pairs, threads=threads, kernels=kernels, cache_dir=prepared_dir(model))
    checkpoint = open_checkpoint(model)
    made = load_model(checkpoint, max_context=max(tokens, setting.context + PREFILL))
    texts = passages(load_text(checkpoint.text, vocab=made.vocab), None, tokens=tokens, count=count)
    show(evaluate(made, [parse(name) for name in KINDS], texts, setting, print), texts, setting)
