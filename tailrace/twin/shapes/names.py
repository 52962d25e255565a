"""Names of modules as rules of quantisation have them: patterns of many dialects against the names that we give."""

from __future__ import annotations

import fnmatch
import re
from functools import lru_cache

_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "backbone.", "transformer.", "model.")

_DIALECTS = (
    ("mlp.experts", ("block_sparse_moe.experts", "mixer.experts", "ffn.experts", "feed_forward.experts")),
    ("mlp.shared_experts", ("mlp.shared_expert", "mixer.shared_experts", "ffn.shared_experts",
                            "feed_forward.shared_expert", "share_expert")),
    ("mlp.gate", ("mlp.router", "block_sparse_moe.gate", "mixer.gate", "ffn.gate", "feed_forward.router", "router")),
    ("mlp", ("mixer", "feed_forward", "ffn")),
    ("self_attn", ("attn", "mixer", "attention")),
)  # fmt: skip
"""How our names begin, and what others call that."""

_ONE_EXPERT = re.compile(r"\.experts\.\d+")


def matches(patterns: tuple[str, ...], layer: int | None, name: str) -> bool:
    """Whether one of the patterns means this module: a regular expression after `re:`, a name with `*`, or a name that
    is a part of the module's (whole words between dots)."""
    return bool(patterns) and any(_compiled(patterns).mean(one) for one in _spellings(layer, name))


@lru_cache(maxsize=8192)
def _spellings(layer: int | None, name: str) -> tuple[str, ...]:
    """What checkpoints may call a module."""
    ours, theirs = next(((ours, theirs) for ours, theirs in _DIALECTS if f"{name}.".startswith(f"{ours}.")), ("", ()))
    names = (name, *(other + name.removeprefix(ours) for other in theirs))
    return names if layer is None else tuple(f"layers.{layer}.{one}" for one in names)


class _Patterns:
    """Many patterns, ready to compare. One expert of many stands for all."""

    def __init__(self, patterns: tuple[str, ...]) -> None:
        bare = [_ONE_EXPERT.sub(".experts", _bare(one)) for one in patterns if not one.startswith("re:")]
        self._exact = frozenset(one for one in bare if "*" not in one)
        wild = {one for one in bare if "*" in one}
        wild |= {one.removesuffix(".*") for one in wild} | {f"{one}.*" for one in wild}
        self._wild = re.compile("|".join(fnmatch.translate(one) for one in sorted(wild))) if wild else None
        self._regular = [re.compile(one.removeprefix("re:")) for one in patterns if one.startswith("re:")]

    def mean(self, name: str) -> bool:
        if self._wild and (self._wild.match(name) or self._wild.match(f".{name}")):
            return True
        if any(each.match(f"model.{name}") or each.match(name) for each in self._regular):
            return True
        words = name.split(".")
        ends = range(1, len(words) + 1)
        return any(".".join(words[begin:end]) in self._exact for end in ends for begin in range(end))


@lru_cache(maxsize=64)
def _compiled(patterns: tuple[str, ...]) -> _Patterns:
    return _Patterns(patterns)


def _bare(pattern: str) -> str:
    """Without the prefix that models in models have."""
    for prefix in _PREFIXES:
        if pattern.startswith(prefix):
            return pattern.removeprefix(prefix)
    return pattern
