"""What is declared of a family of models, and how that makes a model of its configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tailrace.twin.shapes.kinds import Kinds, same
from tailrace.twin.shapes.parts import Layer
from tailrace.twin.shapes.reading import Reader
from tailrace.twin.shapes.rules import HIDDEN, LAYERS, FeedRule, MixerRule, Switch, switched
from tailrace.twin.shapes.tensors import Part, Split, Tensor, vector

Extra = Callable[[Reader, int], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Family:
    """Models that share their rules.

    `mixers` and `feeds` name the kinds of layers; `mixer_kinds` and `feed_kinds` say which layer is which. A kind
    with several mixers has them side by side; one that neither names has nothing there. `norms`: norms of the model's
    width in a layer with both, `norm_bias`: they have biases (LayerNorm). `tied`: what the architecture takes where
    the file does not say. `more` are tensors of a layer, `top` of the model. `ignored`: fields that do not matter
    here although they may elsewhere; `defaults`: sizes that files leave out where they are the architecture's own;
    `fixed`: those that may only say this, since anything else is another model. `single_norms`: norms of a layer that
    has only one of the two parts. `mtp`: the field with the number of layers that predict a token further and are
    like the last one, behind a projection of two inputs (DeepSeek-V3, section 2.2).
    """

    types: tuple[str, ...]
    mixers: Mapping[str, tuple[MixerRule, ...] | MixerRule]
    feeds: Mapping[str, FeedRule | None]
    mixer_kinds: Kinds = field(default_factory=lambda: same("full_attention"))
    feed_kinds: Kinds = field(default_factory=lambda: same("dense"))
    norms: int = 2
    single_norms: int = 1
    norm_bias: Switch = False
    final_norm: bool = True
    tied: bool = False
    head: bool = True
    head_bias: Switch = False
    layers: Callable[[Reader], int] | str = LAYERS
    more: Callable[[Reader, int, int, str], tuple[Tensor, ...]] | None = None
    top: Extra | None = None
    mtp: str = ""
    ignored: tuple[str, ...] = ()
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    defaults: Mapping[str, int] = field(default_factory=dict)

    def stack(self, reader: Reader) -> tuple[Layer, ...]:
        """The layers. Raises ModelError for a field that is missing, wrong or not understood."""
        for name, value in self.defaults.items():
            if reader.raw(name) is None:
                reader.values[name] = reader.take(name, value)
        layers, hidden = self._count(reader), reader.count(HIDDEN)
        for name, allowed in self.fixed.items():
            reader.only(name, *allowed)
        mixer_kinds, feed_kinds = self.mixer_kinds(reader, layers), self.feed_kinds(reader, layers)
        width = hidden * (1 + switched(reader, self.norm_bias))
        reader.pass_over(*self.ignored)
        made: list[Layer] = []
        for index in range(layers):
            reader.enter(index)
            mixers = tuple(rule(reader, index, layers) for rule in self._mixers(reader, mixer_kinds[index]))
            rule = self._feed(reader, feed_kinds[index])
            feed = rule(reader, index, layers) if rule else None
            norms = self.norms if mixers and feed else self.single_norms
            more = self.more(reader, index, layers, mixer_kinds[index]) if self.more else ()
            made.append(Layer(mixers, feed, norms * width, more))
        reader.leave()
        return tuple(made)

    def _count(self, reader: Reader) -> int:
        if isinstance(self.layers, str):
            return reader.count(self.layers, most=100_000)
        return self.layers(reader)

    def outside(self, reader: Reader) -> tuple[Tensor, ...]:
        """Embedding, head, last norm, and what else is not in a layer."""
        vocab, hidden = reader.count("vocab_size"), reader.count(HIDDEN)
        tied = reader.flag("tie_word_embeddings", self.tied)
        if reader.raw("tie_word_embeddings") is None:
            reader.take("tie_word_embeddings", self.tied)
        made = [Tensor(Part.EMBEDDING, "embed_tokens", vocab, hidden, Split.VOCAB, rounded=False, looked_up=not tied)]
        if not tied and self.head:
            made.append(Tensor(Part.HEAD, "lm_head", vocab, hidden, Split.VOCAB, rounded=False))
        if switched(reader, self.head_bias):
            made.append(vector(Part.HEAD, "lm_head.bias", vocab, Split.VOCAB))
        if self.final_norm:
            made.append(vector(Part.NORM, "norm", hidden * (1 + switched(reader, self.norm_bias))))
        return (*made, *(self.top(reader, hidden) if self.top else ()))

    def _mixers(self, reader: Reader, kind: str) -> tuple[MixerRule, ...]:
        if kind not in self.mixers:
            raise reader.refuse("layer_types", f"has {kind[:40]!r}; known here are {', '.join(self.mixers)}")
        found = self.mixers[kind]
        return found if isinstance(found, tuple) else (found,)

    def _feed(self, reader: Reader, kind: str) -> FeedRule | None:
        if kind not in self.feeds:
            raise reader.refuse("mlp_layer_types", f"has {kind[:40]!r}; known here are {', '.join(self.feeds)}")
        return self.feeds[kind]
