"""`make bench`: every measurement that docs/performance.md quotes. `python bench/run.py --help` lists the choices."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a script: the project's root is one up
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tailrace.models import catalogue


@dataclass(frozen=True)
class Setting:
    """What was asked for on the command line. The model is pulled by the first who wants it."""

    args: argparse.Namespace

    @cached_property
    def model(self) -> Path:
        """The model's file."""
        return catalogue.pull(self.args.model)

    @property
    def ours(self) -> str:
        """The command of our server, with {port}. Without drafts: what is compared is decoding."""
        return f"{self.drafting} --draft-tokens 0"

    @property
    def drafting(self) -> str:
        """The same as it is by default."""
        _ = self.model  # pulled before a server is timed
        return f"{Path(sys.executable).with_name('tailrace')} serve {self.args.model} --port {{port}}"

    @property
    def servers(self) -> list[str]:
        """Our server, and the other one where there is one."""
        against = self.args.against and self.args.against.replace("{model}", str(self.model))
        return [self.ours, *([against] if against else [])]

    def workloads(self, default: Any) -> list[str]:
        """Those chosen."""
        return self.args.workloads.split(",") if self.args.workloads else list(default)


def _shapes(shapes: Any, s: Setting) -> None:
    wanted = s.args.shapes.split(",")
    if unknown := sorted(set(wanted) - set(shapes.NAMES)):
        sys.exit(f"--shapes: {unknown[0]} is not one of {', '.join(shapes.NAMES)}")
    shapes.run(wanted, s.args.against, s.workloads(shapes.WORKLOADS), s.args.repeats, s.model)


def _quota(quota: Any, s: Setting) -> None:
    try:
        quota.run(s.ours, s.args.repeats)
    except quota.NoGroups as error:
        sys.exit(f"No CPU quota can be set here: {error}")


def _kvquant(kvquant: Any, s: Setting) -> None:
    a = s.args
    kvquant.run(s.model, a.tokens, a.passages, max(9, a.repeats), a.threads, a.kernels)


def _embeddings(embeddings: Any, s: Setting) -> None:
    model = "minilm" if s.args.model == catalogue.DEFAULT else s.args.model
    embeddings.run(model, s.args.against, max(9, s.args.repeats), s.args.threads)


BENCHES: dict[str, tuple[str, str, Callable[[Any, Setting], None]]] = {
    "kv": ("kv", "The prefix index", lambda m, s: m.run(s.args.repeats)),
    "kernels": ("kernels", "Products", lambda m, s: m.run(s.args.threads, s.args.kernels)),
    "steps": ("steps", "Steps", lambda m, s: m.run(s.model, s.args.threads, s.args.kernels)),
    "quality": ("quality", "Quality", lambda m, s: m.run(s.model, s.args.tokens, s.args.passages)),
    "grammar": ("grammar", "Structured output", lambda m, s: m.run(s.model, s.args.threads)),
    "kvquant": ("kvquant", "KV in fewer bits", _kvquant),
    "embeddings": ("embeddings", "Embeddings", _embeddings),
    "serve": ("serve", "Through HTTP", lambda m, s: m.run(s.servers, s.workloads(m.WORKLOADS), s.args.repeats)),
    "apishare": ("apishare", "The API's share", lambda m, s: m.run(s.ours, max(5, s.args.repeats))),
    "ledger": ("ledger", "The ledger's cost", lambda m, s: m.run(s.ours, max(30, s.args.repeats))),
    "ledgersum": ("ledger", "Many requests in the ledger", lambda m, s: m.run_sum(s.drafting, s.args.requests)),
    "ledgerrows": ("ledger", "Rows of the ledger", lambda m, s: m.run_rows(s.args.rows)),
    "load": ("load", "The load generator", lambda m, s: m.run()),
    "drafts": ("drafts", "Drafts", lambda m, s: m.run(s.drafting, max(9, s.args.repeats))),
    "lora": ("lora", "LoRA adapters", lambda m, s: m.run(s.model, s.args.threads, s.args.kernels, s.args.repeats)),
    "start": ("start", "Start", lambda m, s: m.run(s.servers, s.args.model, s.args.starts)),
    "shapes": ("shapes", "Larger shapes, through HTTP", _shapes),
    "neighbour": ("neighbour", "Beside a busy process", lambda m, s: m.run(s.servers, s.args.repeats)),
    "kvdisk": ("kvdisk", "KV on disk", lambda m, s: m.run(s.ours, max(4, s.args.repeats), s.workloads(m.PARTS))),
    "kvvalkey": ("kvdisk", "KV in Valkey", lambda m, s: m.run_valkey(s.ours, max(4, s.args.repeats))),
    "quota": ("quota", "Under a CPU quota", _quota),
    "simulate": ("simulate", "The simulator", lambda m, s: m.run(s.args.trace, s.workloads(["turns", "prefix"]))),
}
"""Each measurement, in the order in which they run: its file, its heading, and how it is called."""
USUAL = ("steps", "quality", "serve", "start")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("what", nargs="*", choices=list(BENCHES), help=f"default: {', '.join(USUAL)}")
    p.add_argument("--model", default=catalogue.DEFAULT)
    p.add_argument("--threads", type=int, default=None)
    p.add_argument("--kernels", default=None)
    p.add_argument("--tokens", type=int, default=512, help="quality, kvquant: tokens of each passage")
    p.add_argument("--passages", type=int, default=4, help="quality, kvquant: passages of text")
    p.add_argument(
        "--against",
        default=None,
        help="another server's command, with {port} and {model}; embeddings: a Python that has sentence-transformers",
    )
    p.add_argument("--workloads", default=None, help="serve, shapes, kvdisk, simulate: a comma-separated choice")
    p.add_argument("--repeats", type=int, default=3, help="runs of each workload, or turns")
    p.add_argument("--requests", type=int, default=10_000, help="ledgersum: requests")
    p.add_argument("--rows", type=int, default=1_000_000, help="ledgerrows: rows")
    p.add_argument("--trace", type=Path, default=None, help="simulate: a trace (JSON lines as Mooncake published them)")
    p.add_argument("--starts", type=int, default=10, help="start: starts of each server")
    p.add_argument("--shapes", default="llama-1b-q4_0,llama-1b-q8_0", help="shapes: or mistral-7b-q4_0, ...-q8_0")
    setting = Setting(p.parse_args())
    chosen = setting.args.what or USUAL
    os.environ.setdefault("TAILRACE_LEDGER", "off")  # the user's own is not for this
    os.chdir(Path(__file__).resolve().parent.parent)
    for name, (file, heading, run) in BENCHES.items():
        if name in chosen:
            print(f"\n## {heading}\n", flush=True)
            run(importlib.import_module(f"bench.{file}"), setting)


if __name__ == "__main__":
    main()
