"""A file for each engine, with its `DRIVER`: how it is found, started, and what its gauges are called.

`driver` has what they have in common, `finding` looks for programs and packages. To add an engine, write a file like
the others and name it in `NAMES`. A driver imports nothing of the engine that it drives, and starts nothing but short
questions for a version.
"""

from __future__ import annotations

from importlib import import_module

from tailrace.deploy.engines.driver import Driver
from tailrace.terms import InvalidInput

NAMES = {
    "tailrace": "tailrace", "llama.cpp": "llama_cpp", "vllm": "vllm", "sglang": "sglang", "openvino": "openvino",
    "transformers": "transformers", "tensorrt-llm": "tensorrt_llm",
}  # fmt: skip
"""What each is called on command lines, and its file."""


def driver(name: str) -> Driver:
    """The driver of that engine. Raises InvalidInput."""
    if name not in NAMES:
        raise InvalidInput(f"there is no engine called {name!r}: {', '.join(NAMES)}", param="engines")
    found: Driver = import_module(f"{__name__}.{NAMES[name]}").DRIVER
    return found
