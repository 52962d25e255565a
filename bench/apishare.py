"""What a server's API process costs beside its engine: processor seconds of each over workload c 32, as text.

HTTP, tokenizing, detokenizing, streaming, metrics and the log line of each request are the API process's; scheduling
and computing are the engine's. The client is a process of its own and not counted. Seconds of the processor depend
little on what else the machine does.
"""

from __future__ import annotations

import os
import random
import statistics
from pathlib import Path

from bench.serve import Server, together
from bench.soak import WORDS, children

STREAMS = 32
TOKENS = 128
"""Of each prompt, nearly, and of each answer."""


def spent(pid: int) -> float:
    """Seconds of the processor that a process has used, all its threads together."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run(command: str, repeats: int) -> None:
    """Prints both processes' seconds, and the API's share of the engine's, turn by turn."""
    server = Server("ours", command)
    rng = random.Random(0)
    shares, times = [], []
    try:
        api, engine = server.process.pid, children(server.process.pid)[0]
        print(f"{'API s':>8}{'engine s':>10}{'API / engine':>14}{'API µs a token':>16}")
        for turn in range(repeats + 1):
            prompts = [" ".join(rng.choices(WORDS, k=TOKENS - 1)) for _ in range(STREAMS)]
            before = spent(api), spent(engine)
            together(server.port, server.model, prompts, TOKENS)
            here, there = spent(api) - before[0], spent(engine) - before[1]
            if turn:  # the first one is to warm up
                shares.append(here / there)
                times.append(1e6 * here / (STREAMS * TOKENS))
                print(f"{here:8.2f}{there:10.2f}{shares[-1]:14.3f}{times[-1]:16.0f}", flush=True)
    finally:
        server.stop()
    print(f"API process against the engine: {statistics.median(shares):.3f} ({min(shares):.3f} to {max(shares):.3f})")
