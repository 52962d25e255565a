"""Stand-ins for engines: a folder like a virtual environment whose programs answer as the engine's own do.

They know the flags that the engine documents (its --help, or its page of server arguments), refuse every other, and
have its page of metrics. `--standin "NAME=VALUE ..."` is for `standin`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))  # as a script, it is run without the repository on its path

import standin


class Peer(NamedTuple):
    """`starts`: how a command line that serves begins. `flags`: those with a value; `switches`: those without.
    `positional`: whether the model has no flag. `page`: its metrics."""

    module: str
    starts: tuple[str, ...]
    flags: tuple[str, ...]
    switches: tuple[str, ...]
    page: tuple[str, ...]
    positional: bool = False
    version: str = "1.2.3"
    program: str = ""
    path: str = "/metrics"


PEERS = {
    "llama.cpp": Peer(
        "", (), ("-m", "--host", "--port", "--alias", "-c", "-np", "-t", "-tb", "-b", "-ub", "-fa"),
        ("--metrics", "--cache-prompt", "--no-cache-prompt", "--no-warmup"),
        ("llamacpp:requests_processing 1", "llamacpp:requests_deferred 2"), program="llama-server",
    ),
    "vllm": Peer(
        "vllm", ("-m", "vllm.entrypoints.cli.main", "serve"),
        ("--served-model-name", "--host", "--port", "--max-model-len", "--max-num-seqs", "--dtype", "--quantization"),
        ("--enable-prefix-caching", "--no-enable-prefix-caching", "--enforce-eager"),
        ('vllm:num_requests_running{engine="0"} 1.0', 'vllm:num_requests_waiting{engine="0"} 2.0',
         'vllm:kv_cache_usage_perc{engine="0"} 0.25', 'vllm:prefix_cache_queries_total{engine="0"} 100.0',
         'vllm:prefix_cache_hits_total{engine="0"} 40.0'), positional=True,
    ),
    "sglang": Peer(
        "sglang", ("-m", "sglang.launch_server"),
        ("--model-path", "--served-model-name", "--host", "--port", "--context-length", "--max-running-requests",
         "--dtype", "--quantization", "--device", "--mem-fraction-static"),
        ("--enable-metrics", "--disable-radix-cache"),
        ('sglang:num_running_reqs{model_name="m"} 1.0', 'sglang:num_queue_reqs{model_name="m"} 2.0',
         'sglang:token_usage{model_name="m"} 0.25', 'sglang:prompt_tokens_total{model_name="m"} 100.0',
         'sglang:cached_tokens_total{model_name="m",cache_source="device"} 30.0',
         'sglang:cached_tokens_total{model_name="m",cache_source="host"} 10.0'),
    ),
    "tensorrt-llm": Peer(
        "tensorrt_llm", (),
        ("--host", "--port", "--max_seq_len", "--max_batch_size", "--max_num_tokens", "--config", "--backend"),
        ("--trust_remote_code",),
        ('trtllm_num_requests_running{model_name="m"} 1.0', 'trtllm_num_requests_waiting{model_name="m"} 2.0',
         'trtllm_kv_cache_utilization{model_name="m"} 0.25', 'trtllm_prompt_tokens_total{model_name="m"} 100.0',
         'trtllm_prompt_cached_tokens_total{model_name="m"} 40.0'),
        positional=True, program="trtllm-serve", path="/prometheus/metrics",
    ),
    "transformers": Peer(
        "transformers", ("-m", "transformers.cli.transformers", "serve"), ("--host", "--port", "--dtype"),
        ("--continuous-batching",), (), positional=True,
    ),
    "openvino": Peer(
        "openvino_genai", (str(Path(__file__).parents[2] / "tailrace/deploy/servers/openvino_server.py"),),
        ("--port", "--served", "--parallel", "--kv-tokens", "--threads", "--precision", "--device"),
        ("--prefix-cache", "--no-prefix-cache"),
        ("openvino_requests_running 1", "openvino_requests_waiting 2", "openvino_cache_usage 0.25"), positional=True,
    ),
}  # fmt: skip


def install(folder: Path, engine: str) -> Path:
    """A stand-in for that engine; gives the folder, which is like its virtual environment."""
    place = folder / engine / "bin"
    place.mkdir(parents=True)
    for name in filter(None, ("python", PEERS[engine].program)):
        (place / name).write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {__file__} {engine} {name} "$@"\n')
        (place / name).chmod(0o755)
    return place.parent


def run(engine: str, name: str, words: list[str]) -> None:
    """What the program of that name does."""
    peer = PEERS[engine]
    if words[:1] == ["-c"]:
        module, *distributions = words[2:]
        there = module == peer.module or (engine == "transformers" and module in ("fastapi", "uvicorn", "openai"))
        print(json.dumps({"there": there, "distribution": distributions[0], "version": peer.version}))
    elif words == ["--version"]:
        print(f"version: {peer.version}", file=sys.stderr)
    else:
        serve(engine, peer, words)


def serve(engine: str, peer: Peer, words: list[str]) -> None:
    """Reads the command line as the engine would."""
    if tuple(words[: len(peer.starts)]) != peer.starts:
        sys.exit(f"{engine}: no such command: {words}")
    rest, found, extra = words[len(peer.starts) :], dict[str, str](), ""
    if peer.positional:
        found["model"] = rest.pop(0)
    while rest:
        word = rest.pop(0)
        if word == "--standin":
            extra = rest.pop(0)
        elif word in peer.flags:
            found[word] = rest.pop(0)
        elif word not in peer.switches:
            sys.exit(f"{engine}: error: unrecognized arguments: {word}")
    served = next((found[flag] for flag in ("--served-model-name", "--alias", "--served") if flag in found), "model")
    flags = {"model": served, "metrics": ";".join(peer.page), "page": peer.path}
    standin.serve(int(found["--port"]), flags | dict(word.split("=", 1) for word in extra.split()))


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2], sys.argv[3:])
