"""Rotary position embedding: what a configuration says of it, and the inverse frequencies that follow.

Sources: RoPE (Su et al. 2021, section 3.2.2), linear position interpolation (Chen et al. 2023), dynamic NTK scaling
(/u/emozilla 2023), YaRN (Peng et al. 2023, sections 3.2 to 3.4), Llama 3.1's smoothed scaling (Meta 2024). Arithmetic
is float32 in the order that Hugging Face transformers uses, except that powers are taken in float64 and then rounded,
so that they are the same on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tailrace.backends import Format, Rope, Weight
from tailrace.models.fields import Fields
from tailrace.terms import ModelError

ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of the frequencies, which a GGUF file keeps as a tensor where Hugging Face has `llama3` fields."""

KINDS: dict[str, tuple[set[str], set[str]]] = {
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "dynamic": ({"factor"}, {"original_max_position_embeddings"}),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor"}, {"original_max_position_embeddings"}),
    "yarn": (
        {"factor"},
        {"original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"}
        | {"mscale", "mscale_all_dim", "truncate", "finetuned"},
    ),
}
"""The fields that each kind needs, and those that it may have."""


@dataclass(frozen=True)
class RopeConfig:
    """One model's rope. `original_context` is in tokens; fields that the kind does not use keep their defaults."""

    kind: str
    theta: float
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True

    def contexts(self, trained: int) -> tuple[int, int]:
        """Tokens that the model serves by itself, and the most that may be asked for, when its configuration says
        `trained`. They differ for `dynamic` alone, whose frequencies depend on the served context."""
        if self.kind == "linear":
            return int(trained * self.factor), int(trained * self.factor)
        if self.kind == "dynamic":
            return trained, int(trained * self.factor)
        if self.kind == "yarn":
            extended = max(trained, int(self.original_context * self.factor))
            return extended, extended
        return trained, trained


def read_rope(fields: Fields, max_positions: int) -> RopeConfig:
    """What the configuration says: `rope_parameters`, or the older `rope_scaling` with `rope_theta` beside it. Raises
    ModelError for an unknown kind, a field that the kind does not have, and contradictions."""
    old, new = fields.values.get("rope_scaling"), fields.values.get("rope_parameters")
    if old and new and old != new:
        raise fields.refuse("rope_scaling", "contradicts rope_parameters")
    name = "rope_parameters" if new else "rope_scaling"
    given = new or old or {}
    if not isinstance(given, dict):
        raise fields.refuse(name, "is not an object")
    rope = Fields(f"{fields.where}: {name}", given)
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind not in KINDS:
        raise rope.refuse("rope_type", f"is {kind!r}, which is not supported; supported are {', '.join(KINDS)}")
    if rope.has("type") and rope.text("type") != kind:
        raise rope.refuse("type", f"is {rope.text('type')!r}, but rope_type is {kind!r}")
    needed, optional = KINDS[kind]
    for field in sorted(
        given.keys() - needed - optional - {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    ):
        if rope.has(field):
            raise rope.refuse(field, f"is not a field of the {kind} rope")
    for field in sorted(needed):
        if not rope.has(field):
            raise rope.refuse(field, f"is missing, but the {kind} rope needs it")
    rope.only("partial_rotary_factor", 1.0, 1)
    fields.only("partial_rotary_factor", 1.0, 1)
    return _scaled(fields, rope, RopeConfig(kind, _theta(fields, rope)), max_positions)


def _theta(fields: Fields, rope: Fields) -> float:
    outer = fields.number("rope_theta", 10000.0)
    theta = rope.number("rope_theta", outer)
    if fields.has("rope_theta") and theta != outer:
        raise fields.refuse("rope_theta", f"is {outer}, but the rope's own is {theta}")
    if theta <= 1.0:
        raise fields.refuse("rope_theta", f"is {theta}; expected more than 1")
    return theta


def _scaled(fields: Fields, rope: Fields, plain: RopeConfig, max_positions: int) -> RopeConfig:
    """The rope with the fields that its kind uses."""
    if plain.kind == "default":
        return plain
    factor = rope.number("factor")
    if factor < 1.0:
        raise rope.refuse("factor", f"is {factor}; expected 1 or more")
    if plain.kind == "linear":
        return replace(plain, factor=factor)
    original = rope.count("original_max_position_embeddings", max_positions)
    if plain.kind == "dynamic":
        # transformers scales from max_position_embeddings, whatever else is written.
        if original != max_positions:
            raise rope.refuse("original_max_position_embeddings", f"is {original}, not max_position_embeddings")
        return replace(plain, factor=factor, original_context=max_positions)
    original = fields.count("original_max_position_embeddings", original)
    if plain.kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if low >= high:
            raise rope.refuse("low_freq_factor", f"is {low}; expected less than high_freq_factor, {high}")
        return replace(plain, factor=factor, original_context=original, low_freq_factor=low, high_freq_factor=high)
    return replace(
        plain,
        factor=factor,
        original_context=original,
        attention_factor=rope.number("attention_factor") if rope.has("attention_factor") else None,
        beta_fast=rope.number("beta_fast", 32.0, zero=True) or 32.0,
        beta_slow=rope.number("beta_slow", 1.0, zero=True) or 1.0,
        mscale=rope.number("mscale", 0.0, zero=True),
        mscale_all_dim=rope.number("mscale_all_dim", 0.0, zero=True),
        truncate=rope.flag("truncate", True),
    )


def build_rope(config: RopeConfig, head_dim: int, context: int, factors: NDArray[np.float32] | None = None) -> Rope:
    """The rope of a model that serves `context` tokens (only `dynamic` depends on it). `factors` divide the
    frequencies one by one, as the `rope_freqs.weight` tensor of a GGUF file does."""
    base = np.float32(config.theta)
    if config.kind == "dynamic":
        base = _dynamic_base(config, head_dim, context)
    powers = _powers(base, head_dim)
    scale = 1.0
    if config.kind == "yarn":
        inverse, scale = _yarn(config, head_dim, powers)
    else:
        inverse = np.float32(1.0) / powers
    if config.kind == "linear":
        inverse = inverse / np.float32(config.factor)
    elif config.kind == "llama3":
        inverse = _llama3(config, inverse)
    if factors is not None:
        inverse = inverse / factors
    return Rope(inverse, scale)


def _powers(base: np.float32, head_dim: int) -> NDArray[np.float32]:
    """base ** (0, 2, 4, ... / head_dim)."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return np.power(np.float64(base), exponents.astype(np.float64)).astype(np.float32)


def _dynamic_base(config: RopeConfig, head_dim: int, context: int) -> np.float32:
    """theta * (factor * length / trained - (factor - 1)) ** (d / (d - 2)), with the length fixed at the context."""
    length = max(context, config.original_context)
    stretch = np.float32(config.factor) * np.float32(length) / np.float32(config.original_context)
    stretch = np.float32(stretch - np.float32(config.factor - 1.0))
    exponent = np.float32(head_dim / (head_dim - 2))
    return np.float32(config.theta) * np.float32(np.float64(stretch) ** np.float64(exponent))


def _llama3(config: RopeConfig, inverse: NDArray[np.float32]) -> NDArray[np.float32]:
    """Long waves are slowed by the factor, short ones kept, and those between blended."""
    original, low, high = config.original_context, config.low_freq_factor, config.high_freq_factor
    wavelength = np.float32(2 * math.pi) / inverse
    blend = (np.float32(original) / wavelength - np.float32(low)) / np.float32(high - low)
    slowed = inverse / np.float32(config.factor)
    blended = (np.float32(1.0) - blend) * inverse / np.float32(config.factor) + blend * inverse
    inner = np.where(wavelength < np.float32(original / high), inverse, blended)
    return np.where(wavelength > np.float32(original / low), slowed, inner).astype(np.float32)


def _yarn(config: RopeConfig, head_dim: int, powers: NDArray[np.float32]) -> tuple[NDArray[np.float32], float]:
    """Dimensions that turn often keep their frequency, those that turn seldom are interpolated, with a ramp between;
    cos and sin are scaled by the attention factor."""

    def dimension(rotations: float) -> float:
        """Where a wave makes this many rotations over the original context."""
        waves = config.original_context / (rotations * 2 * math.pi)
        return head_dim * math.log(waves) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    steps = np.arange(head_dim // 2, dtype=np.float32)
    ramp = np.clip((steps - np.float32(low)) / np.float32(high - low), np.float32(0), np.float32(1))
    kept = np.float32(1.0) - ramp
    interpolated = np.float32(1.0) / (np.float32(config.factor) * powers)
    inverse = interpolated * (np.float32(1.0) - kept) + (np.float32(1.0) / powers) * kept
    return inverse.astype(np.float32), _yarn_scale(config)


def _yarn_scale(config: RopeConfig) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if config.factor <= 1.0 else 0.1 * weight * math.log(config.factor) + 1.0

    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return mscale(config.mscale) / mscale(config.mscale_all_dim)
    return mscale(1.0)


def rope_factors(path: Path, tensors: Mapping[str, Weight], head_dim: int) -> NDArray[np.float32] | None:
    """The divisors of the rope's frequencies, where the checkpoint has them: [head_dim / 2]."""
    stored = tensors.get(ROPE_FACTORS)
    if stored is None:
        return None
    if stored.format is not Format.F32 or stored.shape != (head_dim // 2,):
        raise ModelError(
            f"{path}: tensor {ROPE_FACTORS} is {stored.format} of shape {list(stored.shape)}; expected F32 of "
            f"[{head_dim // 2}]"
        )
    factors = stored.data.reshape(-1).view(np.float32)
    if not np.isfinite(factors).all() or (factors <= 0).any():
        raise ModelError(f"{path}: tensor {ROPE_FACTORS} holds a factor that is not above zero")
    return factors
