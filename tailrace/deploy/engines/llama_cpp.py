"""llama.cpp's `llama-server` (flags as in its --help; tools/server/README.md)."""

from __future__ import annotations

import os
from pathlib import Path

from tailrace.deploy.engines import finding
from tailrace.deploy.engines.driver import Command, Found, Gauges, Options, cannot, flags, is_gguf

PROGRAM = "llama-server"


class _LlamaCpp:
    name = "llama.cpp"
    formats = "a .gguf file"
    gauges = Gauges(
        running=("llamacpp:requests_processing",), waiting=("llamacpp:requests_deferred",),
        kv_use=("llamacpp:kv_cache_usage_ratio",),
    )  # fmt: skip

    def find(self, given: str | None) -> Found:
        program = finding.program(self.name, given, PROGRAM)
        told = finding.version([program, "--version"], r"version: (.+)", _libraries(program))
        return Found((program,), told, program)

    def unfit(self, model: str) -> str | None:
        return None if is_gguf(model) else f"{self.name} takes {self.formats}, and {model} is none"

    def command(self, found: Found, options: Options, port: int) -> Command:
        if options.dtype is not None:
            raise cannot(self.name, "dtype: it computes with what the file holds")
        context = options.context
        if context is not None:
            context *= options.parallel or 1  # its slots divide what it is given
        cache = {None: (), True: ("--cache-prompt",), False: ("--no-cache-prompt",)}[options.prefix_cache]
        told = flags(
            {
                "-m": Path(options.model).expanduser(), "--host": "127.0.0.1", "--port": port,
                "--alias": options.served, "-c": context, "-np": options.parallel, "-t": options.threads,
                "-tb": options.threads,
            }
        )  # fmt: skip
        argv = (*found.argv, *told, "--metrics", *cache, *options.extra)
        return Command(self.name, argv, port, options.served, env=_libraries(found.argv[0]))


def _libraries(program: str) -> dict[str, str | None]:
    """A build that was moved finds the libraries beside it."""
    folder = Path(program).resolve().parent
    if not any(folder.glob("lib*.so*")):
        return {}
    return {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("LD_LIBRARY_PATH"))))}


DRIVER = _LlamaCpp()
