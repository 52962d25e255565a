"""Fill in the middle: the control tokens with which a model is told what stands before and after what it writes.

Prompts are laid out as prefix token, text before, suffix token, text after, middle token (Bavarian et al. 2022, section
3: the order "PSM"), which is how every model named here was trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

PARTS = ("prefix", "suffix", "middle")
NAMES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # CodeGeeX
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),  # DeepSeek
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),  # Code Llama
)
"""How models spell the three."""


@dataclass(frozen=True)
class Infill:
    """The ids of the three tokens."""

    prefix: int
    suffix: int
    middle: int


def find(config: Mapping[str, Any], id_of: Callable[[str], int | None]) -> Infill | None:
    """The tokens that the tokenizer's configuration names (prefix_token, suffix_token, middle_token), or that have one
    of the known names; None where the vocabulary has no such three. `id_of`: the id of a token's text."""
    said = [config.get(f"{part}_token") for part in PARTS]
    rows = [tuple(said)] if all(isinstance(text, str) for text in said) else []
    for texts in (*rows, *NAMES):
        ids = [id_of(str(text)) for text in texts]
        prefix, suffix, middle = ids
        if prefix is not None and suffix is not None and middle is not None:
            return Infill(prefix, suffix, middle)
    return None
