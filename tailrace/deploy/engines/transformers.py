"""Hugging Face's `transformers serve` (its --help), with continuous batching, which it has as an option.

It knows no `ignore_eos`: each request has a generation configuration whose end of text is no token, which comes to the
same. Streams end without [DONE].
"""

from __future__ import annotations

import json

from tailrace.deploy.engines import finding
from tailrace.deploy.engines.driver import (
    Command,
    Found,
    NotFound,
    Options,
    cannot,
    flags,
    threads_of,
    unfit_checkpoint,
)

NEVER = 2**31 - 1
"""An id that no vocabulary has."""


class _Transformers:
    name = "transformers"
    formats = "a folder as Hugging Face's (config.json and safetensors), or a name on its hub"
    gauges = None

    def find(self, given: str | None) -> Found:
        found = finding.package(self.name, given, "transformers", ("transformers",), "transformers")
        for module in ("fastapi", "uvicorn", "openai"):
            try:
                finding.package(self.name, found.python, module, (module,), module)
            except NotFound as error:
                raise NotFound(
                    f"{error}, which `transformers serve` needs: pip install 'transformers[serving]'"
                ) from error
        argv = (found.python, "-m", "transformers.cli.transformers", "serve")
        return Found(argv, found.version, found.python, found.python)

    def unfit(self, model: str) -> str | None:
        return unfit_checkpoint(self.name, self.formats, model)

    def command(self, found: Found, options: Options, port: int) -> Command:
        if options.prefix_cache is not None:
            raise cannot(self.name, "prefix caching: it has no switch")
        told = flags({"--host": "127.0.0.1", "--port": port, "--dtype": options.dtype})
        env = {**finding.environment(found.python or ""), **threads_of(options.threads)}
        argv = (*found.argv, options.model, *told, "--continuous-batching", *options.extra)
        endless = json.dumps({"do_sample": False, "eos_token_id": NEVER, "pad_token_id": 0})
        body = {"generation_config": endless}
        return Command(self.name, argv, port, options.model, env=env, body=body, ignore_eos=False)


DRIVER = _Transformers()
