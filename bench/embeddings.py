"""Embeddings without a server: texts a second, alone or in turns with sentence-transformers on the same token ids.

Both sides get ids, so what is compared is the model's work, not the tokenizer's. They take turns (A B A B), and the
median of the ratios of neighbours is what counts on a machine that does other things meanwhile.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np

from tailrace.backends.cpu.encoder import CpuEncoder
from tailrace.backends.cpu.threads import usable_cores
from tailrace.backends.encoding import TextBatch
from tailrace.models import catalogue
from tailrace.models.checkpoint import open_checkpoint
from tailrace.models.load import load_encoder

SHAPES = ((32, 128), (32, 16), (1, 128), (1, 16))
"""Texts at once, and tokens of each."""
CHILD = Path(__file__).parent / "peers" / "sentence_transformers_child.py"


def batch(texts: int, tokens: int) -> TextBatch:
    """Random words between the tokens that begin and end a text."""
    rng = np.random.default_rng(texts * 1000 + tokens)
    ids = rng.integers(1000, 29000, (texts, tokens), dtype=np.int32)
    ids[:, 0], ids[:, -1] = 101, 102
    flat = ids.reshape(-1)
    return TextBatch(flat, np.zeros_like(flat), np.arange(0, len(flat) + 1, tokens, dtype=np.int32))


class Peer:
    """sentence-transformers in a child process."""

    def __init__(self, python: str, folder: Path, threads: int, ids: list[list[int]]) -> None:
        self._child = subprocess.Popen(
            [python, str(CHILD), str(folder), str(threads)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self.embeddings = np.array(self._ask(json.dumps(ids)))

    def _ask(self, line: str) -> Any:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(line + "\n")
        self._child.stdin.flush()
        return json.loads(self._child.stdout.readline())

    def turn(self) -> tuple[float, float]:
        """Seconds of wall and processor time of one batch."""
        wall, cpu = self._ask("")
        return float(wall), float(cpu)

    def close(self) -> None:
        """Ends the child."""
        self._child.communicate()


def run(model: str, python: str | None, repeats: int, threads: int | None) -> None:
    """Prints a row for each shape. `python`: an interpreter that has sentence-transformers; None compares nothing."""
    folder = catalogue.pull(model)
    count = threads or usable_cores()
    encoder = CpuEncoder(load_encoder(open_checkpoint(folder)), threads=count)
    print(f"{count} threads, {encoder.kernels} kernels; medians of {repeats} turns\n")
    print("| texts x tokens | ms | texts/s | beside sentence-transformers | the same, processor time | least cosine |")
    print("|---|---|---|---|---|---|")
    for texts, tokens in SHAPES:
        made = batch(texts, tokens)
        ours = encoder.encode(made)
        peer = Peer(python, folder, count, made.tokens.reshape(texts, tokens).tolist()) if python else None
        turns, walls, cpus = [], [], []
        for _ in range(repeats):
            before = peer.turn() if peer else (0.0, 0.0)
            wall, cpu = time.perf_counter(), time.process_time()
            encoder.encode(made)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            turns.append(wall)
            walls.append(before[0] / wall)
            cpus.append(before[1] / cpu)
        beside = "- | - | -"
        if peer is not None:
            beside = f"{statistics.median(walls):.2f} x | {statistics.median(cpus):.2f} x | "
            beside += f"{(ours * peer.embeddings).sum(1).min():.6f}"
            peer.close()
        took = statistics.median(turns)
        print(f"| {texts} x {tokens} | {1000 * took:.1f} | {texts / took:.0f} | {beside} |", flush=True)
