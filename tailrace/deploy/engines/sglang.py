"""SGLang's `sglang.launch_server` (docs.sglang.ai: server arguments, production metrics)."""

from __future__ import annotations

from tailrace.deploy.engines import finding
from tailrace.deploy.engines.driver import Command, Found, Gauges, Options, flags, threads_of, unfit_checkpoint
from tailrace.deploy.engines.vllm import FLOATS


class _Sglang:
    name = "sglang"
    formats = "a folder as Hugging Face's (config.json and safetensors), or a name on its hub"
    gauges = Gauges(
        running=("sglang:num_running_reqs",), waiting=("sglang:num_queue_reqs",), kv_use=("sglang:token_usage",),
        cache_hits=("sglang:cached_tokens_total",), cache_queries=("sglang:prompt_tokens_total",),
    )  # fmt: skip

    def find(self, given: str | None) -> Found:
        found = finding.package(self.name, given, "sglang", ("sglang",), "sglang")
        argv = (found.python, "-m", "sglang.launch_server")
        return Found(argv, found.version, found.python, found.python)

    def unfit(self, model: str) -> str | None:
        return unfit_checkpoint(self.name, self.formats, model)

    def command(self, found: Found, options: Options, port: int) -> Command:
        cache = ("--disable-radix-cache",) if options.prefix_cache is False else ()
        told = flags(
            {
                "--model-path": options.model, "--served-model-name": options.served, "--host": "127.0.0.1",
                "--port": port, "--context-length": options.context, "--max-running-requests": options.parallel,
                "--dtype" if options.dtype in FLOATS else "--quantization": options.dtype,
            }
        )  # fmt: skip
        env = {**finding.environment(found.python or ""), **threads_of(options.threads)}
        argv = (*found.argv, *told, "--enable-metrics", *cache, *options.extra)
        return Command(self.name, argv, port, options.served, env=env)


DRIVER = _Sglang()
