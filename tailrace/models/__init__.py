"""Models: one file an architecture, written once in `backends.Ops`; the reading of configurations and checkpoints.

`open_checkpoint` reads a GGUF file or a safetensors folder, `load_model` binds it to its architecture, `describe` says
what it is, `prepared` keeps what a start would otherwise work out again, `catalogue` knows models by name. Everything
about a file is checked here, and refused by name when it is wrong or not understood. Called by `text` (assets),
`engine` and `cli`. It never knows of requests, of how ops are computed, or of where tokens come from.

The names below are imported when they are first used: the command line, which must start the engine before anything
heavy loads, needs no more of this package than `catalogue`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tailrace.models.checkpoint import Checkpoint, TextAssets, open_checkpoint
    from tailrace.models.decoder import Model, ModelConfig
    from tailrace.models.info import ModelInfo, describe
    from tailrace.models.load import load_model, model_config

__all__ = [
    "Checkpoint",
    "Model",
    "ModelConfig",
    "ModelInfo",
    "TextAssets",
    "describe",
    "load_model",
    "model_config",
    "open_checkpoint",
]

_HOME = {
    "Checkpoint": "checkpoint",
    "Model": "decoder",
    "ModelConfig": "decoder",
    "ModelInfo": "info",
    "TextAssets": "checkpoint",
    "describe": "info",
    "load_model": "load",
    "model_config": "load",
    "open_checkpoint": "checkpoint",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
