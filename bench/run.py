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
    p.add_argument(
        "what",
        nargs="*",
        choices=["kernels", "steps", "quality", "serve", "shapes"],
        help="default: steps quality serve",
    )
    p.add_argument("--model", default=catalogue.DEFAULT)
    p.add_argument("--threads", type=int, default=None)
    p.add_argument("--kernels", default=None)
    p.add_argument("--tokens", type=int, default=512, help="quality: tokens of each passage")
    p.add_argument("--passages", type=int, default=4, help="quality: passages of text")
    p.add_argument("--against", default=None, help="serve, shapes: another server's command, with {port} and {model}")
    p.add_argument("--workloads", default=None, help="serve, shapes: a comma-separated choice")
    p.add_argument("--repeats", type=int, default=3, help="serve, shapes: runs of each workload")
    p.add_argument("--shapes", default="llama-1b-q4_0,llama-1b-q8_0", help="shapes: or mistral-7b-q4_0, ...-q8_0")
    args = p.parse_args()
    chosen = args.what or ["steps", "quality", "serve"]
    model = catalogue.pull(args.model)
    os.chdir(Path(__file__).resolve().parent.parent)
    if "kernels" in chosen:
        from bench import kernels

        print("## Products\n")
        kernels.run(args.threads, args.kernels)
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
        against = args.against and args.against.replace("{model}", str(model))
        serve.run([ours, *([against] if against else [])], names, args.repeats)
    if "shapes" in chosen:
        from bench import shapes

        print("\n## Larger shapes, through HTTP", flush=True)
        names = args.workloads.split(",") if args.workloads else list(shapes.WORKLOADS)
        wanted = args.shapes.split(",")
        if unknown := sorted(set(wanted) - set(shapes.NAMES)):
            p.error(f"--shapes: {unknown[0]} is not one of {', '.join(shapes.NAMES)}")
        shapes.run(wanted, args.against, names, args.repeats, model)


if __name__ == "__main__":
    main()
