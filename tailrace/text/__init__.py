"""Tokenizer, chat template, detokenizer, stop automaton.

What lives here: `tokenizer.py` (`Text`: text to ids and back), `gguf.py` and `splits.py` (a tokenizer.json rebuilt from
GGUF metadata), `infill.py` (fill in the middle), `template.py`, `sandbox.py` and `guard.py` (chat templates; the
caller's text never becomes a control token), `layout.py` (a tokenizer.json that loads fast), `tokens.py` (`TokenBytes`:
what each id spells), `detokenize.py`, `stop.py`, `grammar.py` (what a grammar allows next),
`toolgrammar.py` (the grammar of an answer with calls and reasoning);
`answer/` (what a model wrote, taken apart into reasoning, tool calls and text).

Called by `api` (everything) and by `engine` (`TokenBytes`, `Detokenizer`, `StopMatcher`, which import nothing heavy).
It must never know of requests, schedulers, HTTP or backends. Importing this package imports neither `tokenizers` nor
`jinja2`: names are resolved on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tailrace.text.detokenize import Detokenizer, decode
    from tailrace.text.gguf import tokenizer_config_from_gguf, tokenizer_json_from_gguf
    from tailrace.text.stop import StopMatcher
    from tailrace.text.tokenizer import Text, load_text
    from tailrace.text.tokens import TokenBytes

__all__ = [
    "Detokenizer",
    "StopMatcher",
    "Text",
    "TokenBytes",
    "decode",
    "load_text",
    "tokenizer_config_from_gguf",
    "tokenizer_json_from_gguf",
]

_HOME = {
    "Detokenizer": "detokenize",
    "StopMatcher": "stop",
    "Text": "tokenizer",
    "TokenBytes": "tokens",
    "decode": "detokenize",
    "load_text": "tokenizer",
    "tokenizer_config_from_gguf": "gguf",
    "tokenizer_json_from_gguf": "gguf",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
