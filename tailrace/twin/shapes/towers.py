"""Encoders of images and sounds beside a language model, by what their part of the configuration says.

They are counted apart: they hold weights, and keep nothing of a request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tailrace.twin.shapes.reading import Reader
from tailrace.twin.shapes.rules import Size, sized
from tailrace.twin.shapes.tensors import Part, Tensor, vector

More = Callable[[Reader, int], Iterator[tuple[int, int]]]
"""What is beside the layers: pairs of rows and columns, given the width of the text."""


@dataclass(frozen=True)
class Tower:
    """A transformer's encoder. `bias` of its products, `norm_bias` of its norms; `head_norms`: norms on queries and
    keys of a head; `norms`: norms of a layer; `scales`: vectors of its width in a layer; `more`: what is beside the
    layers."""

    layers: Size = "num_hidden_layers"
    width: Size = "hidden_size"
    inner: Size = "intermediate_size"
    heads: Size = "num_attention_heads"
    gated: bool = False
    bias: bool = True
    norm_bias: bool = True
    norms: int = 2
    head_norms: bool = False
    more: More | None = None
    ignored: tuple[str, ...] = field(default=())

    def tensors(self, reader: Reader, text_width: int) -> Iterator[Tensor]:
        layers, width, inner = (sized(reader, size) for size in (self.layers, self.width, self.inner))
        heads = sized(reader, self.heads)
        reader.pass_over(*self.ignored)
        for name, rows, columns in (("attention.qkv", 3 * width, width), ("attention.proj", width, width)):
            yield from self._product(name, rows, columns, layers)
        into = ("gate", "up") if self.gated else ("fc1",)
        for name in into:
            yield from self._product(f"mlp.{name}", inner, width, layers)
        yield from self._product("mlp.fc2", width, inner, layers)
        norms = self.norms * width * (1 + self.norm_bias) + (2 * (width // heads) if self.head_norms else 0)
        yield vector(Part.VISION, "vision.norms", layers * norms)
        for rows, columns in self.more(reader, text_width) if self.more else ():
            yield Tensor(Part.VISION, "vision.more", rows, columns, rounded=False)

    def _product(self, name: str, rows: int, columns: int, times: int) -> Iterator[Tensor]:
        yield Tensor(Part.VISION, f"vision.{name}", rows, columns, times=times, used=times, rounded=False)
        if self.bias:
            yield vector(Part.VISION, f"vision.{name}.bias", times * rows)


def _qwen3_vl(reader: Reader, text: int) -> Iterator[tuple[int, int]]:
    """Patches, positions, a merger to the text's width, and another for each layer that feeds the text's first ones."""
    width, out = reader.count("hidden_size"), reader.count("out_hidden_size")
    merged = width * reader.count("spatial_merge_size") ** 2
    patch = reader.count("in_channels", 3) * reader.count("temporal_patch_size") * reader.count("patch_size") ** 2
    yield width, patch + 1
    yield reader.count("num_position_embeddings"), width
    deep = reader.raw("deepstack_visual_indexes", [])
    yield 2 * width, 1
    for norm in [0] + [2 * merged] * len(deep):
        yield merged, merged + 1
        yield out, merged + 1
        if norm:
            yield norm, 1


def _qwen2_vl(reader: Reader, text: int) -> Iterator[tuple[int, int]]:
    width = reader.count("embed_dim")
    merged = width * reader.count("spatial_merge_size") ** 2
    patch = (
        reader.count("in_channels|in_chans", 3) * reader.count("temporal_patch_size") * reader.count("patch_size") ** 2
    )
    yield width, patch
    yield 2 * width, 1
    yield merged, merged + 1
    yield reader.count("hidden_size"), merged + 1


def _qwen25_vl(reader: Reader, text: int) -> Iterator[tuple[int, int]]:
    width = reader.count("hidden_size")
    merged = width * reader.count("spatial_merge_size") ** 2
    patch = (
        reader.count("in_channels|in_chans", 3) * reader.count("temporal_patch_size") * reader.count("patch_size") ** 2
    )
    yield width, patch
    yield width, 1
    yield merged, merged + 1
    yield reader.count("out_hidden_size"), merged + 1


def _siglip(reader: Reader, text: int) -> Iterator[tuple[int, int]]:
    """SigLIP and Gemma 3's projection of what it gives."""
    width = reader.count("hidden_size")
    patches = (reader.count("image_size") // reader.count("patch_size")) ** 2
    yield width, 3 * reader.count("patch_size") ** 2 + 1
    yield patches, width
    yield 2 * width, 1
    yield width, text
    yield width, 1


def _pixtral(reader: Reader, text: int) -> Iterator[tuple[int, int]]:
    width = reader.count("hidden_size")
    yield width, reader.count("num_channels", 3) * reader.count("patch_size") ** 2
    yield width, 1


def _mistral3(reader: Reader, text: int) -> Iterator[tuple[int, int]]:
    """Pixtral, and Mistral Small 3's merger of two by two patches."""
    yield from _pixtral(reader, text)
    width = reader.count("hidden_size")
    yield width, 1
    yield width, 4 * width
    yield text, width
    yield text, text


def _llama4(reader: Reader, text: int) -> Iterator[tuple[int, int]]:
    width, patch = reader.count("hidden_size", 1408), reader.count("patch_size", 14)
    patches = (reader.count("image_size", 336) // patch) ** 2 + 1
    between, out = reader.count("projector_input_dim", 4096), reader.count("projector_output_dim", 4096)
    yield width, 3 * patch**2
    yield patches + 1, width
    yield 4 * width, 1
    yield between, reader.count("intermediate_size", 5632)
    yield out, out
    yield text, out


def _gemma4(reader: Reader, text: int) -> Iterator[tuple[int, int]]:
    width = reader.count("hidden_size")
    yield width, 3 * reader.count("patch_size") ** 2
    yield 2 * reader.count("position_embedding_size"), width
    yield text, width


def _kimi(reader: Reader, text: int) -> Iterator[tuple[int, int]]:
    """MoonViT and its merger."""
    width = reader.count("vt_hidden_size")
    merged = width
    for step in reader.raw("merge_kernel_size", [2, 2]):
        merged *= step
    yield width, 3 * reader.count("patch_size") ** 2 + 1
    yield reader.count("init_pos_emb_height") * reader.count("init_pos_emb_width"), width
    yield 2 * width, 1
    yield 2 * reader.count("mm_hidden_size"), 1
    yield merged, merged + 1
    yield reader.count("text_hidden_size"), merged + 1


_QWEN3 = Tower("depth", heads="num_heads", more=_qwen3_vl)

_TOWERS: dict[tuple[str, ...], Tower] = {
    (
        "qwen3_vl",
        "qwen3_vl_moe",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_vl_vision",
        "qwen3_vl_moe_vision",
        "qwen3_5_vision",
        "qwen3_5_moe_vision",
    ): _QWEN3,
    ("qwen2_vl", "qwen2_vl_vision"): Tower("depth", "embed_dim", "embed_dim", "num_heads", more=_qwen2_vl),
    ("qwen2_5_vl", "qwen2_5_vl_vision"): Tower(
        "depth",
        heads="num_heads",
        gated=True,
        norm_bias=False,
        more=_qwen25_vl,
        ignored=("window_size", "fullatt_block_indexes", "spatial_patch_size", "in_channels"),
    ),
    ("siglip_vision_model", "gemma3"): Tower(
        more=_siglip, ignored=("num_channels", "vision_use_head", "num_image_tokens", "projection_dim")
    ),
    ("pixtral", "mistral3"): Tower(
        gated=True, bias=False, norm_bias=False, more=_mistral3, ignored=("image_size", "head_dim")
    ),
    ("llama4_vision_model", "llama4"): Tower(
        "num_hidden_layers=34",
        "hidden_size=1408",
        "intermediate_size=5632",
        "num_attention_heads=16",
        more=_llama4,
        ignored=(
            "vision_output_dim",
            "pixel_shuffle_ratio",
            "num_channels",
            "projector_dropout",
            "vision_feature_layer",
            "vision_feature_select_strategy",
            "rope_theta",
            "multi_modal_projector_bias",
        ),
    ),
    ("gemma4_vision", "gemma4"): Tower(
        gated=True,
        bias=False,
        norm_bias=False,
        norms=4,
        head_norms=True,
        more=_gemma4,
        ignored=(
            "attention_bias",
            "global_head_dim",
            "head_dim",
            "num_key_value_heads",
            "pooling_kernel_size",
            "standardize",
            "use_clipped_linears",
            "default_output_length",
        ),
    ),
    ("kimi_k25", "kimi_k25_vision"): Tower(
        "vt_num_hidden_layers",
        "vt_hidden_size",
        "vt_intermediate_size",
        "vt_num_attention_heads",
        more=_kimi,
        ignored=(
            "init_pos_emb_time",
            "merge_type",
            "mm_projector_type",
            "pos_emb_type",
            "projector_hidden_act",
            "projector_ln_eps",
            "video_attn_type",
        ),
    ),
}
TOWERS: dict[str, Tower] = {name: tower for names, tower in _TOWERS.items() for name in names}
"""By the `model_type` of the vision's configuration, or by that of the whole where it has none of its own."""
