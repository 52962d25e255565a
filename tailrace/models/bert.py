"""BERT and what shares its layers: RoBERTa and XLM-RoBERTa, which count positions from after their padding.

An embedding model (`BertModel`) gives one pooled row a text; a cross-encoder (`...ForSequenceClassification`) reads a
pair of texts and gives a score. Devlin et al. 2018, Liu et al. 2019.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tailrace.backends import Weight
from tailrace.backends.encoding import EncoderOps, Pooling
from tailrace.models.checkpoint import Checkpoint
from tailrace.models.decoder import MAX_LAYERS, Binder
from tailrace.models.fields import Fields
from tailrace.models.pooling import Output
from tailrace.terms import ModelError

CLASSES = {
    "bert": ("BertModel", "BertForMaskedLM", "BertForSequenceClassification"),
    "roberta": ("RobertaModel", "RobertaForMaskedLM", "RobertaForSequenceClassification"),
    "xlm-roberta": ("XLMRobertaModel", "XLMRobertaForMaskedLM", "XLMRobertaForSequenceClassification"),
}
FOREIGN = ("quantization_config", "is_decoder", "add_cross_attention", "is_encoder_decoder", "auto_map")
UNUSED = ("cls.", "lm_head.", "pooler.", "embeddings.position_ids")
"""Beginnings of names of tensors that an embedding does not need: heads of the training, and a table of numbers."""


@dataclass(frozen=True)
class EncoderConfig:
    """The shape of an encoder. `longest` is in tokens; `first` is the position of a text's first token in the table.
    `labels` are the classifier's outputs, 0 where it is an embedding model; `sigmoid`: they are turned into 0..1."""

    model_type: str
    layers: int
    hidden: int
    heads: int
    intermediate: int
    vocab: int
    kinds: int
    positions: int
    first: int
    eps: float
    labels: int
    sigmoid: bool
    output: Output

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def longest(self) -> int:
        most = self.positions - self.first
        return most if self.output.longest is None else min(most, self.output.longest)


@dataclass(frozen=True, eq=False)
class EncoderLayer:
    """One layer's weights, in the order in which they are used."""

    q: Weight
    q_bias: Weight
    k: Weight
    k_bias: Weight
    v: Weight
    v_bias: Weight
    o: Weight
    o_bias: Weight
    attention_norm: Weight
    attention_norm_bias: Weight
    up: Weight
    up_bias: Weight
    down: Weight
    down_bias: Weight
    output_norm: Weight
    output_norm_bias: Weight

    def weights(self) -> Iterator[Weight]:
        for name in self.__dataclass_fields__:
            yield getattr(self, name)


@dataclass(frozen=True, eq=False)
class Classifier:
    """What turns the first row into scores: out(tanh(dense(row)))."""

    dense: Weight
    dense_bias: Weight
    out: Weight
    out_bias: Weight


@dataclass(frozen=True, eq=False)
class EncoderModel:
    """An encoder ready to run: `backends.encoding.Encoding`."""

    config: EncoderConfig
    words: Weight
    positions: Weight
    segments: Weight
    norm: Weight
    norm_bias: Weight
    layers: tuple[EncoderLayer, ...]
    classifier: Classifier | None

    @property
    def width(self) -> int:
        return self.config.labels or self.config.hidden

    @property
    def vocab(self) -> int:
        return self.config.vocab

    @property
    def kinds(self) -> int:
        return self.config.kinds

    @property
    def longest(self) -> int:
        return self.config.longest

    def forward(self, ops: EncoderOps[Any]) -> Any:
        """An embedding or the classifier's raw scores: [texts, width]."""
        config = self.config
        x = ops.embed(self.words, self.positions, self.segments, config.first)
        x = ops.layer_norm(x, self.norm, self.norm_bias, config.eps)
        for layer in self.layers:
            x = layer_forward(ops, x, layer, config)
        head = self.classifier
        if head is None:
            pooled = ops.pool(x, config.output.pooling)
            return ops.unit(pooled) if config.output.unit else pooled
        row = ops.tanh(ops.linear(ops.pool(x, "cls"), head.dense, head.dense_bias))
        return ops.linear(row, head.out, head.out_bias)

    def weights(self) -> Iterator[Weight]:
        """Every weight once, in a fixed order."""
        yield from (self.words, self.positions, self.segments, self.norm, self.norm_bias)
        for layer in self.layers:
            yield from layer.weights()
        if self.classifier is not None:
            yield from vars(self.classifier).values()


def layer_forward(ops: EncoderOps[Any], x: Any, layer: EncoderLayer, config: EncoderConfig) -> Any:
    """Attention, then a feed-forward network; each is added to its input and the sum normed (post-norm)."""
    q = ops.linear(x, layer.q, layer.q_bias)
    k = ops.linear(x, layer.k, layer.k_bias)
    v = ops.linear(x, layer.v, layer.v_bias)
    mixed = ops.attention(q, k, v, config.heads, config.head_dim**-0.5)
    x = ops.add(ops.linear(mixed, layer.o, layer.o_bias), x)
    x = ops.layer_norm(x, layer.attention_norm, layer.attention_norm_bias, config.eps)
    inner = ops.gelu(ops.linear(x, layer.up, layer.up_bias))
    x = ops.add(ops.linear(inner, layer.down, layer.down_bias), x)
    return ops.layer_norm(x, layer.output_norm, layer.output_norm_bias, config.eps)


def configure(fields: Fields, output: Output) -> EncoderConfig:
    """The shape that the configuration describes. Raises ModelError for what is missing, wrong or not supported."""
    kind = fields.text("model_type")
    classes = CLASSES[kind]
    fields.absent(FOREIGN)
    fields.only("hidden_act", "gelu")
    fields.only("position_embedding_type", "absolute")
    listed = fields.values.get("architectures") or [classes[0]]
    if not isinstance(listed, list) or len(listed) != 1 or listed[0] not in classes:
        raise fields.refuse("architectures", f"is {str(listed)[:80]}; expected {' or '.join(classes)}")
    classifies = str(listed[0]).endswith("ForSequenceClassification")
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    if hidden % heads:
        raise fields.refuse("hidden_size", f"is {hidden}, not a multiple of num_attention_heads, {heads}")
    positions = fields.count("max_position_embeddings")
    first = 0
    if kind != "bert":
        padding = fields.values.get("pad_token_id", 1)
        if type(padding) is not int or not 0 <= padding < positions - 1:
            raise fields.refuse("pad_token_id", f"is {str(padding)[:40]}; expected a token id")
        first = padding + 1
    labels = _labels(fields) if classifies else 0
    return EncoderConfig(
        model_type=kind,
        layers=fields.count("num_hidden_layers", most=MAX_LAYERS),
        hidden=hidden,
        heads=heads,
        intermediate=fields.count("intermediate_size"),
        vocab=fields.count("vocab_size"),
        kinds=fields.count("type_vocab_size", 2),
        positions=positions,
        first=first,
        eps=fields.number("layer_norm_eps", 1e-12),
        labels=labels,
        sigmoid=labels == 1 and _sigmoid(fields),
        output=output,
    )


def _labels(fields: Fields) -> int:
    named = fields.values.get("id2label")
    if isinstance(named, dict) and named:
        return len(named)
    return fields.count("num_labels", 2)


def _sigmoid(fields: Fields) -> bool:
    """Whether scores are turned into 0..1: sentence-transformers does so unless the configuration says "Identity"."""
    own = fields.values.get("sentence_transformers")
    told = own.get("activation_fn") if isinstance(own, dict) else None
    field = "sentence_transformers" if told is not None else "sbert_ce_default_activation_function"
    told = fields.values.get(field) if told is None else told
    name = "Sigmoid" if told is None else str(told).rpartition(".")[2]
    if name not in ("Sigmoid", "Identity"):
        raise fields.refuse(field, f"names the activation {name[:60]}; supported are Sigmoid and Identity")
    return name == "Sigmoid"


def bind(checkpoint: Checkpoint, config: EncoderConfig) -> EncoderModel:
    """Binds the checkpoint's weights. Raises ModelError naming the tensor that is missing or wrong."""
    prefix = _prefix(checkpoint, config.model_type)
    binder = Binder(checkpoint)
    hidden, take = config.hidden, binder.take
    table = prefix + "embeddings."
    model = EncoderModel(
        config=config,
        words=take(table + "word_embeddings.weight", config.vocab, hidden),
        positions=take(table + "position_embeddings.weight", config.positions, hidden),
        segments=take(table + "token_type_embeddings.weight", config.kinds, hidden),
        norm=take(table + "LayerNorm.weight", hidden),
        norm_bias=take(table + "LayerNorm.bias", hidden),
        layers=tuple(_layer(binder, config, f"{prefix}encoder.layer.{index}.") for index in range(config.layers)),
        classifier=_classifier(binder, config, prefix) if config.labels else None,
    )
    binder.finish(tuple(start for name in UNUSED for start in (name, prefix + name)))
    return model


def _prefix(checkpoint: Checkpoint, kind: str) -> str:
    """What a checkpoint of a model with a head puts before the encoder's names."""
    name = "bert." if kind == "bert" else "roberta."
    return name if any(tensor.startswith(name) for tensor in checkpoint.tensors) else ""


def _layer(binder: Binder, config: EncoderConfig, prefix: str) -> EncoderLayer:
    hidden, inner, take = config.hidden, config.intermediate, binder.take
    attention, output = prefix + "attention.", prefix + "output."
    return EncoderLayer(
        q=take(attention + "self.query.weight", hidden, hidden),
        q_bias=take(attention + "self.query.bias", hidden),
        k=take(attention + "self.key.weight", hidden, hidden),
        k_bias=take(attention + "self.key.bias", hidden),
        v=take(attention + "self.value.weight", hidden, hidden),
        v_bias=take(attention + "self.value.bias", hidden),
        o=take(attention + "output.dense.weight", hidden, hidden),
        o_bias=take(attention + "output.dense.bias", hidden),
        attention_norm=take(attention + "output.LayerNorm.weight", hidden),
        attention_norm_bias=take(attention + "output.LayerNorm.bias", hidden),
        up=take(prefix + "intermediate.dense.weight", inner, hidden),
        up_bias=take(prefix + "intermediate.dense.bias", inner),
        down=take(output + "dense.weight", hidden, inner),
        down_bias=take(output + "dense.bias", hidden),
        output_norm=take(output + "LayerNorm.weight", hidden),
        output_norm_bias=take(output + "LayerNorm.bias", hidden),
    )


def _classifier(binder: Binder, config: EncoderConfig, prefix: str) -> Classifier:
    hidden, labels = config.hidden, config.labels
    dense = f"{prefix}pooler.dense" if config.model_type == "bert" else "classifier.dense"
    out = "classifier" if config.model_type == "bert" else "classifier.out_proj"
    return Classifier(
        dense=binder.take(f"{dense}.weight", hidden, hidden),
        dense_bias=binder.take(f"{dense}.bias", hidden),
        out=binder.take(f"{out}.weight", labels, hidden),
        out_bias=binder.take(f"{out}.bias", labels),
    )


def load(checkpoint: Checkpoint, output: Output) -> EncoderModel:
    """The checkpoint's encoder. Raises ModelError naming the field or tensor that is missing or wrong."""
    if checkpoint.source_format != "safetensors":
        raise ModelError(f"{checkpoint.path}: encoders are read from safetensors, not from {checkpoint.source_format}")
    return bind(checkpoint, configure(Fields(str(checkpoint.path / "config.json"), checkpoint.config), output))


__all__ = ["Classifier", "EncoderConfig", "EncoderLayer", "EncoderModel", "Pooling", "bind", "configure", "load"]
