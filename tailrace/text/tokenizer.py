"""`Text`: a model's tokenizer and chat template, text to ids and back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tailrace.terms import InvalidInput, ModelError
from tailrace.text.bounds import TokenBounds
from tailrace.text.detokenize import decode
from tailrace.text.guard import Control, Controls, looks_like_markup
from tailrace.text.infill import Infill, find
from tailrace.text.template import ChatTemplate, Rendered
from tailrace.text.tokens import TokenBytes

if TYPE_CHECKING:
    from tokenizers import AddedToken, Encoding, Tokenizer

    from tailrace.models.checkpoint import TextAssets
    from tailrace.text.answer.formats import Layout, ReasoningFormat, ToolFormat
    from tailrace.text.answer.reasoning import Opened

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGGED = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "CohereTokenizer")
"""Classes that honour add_bos_token and add_eos_token of tokenizer_config.json."""
TAIL_IDS = 24
"""Ids at a prompt's end that the tag of its reasoning is looked for in."""
_SHORT = 4000
"""Characters that are encoded in a few milliseconds."""


def load_text(assets: TextAssets, *, vocab: int, token_bytes: TokenBytes | None = None) -> Text:
    """Builds a model's `Text`. `vocab` is the number of rows of the model's output; `token_bytes` is a table saved
    earlier, where there is one. Raises `ModelError` for a tokenizer that cannot be had exactly."""
    config = assets.tokenizer_config
    data = assets.tokenizer_json
    if data is None:
        if assets.gguf is None:
            raise ModelError("the model has no tokenizer: tokenizer.json is missing")
        from tailrace.text.gguf import tokenizer_config_from_gguf, tokenizer_json_from_gguf

        data = tokenizer_json_from_gguf(assets.gguf)
        config = {**tokenizer_config_from_gguf(assets.gguf), **config}
    return Text(data, config, assets, vocab=vocab, token_bytes=token_bytes)


@dataclass(frozen=True)
class PairForm:
    """A pair of texts: `prefix`, the first text, `middle`, the second one, `suffix`. `told_apart`: the second text and
    what follows it are of segment 1."""

    prefix: tuple[int, ...]
    middle: tuple[int, ...]
    suffix: tuple[int, ...]
    told_apart: bool

    @property
    def size(self) -> int:
        """Tokens besides the texts'."""
        return len(self.prefix) + len(self.middle) + len(self.suffix)


class Text:
    """A model's tokenizer and chat template. All methods may be called from several threads at once.

    Text from callers never becomes a control token: neither a special token such as `<|im_end|>` nor markup such as
    `<tool_call>` that the tokenizer holds as one token.
    """

    def __init__(
        self,
        data: bytes,
        config: Mapping[str, Any],
        assets: TextAssets,
        *,
        vocab: int,
        token_bytes: TokenBytes | None = None,
    ) -> None:
        self._data: bytes | None = data
        self._rows = vocab
        self._table = token_bytes
        self._full = _load(data, config)
        added = self._full.get_added_tokens_decoder()
        self._controls = Controls(_controls(added))
        self._reserved = self._controls.by_id.keys() - _unknown(self._full, config)
        self._plain = _plain(self._full, added, self._full.pre_tokenizer)
        self._rest: Tokenizer | None = None
        self._bounds: TokenBounds | None = None
        self._layouts: dict[ToolFormat, Layout] = {}
        self.eos_ids = tuple(assets.eos_ids)
        self._prefix, self._suffix = self._affixes(config, assets)
        self.infill: Infill | None = find(config, self._full.token_to_id)
        names = _names(config, assets, self._full)
        templates = _templates(assets.chat_template, config)
        self._templates = {name: ChatTemplate(text, names, self._controls) for name, text in templates.items()}

    @property
    def vocab_size(self) -> int:
        """Ids below this are tokens; ids from here on are rows that pad the model and must never be sampled."""
        return min(len(self.token_bytes()), self._rows)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    @property
    def supports_tools(self) -> bool:
        """Whether the chat template looks at tools; where it does not, a model never learns of them."""
        return any(template.supports_tools for template in self._templates.values())

    @cached_property
    def template_variables(self) -> frozenset[str]:
        """What the chat templates look up besides what every conversation has: names that callers may set."""
        return frozenset().union(*(template.variables for template in self._templates.values()))

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        """The format of tool calls that the chat template lays out, found by rendering one; None where it shows none,
        or one that no parser knows."""
        from tailrace.text.answer import choose

        return choose.tool_format(self._probe) if self.supports_tools else None

    @cached_property
    def short_call_ids(self) -> bool:
        """Whether the chat template refuses ids of tool calls that have not nine letters and digits."""
        from tailrace.text.answer import choose

        return self.supports_tools and choose.wants_short_ids(self._probe)

    @cached_property
    def reasoning_format(self) -> ReasoningFormat | None:
        """The tags of reasoning that the chat template names; None where it names none."""
        from tailrace.text.answer import choose

        return choose.reasoning_format(template.source for template in self._templates.values())

    def _probe(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], generation: bool
    ) -> Rendered:
        return self.render_chat(messages, add_generation_prompt=generation, tools=tools)

    def tool_layout(self, form: ToolFormat) -> Layout:
        """How the model writes calls in this format, to the letter."""
        from tailrace.text.answer import choose

        if form not in self._layouts:
            self._layouts[form] = choose.tool_layout(self._probe, form)
        return self._layouts[form]

    def control_tags(self, texts: Iterable[str]) -> dict[str, int]:
        """Those of these texts that are control tokens, which produce no text by themselves, with their ids."""
        found = ((text, self._controls.by_text.get(text)) for text in texts)
        return {text: control.id for text, control in found if control is not None and control.special}

    def tag_id(self, text: str) -> int | None:
        """The id of the one token that this tag is for the model, whether it produces text or not; None where it is
        spelled."""
        control = self._controls.by_text.get(text)
        return None if control is None else control.id

    def reasoning_opened(self, prompt: Sequence[int], form: ReasoningFormat) -> Opened:
        """What a prompt's end says of the reasoning."""
        from tailrace.text.answer.reasoning import Opened

        tail = decode(self.token_bytes(), prompt[-TAIL_IDS:], skip_special=False, start=False).rstrip()
        if tail.endswith(form.opener):
            return Opened.OPEN
        return Opened.CLOSED if tail.endswith(form.closer) else Opened.NO

    def token_bytes(self) -> TokenBytes:
        """What each id spells; built on first use unless given."""
        if self._table is None:
            assert self._data is not None
            self._table = TokenBytes.from_tokenizer(json.loads(self._data))
            self._data = None
        return self._table

    def warm(self) -> None:
        """Does now what the first requests would do otherwise: imports and compiles the chat template."""
        self.token_bytes()
        for template in self._templates.values():
            template.warm()

    def encode(self, text: str, *, add_bos: bool = True, parse_special: bool = False) -> list[int]:
        """Ids of a prompt. With `add_bos`, what the tokenizer puts around a text (BOS, and EOS where it says so) is
        added; a prompt that already begins with the BOS text then gets one BOS, not two. Control tokens spelled in
        the text are ordinary text unless `parse_special`."""
        prefix, suffix = (self._prefix, self._suffix) if add_bos else ([], [])
        if prefix and prefix[0] in self._controls.by_id:
            text = text.removeprefix(self._controls.by_id[prefix[0]].text)
        ids = _encode(self._full, text).ids if parse_special else self._ordinary(text)
        return self._checked([*prefix, *ids, *suffix])

    def encode_infill(self, before: str, after: str) -> list[int]:
        """Ids of a prompt whose answer stands between the two texts. Nothing in them is a control token. Raises
        `InvalidInput` where the model has no tokens for that."""
        if self.infill is None:
            raise InvalidInput("the model has no tokens for fill-in-the-middle", param="suffix")
        first, second = self._ordinary(before), self._ordinary(after, first=False)
        ids = [*self._prefix, self.infill.prefix, *first, self.infill.suffix, *second, self.infill.middle]
        return self._checked(ids)

    @cached_property
    def pair_form(self) -> PairForm:
        """What the tokenizer puts around the two texts of a pair. Raises `ModelError` where it takes none apart."""
        bare = self._full.encode("a", add_special_tokens=False).ids
        both = self._full.encode("a", "a", add_special_tokens=True)
        at = [n for n in range(len(both.ids)) if both.ids[n : n + len(bare)] == bare]
        if len(at) < 2:
            raise ModelError("the tokenizer has no form for pairs of texts")
        first, second, size = at[0], at[-1], len(bare)
        ids = both.ids
        return PairForm(
            tuple(ids[:first]), tuple(ids[first + size : second]), tuple(ids[second + size :]), any(both.type_ids)
        )

    def encode_inside(self, text: str) -> list[int]:
        """Ids of text that goes on from other text; nothing in it is a control token."""
        return self._ordinary(text, first=False)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Ids of a conversation as the model's chat template lays it out. Only the template decides about BOS. Equal
        to Hugging Face's `apply_chat_template` unless callers spell control tokens: those stay ordinary text. Raises
        `InvalidInput` when the template objects or the model has none."""
        rendered = self.render_chat(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, template_args=template_args
        )
        encoding = _encode(self._full, rendered.text)
        if self._as_written(encoding, rendered):
            return self._checked(encoding.ids)
        return self._checked(self._apart(rendered))

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """The text that `encode_chat` encodes, and where the template's own control tokens are in it."""
        if not self._templates:
            raise InvalidInput(
                "the model has no chat template: use /v1/completions with a prompt of your own", param="messages"
            )
        template = self._templates["default"]
        if tools is not None:
            template = self._templates.get("tool_use", template)
        return template.render(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, arguments=template_args or {}
        )

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of ids; bytes that are no UTF-8 become U+FFFD, ids that pad the vocabulary nothing."""
        return decode(self.token_bytes(), ids, skip_special=skip_special)

    def min_tokens(self, text: str) -> int:
        """A number of tokens that `encode` cannot stay below, found in milliseconds without tokenizing; 0 where
        nothing is known of the tokenizer."""
        if self._bounds is None:
            self._bounds = TokenBounds(self._plain, self.token_bytes())
        return self._bounds.min_tokens(text)

    @property
    def affixes(self) -> tuple[list[int], list[int]]:
        """The ids that belong before and after every text."""
        return list(self._prefix), list(self._suffix)

    def _affixes(self, config: Mapping[str, Any], assets: TextAssets) -> tuple[list[int], list[int]]:
        """The ids that belong before and after every prompt."""
        bare = self._full.encode("a", add_special_tokens=False).ids
        whole = self._full.encode("a", add_special_tokens=True).ids
        at = next((at for at in range(len(whole)) if whole[at : at + len(bare)] == bare), 0)
        prefix, suffix = whole[:at], whole[at + len(bare) :]
        add_bos = assets.add_bos
        if add_bos is None and str(config.get("tokenizer_class", "")).removesuffix("Fast") in _FLAGGED:
            add_bos = config.get("add_bos_token")
        bos = assets.bos_id
        if add_bos is None or bos is None:
            return prefix, suffix
        others = [token for token in prefix if token != bos]
        return ([bos, *others] if add_bos else others), suffix

    def _ordinary(self, text: str, *, first: bool = True) -> list[int]:
        """Ids of text in which nothing is a control token. `first`: it is the beginning of the whole."""
        tokenizer = self._plain if first else self._continued()
        ids: list[int] = _encode(tokenizer, text).ids
        if self._reserved.isdisjoint(ids):
            return ids
        # The vocabulary itself holds the text of a control token as a word: keep the word from forming by encoding
        # its first character apart.
        ids = []
        at = 0
        for start, _, _ in self._controls.find(text):
            ids += _encode(tokenizer, text[at : start + 1]).ids
            tokenizer, at = self._continued(), start + 1
        ids += _encode(tokenizer, text[at:]).ids
        if not self._reserved.isdisjoint(ids):
            raise InvalidInput("the text spells a control token that this tokenizer cannot express as ordinary text")
        return ids

    def _continued(self) -> Tokenizer:
        """The tokenizer of ordinary text that does not begin a text."""
        if self._rest is None:
            self._rest = _without_first_space(self._plain)
        return self._rest

    def _as_written(self, encoding: Encoding, rendered: Rendered) -> bool:
        """Whether the encoding's control tokens are those that the template wrote, each in its place."""
        by_id = self._controls.by_id
        ids = encoding.ids  # copied from the library: once
        places = [at for at, token in enumerate(ids) if token in by_id]
        if len(places) != len(rendered.controls):
            return False
        for at, (start, end, control) in zip(places, rendered.controls, strict=True):
            span = encoding.token_to_chars(at)
            if ids[at] != control.id or span is None or span[0] > start or span[1] < end:
                return False
        return True

    def _apart(self, rendered: Rendered) -> list[int]:
        """Encodes the template's control tokens as such and everything between them as ordinary text."""
        ids: list[int] = []
        at = 0
        swallow = False
        for start, end, control in (*rendered.controls, (len(rendered.text), len(rendered.text), None)):
            stretch = rendered.text[at:start]
            stretch = stretch.lstrip() if swallow else stretch
            if control is not None and control.lstrip:
                stretch = stretch.rstrip()
            if stretch:
                ids += self._ordinary(stretch, first=at == 0)
            if control is not None:
                ids.append(control.id)
                swallow = control.rstrip
            at = end
        return ids

    def _checked(self, ids: list[int]) -> list[int]:
        if ids and max(ids) >= self._rows:
            raise InvalidInput(f"the text has a token ({max(ids)}) that the model has no row for ({self._rows} rows)")
        return ids


def _encode(tokenizer: Tokenizer, text: str) -> Encoding:
    """Encodes what is there, adding nothing. `encode` may hold the interpreter lock all along, seconds for a megabyte;
    `encode_batch` does not, but takes a little longer to begin."""
    if len(text) <= _SHORT:
        return tokenizer.encode(text, add_special_tokens=False)
    return tokenizer.encode_batch([text], add_special_tokens=False)[0]


def _load(data: bytes, config: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer as Hugging Face sets it up: special tokens of the configuration added, nothing cut or padded."""
    import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(data)
    except Exception as error:
        raise ModelError(f"tokenizer.json cannot be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for index, entry in sorted((int(key), entry) for key, entry in config.get("added_tokens_decoder", {}).items()):
        if entry["content"] not in known:
            flags = {key: bool(entry[key]) for key in ("single_word", "lstrip", "rstrip", "normalized") if key in entry}
            _add(tokenizer, tokenizers.AddedToken(entry["content"], special=bool(entry.get("special")), **flags), index)
            known.add(entry["content"])
    for name in _NAMED:
        text = _token_text(config.get(name))
        if text is not None and text not in known and tokenizer.token_to_id(text) is not None:
            tokenizer.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False)])
            known.add(text)
    return tokenizer


def _unknown(tokenizer: Tokenizer, config: Mapping[str, Any]) -> frozenset[int]:
    """The id that stands for what the vocabulary lacks, where text may well have such: it controls nothing."""
    if type(tokenizer.model).__name__ not in ("WordPiece", "Unigram"):
        return frozenset()
    text = getattr(tokenizer.model, "unk_token", None) or _token_text(config.get("unk_token")) or "<unk>"
    found = tokenizer.token_to_id(text)
    return frozenset() if found is None else frozenset((found,))


def _add(tokenizer: Tokenizer, token: AddedToken, index: int) -> None:
    (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
    if tokenizer.token_to_id(token.content) != index:
        raise ModelError(f"tokenizer_config.json: the added token {token.content!r} cannot have the id {index}")


def _controls(added: Mapping[int, AddedToken]) -> Iterable[Control]:
    for index, token in added.items():
        if token.special or looks_like_markup(token.content):
            yield Control(index, token.content, token.special, token.lstrip, token.rstrip)


def _plain(full: Tokenizer, added: Mapping[int, AddedToken], pre_tokenizer: Any) -> Tokenizer:
    """A tokenizer on the same vocabulary that finds no control tokens in text. It shares the model: costs nothing."""
    import tokenizers

    plain = tokenizers.Tokenizer(full.model)
    if full.normalizer is not None:
        plain.normalizer = full.normalizer
    if pre_tokenizer is not None:
        plain.pre_tokenizer = pre_tokenizer
    for _, token in sorted(added.items()):
        if token.special or looks_like_markup(token.content):
            plain.add_special_tokens([token])
        else:
            plain.add_tokens([token])
    plain.encode_special_tokens = True
    return plain


def _without_first_space(plain: Tokenizer) -> Tokenizer:
    """The same tokenizer, but a text's beginning is not treated as the beginning of a prompt (Metaspace's "first")."""
    import tokenizers

    before = b"null" if plain.pre_tokenizer is None else plain.pre_tokenizer.__getstate__()
    changed = json.loads(before, object_hook=_never_first)
    if changed == json.loads(before):
        return plain
    stub = {"version": "1.0", "pre_tokenizer": changed, "model": {"type": "BPE", "vocab": {}, "merges": []}}
    rest = tokenizers.Tokenizer.from_str(json.dumps(stub))
    return _plain(plain, plain.get_added_tokens_decoder(), rest.pre_tokenizer)


def _never_first(node: dict[str, Any]) -> dict[str, Any]:
    return {**node, "prepend_scheme": "never"} if node.get("prepend_scheme") == "first" else node


def _token_text(entry: Any) -> str | None:
    text = entry.get("content") if isinstance(entry, Mapping) else entry
    return text if isinstance(text, str) else None


def _names(config: Mapping[str, Any], assets: TextAssets, tokenizer: Tokenizer) -> dict[str, Any]:
    """The variables that templates may name: the special tokens by their roles."""
    names: dict[str, Any] = {}
    for index, name in ((assets.bos_id, "bos_token"), (next(iter(assets.eos_ids), None), "eos_token")):
        text = None if index is None else tokenizer.id_to_token(index)
        if text is not None:
            names[name] = text
    for name in _NAMED:
        text = _token_text(config.get(name))
        if text is not None:
            names[name] = text
    additional = config.get("additional_special_tokens")
    if isinstance(additional, list):
        names["additional_special_tokens"] = [text for text in map(_token_text, additional) if text is not None]
    return names


def _templates(template: str | None, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name; the one called "default" is used unless tools are given and one is called "tool_use"."""
    given = template if template is not None else config.get("chat_template")
    if isinstance(given, str):
        return {"default": given}
    if isinstance(given, list):
        named = {str(entry["name"]): str(entry["template"]) for entry in given if isinstance(entry, Mapping)}
        if named and "default" not in named:
            named["default"] = next(iter(named.values()))
        return named
    return {}
