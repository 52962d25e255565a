"""TensorRT-LLM's `trtllm-serve` (its --help; metrics: docs of trtllm-serve, "Metrics Endpoint").

Its Prometheus page is there only where a file given with --config says `return_perf_metrics: true`; prefix caching is
set in such a file as well.
"""

from __future__ import annotations

from pathlib import Path

from tailrace.deploy.engines import finding
from tailrace.deploy.engines.driver import (
    Command,
    Found,
    Gauges,
    Options,
    cannot,
    flags,
    threads_of,
    unfit_checkpoint,
)

PROGRAM = "trtllm-serve"


class _TensorrtLlm:
    name = "tensorrt-llm"
    formats = "a folder as Hugging Face's (config.json and safetensors), or a name on its hub"
    gauges = Gauges(
        path="/prometheus/metrics", running=("trtllm_num_requests_running",), waiting=("trtllm_num_requests_waiting",),
        kv_use=("trtllm_kv_cache_utilization",), cache_hits=("trtllm_prompt_cached_tokens_total",),
        cache_queries=("trtllm_prompt_tokens_total",),
    )  # fmt: skip

    def find(self, given: str | None) -> Found:
        found = finding.package(self.name, given, "tensorrt_llm", ("tensorrt-llm", "tensorrt_llm"), PROGRAM)
        program = finding.program(self.name, str(Path(found.python).parent), PROGRAM)
        return Found((program,), found.version, program, found.python)

    def unfit(self, model: str) -> str | None:
        return unfit_checkpoint(self.name, self.formats, model)

    def command(self, found: Found, options: Options, port: int) -> Command:
        for value, what in ((options.prefix_cache, "prefix caching"), (options.dtype, "dtype")):
            if value is not None:
                raise cannot(self.name, f"{what} but in a file: --engine-args '{self.name}=--config FILE'")
        told = flags(
            {
                "--host": "127.0.0.1", "--port": port, "--max_seq_len": options.context,
                "--max_batch_size": options.parallel,
            }
        )  # fmt: skip
        folder = Path(options.model).expanduser()
        served = folder.name if folder.is_dir() else options.model  # it has no flag for that
        env = {**finding.environment(found.python or ""), **threads_of(options.threads)}
        return Command(self.name, (*found.argv, options.model, *told, *options.extra), port, served, env=env)


DRIVER = _TensorrtLlm()
