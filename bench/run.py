"""`make bench`: every measurement that docs/performance.md quotes. `python bench/run.py --help` lists the choices."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

if __name__ == "__main__":  # run as a script: the project's root is one up
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tailrace.models import catalogue


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("what", nargs="*", choices=["steps", "quality", "serve"], help="default: all")
    p.add_argument("--model", default=catalogue.DEFAULT)
    p.add_argument("--threads", type=int, default=None)
    p.add_argument("--kernels", default=None)
    p.add_argument("--tokens", type=int, default=512, help="quality: tokens of each passage")
    p.add_argument("--passages", type=int, default=4, help="quality: passages of text")
    p.add_argument("--against", default=None, help="serve: command line of another server, with {port}")
    p.add_argument("--workloads", default=None, help="serve: a comma-separated choice")
    p.add_argument("--repeats", type=int, default=3, help="serve: runs of each workload")
    args = p.parse_args()
    chosen = args.what or ["steps", "quality", "serve"]
    model = catalogue.pull(args.model)
    os.chdir(Path(__file__).resolve().parent.parent)
    if "steps" in chosen:
        from bench import steps

        print("## Steps\n")
        steps.run(model, args.threads, args.kernels)
    if "quality" in chosen:
        from bench import quality

        print("\n## Quality\n")
        quality.run(model, args.tokens, args.passages)
    if "serve" in chosen:
        from bench import serve

        print("\n## Through HTTP\n", flush=True)
        ours = f"{sys.executable} -m tailrace.cli serve {args.model} --port {{port}}"
        names = args.workloads.split(",") if args.workloads else list(serve.WORKLOADS)
        serve.run([ours, *([args.against] if args.against else [])], names, args.repeats)


if __name__ == "__main__":
    main()
