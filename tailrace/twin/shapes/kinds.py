"""Rules that say of which kind each layer is: lists of names, letters, steps, and the first or last so many."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tailrace.twin.shapes.reading import Reader
from tailrace.twin.shapes.rules import Size, sized

Kinds = Callable[[Reader, int], list[str]]
"""What kind each layer is, of so many."""


def same(kind: str) -> Kinds:
    """All layers are one kind."""
    return lambda reader, layers: [kind] * layers


def named(field: str, otherwise: Kinds, names: Mapping[str, str] | None = None) -> Kinds:
    """Each layer has a name in a list (or a letter in a text), which `names` translates."""

    def kinds(reader: Reader, layers: int) -> list[str]:
        found = reader.raw(field)
        if found is None:
            return otherwise(reader, layers)
        reader.assumed.pop(field, None)
        given = list(found) if isinstance(found, str) else reader.listed(field, layers) or []
        if len(given) < layers:
            raise reader.refuse(field, f"has {len(given)} entries, but there are {layers} layers")
        unknown = sorted({str(one) for one in given[:layers] if names is not None and str(one) not in names})
        if unknown:
            raise reader.refuse(field, f"has {', '.join(unknown)[:60]}; known are {', '.join(names or ())}")
        return [names[str(one)] if names else str(one) for one in given[:layers]]

    return kinds


def every(field: Size, kind: str, other: str, first: int = -1) -> Kinds:
    """One of so many layers is `kind`, the last of each group (`first` -1) or that one of it."""

    def kinds(reader: Reader, layers: int) -> list[str]:
        step = sized(reader, field) if isinstance(field, int) or "=" in field else reader.count(field)
        return [kind if step and layer % step == first % step else other for layer in range(layers)]

    return kinds


def after(field: Size, kind: str = "sparse", first: str = "dense") -> Kinds:
    """The first so many layers are another kind."""

    def kinds(reader: Reader, layers: int) -> list[str]:
        count = min(sized(reader, field), layers)
        return [first] * count + [kind] * (layers - count)

    return kinds


def sparse_step(reader: Reader, layers: int) -> list[str]:
    """Qwen's: one of `decoder_sparse_step` layers, less `mlp_only_layers`."""
    step = reader.count("decoder_sparse_step", 1)
    dense = reader.raw("mlp_only_layers", [])
    return ["sparse" if layer not in dense and (layer + 1) % step == 0 else "dense" for layer in range(layers)]


def moe_frequency(reader: Reader, layers: int) -> list[str]:
    """DeepSeek's: from `first_k_dense_replace` on, one of `moe_layer_freq`; or that is a list of 0 and 1."""
    found = reader.raw("mlp_layer_types")
    if found is not None:
        reader.pass_over("moe_layer_freq", "first_k_dense_replace")  # which are in the list
        return named("mlp_layer_types", same("sparse"), {"dense": "dense", "sparse": "sparse"})(reader, layers)
    frequency = reader.raw("moe_layer_freq", 1)
    if isinstance(frequency, list):
        given = reader.listed("moe_layer_freq", layers) or []
        return ["sparse" if one else "dense" for one in given]
    dense, step = reader.size("first_k_dense_replace", 0), reader.count("moe_layer_freq", 1)
    return ["sparse" if layer >= dense and layer % step == 0 else "dense" for layer in range(layers)]


def windows(otherwise: Kinds | None = None) -> Kinds:
    """`layer_types`, else Qwen's rule: the last layers from `max_window_layers` on slide, if any does."""

    def kinds(reader: Reader, layers: int) -> list[str]:
        if reader.raw("layer_types") is not None or otherwise is not None:
            reader.pass_over("max_window_layers", "use_sliding_window", "sliding_window")  # which is in the list
            names = {
                one: one for one in ("full_attention", "sliding_attention", "chunked_attention", "linear_attention")
            }
            return named("layer_types", otherwise or same("full_attention"), names)(reader, layers)
        slides = reader.flag("use_sliding_window", False) and reader.raw("sliding_window") is not None
        full = reader.size("max_window_layers", layers) if slides else layers
        reader.pass_over("max_window_layers", "sliding_window")
        return ["full_attention" if layer < full else "sliding_attention" for layer in range(layers)]

    return kinds
