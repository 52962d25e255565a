"""A decoder without its output head: what it gives is the last layer's rows, normed (`backends.pooled`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tailrace.backends import Attention, Ops, T, Weight
from tailrace.models.decoder import Model


@dataclass(frozen=True, eq=False)
class HiddenModel:
    """`backends.Forward` whose "vocabulary" is the width of the model."""

    model: Model

    @property
    def attentions(self) -> tuple[Attention, ...]:
        return self.model.attentions

    @property
    def variant(self) -> str:
        """As `Model.variant`: without the head there are fewer matrices, unless it is the embedding."""
        model = self.model
        return model.variant if model.config.tied else f"{model.variant}-hidden".removeprefix("-")

    @property
    def hidden(self) -> int:
        return self.model.hidden

    @property
    def vocab(self) -> int:
        return self.model.hidden

    def forward(self, ops: Ops[T]) -> T:
        """Rows after the last norm, of the wanted tokens: [wanted, hidden]."""
        model = self.model
        x = ops.embed(model.embedding)
        for layer in model.layers:
            x = model.layer_forward(ops, x, layer, model)
        return ops.rms_norm(ops.wanted(x), model.norm, model.config.rms_eps)

    def weights(self) -> Iterator[Weight]:
        """Every weight once but the head."""
        yield self.model.embedding
        for layer in self.model.layers:
            yield from layer.weights()
        yield self.model.norm
