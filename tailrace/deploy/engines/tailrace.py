"""Our own server."""

from __future__ import annotations

import sys
from pathlib import Path

from tailrace import __version__
from tailrace.deploy.engines import finding
from tailrace.deploy.engines.driver import Command, Found, Gauges, Options, flags, is_checkpoint, is_gguf
from tailrace.models import catalogue
from tailrace.terms import ModelError

_QUIET = ("--no-log-requests", "--ledger", "off")
"""Other engines keep no accounts, and these runs are none of the user's."""


class _Tailrace:
    name = "tailrace"
    formats = "a .gguf file, a folder with safetensors, or a name as of tailrace pull"
    gauges = Gauges(
        running=("tailrace_num_requests_running",), waiting=("tailrace_num_requests_waiting",),
        kv_use=("tailrace_kv_cache_usage_perc",), cache_hits=("tailrace_prefix_cache_hits_total",),
        cache_queries=("tailrace_prefix_cache_queries_total",),
    )  # fmt: skip

    def find(self, given: str | None) -> Found:
        if given is None:
            return Found((sys.executable, "-m", "tailrace.cli", "serve"), __version__, str(Path(__file__).parents[2]))
        program = finding.program(self.name, given, "tailrace")
        return Found((program, "serve"), finding.version([program, "--version"], r"tailrace (\S+)"), program)

    def unfit(self, model: str) -> str | None:
        if is_gguf(model) or is_checkpoint(model):
            return None
        try:
            missing = catalogue.missing(model)
        except ModelError as error:
            return str(error)
        return f"{model} is not here yet: tailrace pull {model}" if missing else None

    def command(self, found: Found, options: Options, port: int) -> Command:
        cache = {None: (), True: ("--prefix-cache",), False: ("--no-prefix-cache",)}[options.prefix_cache]
        told = flags(
            {
                "--port": port, "--served-name": options.served, "--max-context": options.context,
                "--max-running": options.parallel, "--threads": options.threads, "--quantize": options.dtype,
            }
        )  # fmt: skip
        # A key in the environment is for the user's own servers: this one is asked without.
        keys = dict.fromkeys(("TAILRACE_API_KEY", "TAILRACE_ADMIN_KEY"))
        argv = (*found.argv, options.model, *told, *cache, *_QUIET, *options.extra)
        return Command(self.name, argv, port, options.served, "/health/ready", env=keys)


DRIVER = _Tailrace()
