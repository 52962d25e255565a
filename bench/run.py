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
    choices = ["kernels", "steps", "quality", "serve", "start", "shapes", "quota", "neighbour"]
    choices += ["kv", "kvdisk", "kvvalkey", "kvquant", "grammar"]
    p.add_argument("what", nargs="*", choices=choices, help="default: steps, quality, serve and start")
    p.add_argument("--model", default=catalogue.DEFAULT)
    p.add_argument("--threads", type=int, default=None)
    p.add_argument("--kernels", default=None)
    p.add_argument("--tokens", type=int, default=512, help="quality, kvquant: tokens of each passage")
    p.add_argument("--passages", type=int, default=4, help="quality, kvquant: passages of text")
    p.add_argument("--against", default=None, help="another server's command, with {port} and {model}")
    p.add_argument("--workloads", default=None, help="serve, shapes: a comma-separated choice")
    p.add_argument("--repeats", type=int, default=3, help="runs of each workload, or turns")
    p.add_argument("--starts", type=int, default=10, help="start: starts of each server")
    p.add_argument("--shapes", default="llama-1b-q4_0,llama-1b-q8_0", help="shapes: or mistral-7b-q4_0, ...-q8_0")
    args = p.parse_args()
    chosen = args.what or ["steps", "quality", "serve", "start"]
    if "kv" in chosen:
        from bench import kv

        print("## The prefix index\n", flush=True)
        kv.run(args.repeats)
        if chosen == ["kv"]:  # the rest needs a model
            return
    model = catalogue.pull(args.model)
    os.chdir(Path(__file__).resolve().parent.parent)
    ours = f"{Path(sys.executable).with_name('tailrace')} serve {args.model} --port {{port}}"
    against = args.against and args.against.replace("{model}", str(model))
    if "kernels" in chosen:
        from bench import kernels

        print("## Products\n")
        kernels.run(args.threads, args.kernels)
    if "steps" in chosen:
        from bench import steps

        print("## Steps\n")
        steps.run(model, args.threads, args.kernels)
    if "grammar" in chosen:
        from bench import grammar

        print("## Structured output\n")
        grammar.run(model, args.threads)
    if "quality" in chosen:
        from bench import quality

        print("\n## Quality\n")
        quality.run(model, args.tokens, args.passages)
    if "serve" in chosen:
        from bench import serve

        print("\n## Through HTTP\n", flush=True)
        names = args.workloads.split(",") if args.workloads else list(serve.WORKLOADS)
        serve.run([ours, *([against] if against else [])], names, args.repeats)
    if "start" in chosen:
        from bench import start

        print("\n## Start\n", flush=True)
        start.run([ours, *([against] if against else [])], args.model, args.starts)
    if "shapes" in chosen:
        from bench import shapes

        print("\n## Larger shapes, through HTTP", flush=True)
        names = args.workloads.split(",") if args.workloads else list(shapes.WORKLOADS)
        wanted = args.shapes.split(",")
        if unknown := sorted(set(wanted) - set(shapes.NAMES)):
            p.error(f"--shapes: {unknown[0]} is not one of {', '.join(shapes.NAMES)}")
        shapes.run(wanted, args.against, names, args.repeats, model)
    if "neighbour" in chosen:
        from bench import neighbour

        print("\n## Beside a busy process\n", flush=True)
        neighbour.run([ours, *([against] if against else [])], args.repeats)
    if "kvdisk" in chosen:
        from bench import kvdisk

        print("\n## KV on disk\n", flush=True)
        kvdisk.run(ours, max(8, args.repeats))
    if "kvquant" in chosen:
        from bench import kvquant

        print("\n## KV in fewer bits\n", flush=True)
        kvquant.run(model, args.tokens, args.passages, max(9, args.repeats), args.threads, args.kernels)
    if "kvvalkey" in chosen:
        from bench import kvdisk

        print("\n## KV in Valkey\n", flush=True)
        kvdisk.run_valkey(ours, max(8, args.repeats))
    if "quota" in chosen:
        from bench import quota

        print("\n## Under a CPU quota\n", flush=True)
        try:
            quota.run(ours, args.repeats)
        except quota.NoGroups as error:
            sys.exit(f"No CPU quota can be set here: {error}")


if __name__ == "__main__":
    main()
