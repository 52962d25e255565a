"""Makes the golden values beside this file: `python make.py SMOLLM2.gguf` with transformers, torch and sentencepiece.

Small tokenizers are trained here, saved as they are, and used through transformers; SmolLM2's is the one that
transformers builds from the GGUF file, with the pre-tokenizer of the original tokenizer.json put back (single digits
before GPT-2's words): transformers leaves the digits out, and then "  1" has other ids than in the original.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.llama.tokenization_llama import LlamaTokenizer
from transformers.tokenization_utils_base import generate_merges

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
import samples  # noqa: E402

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KINDS: dict[str, dict[str, Any]] = {
    "llama3": {
        "regex": LLAMA3,
        "ignore_merges": True,
        "special": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end_of_text|>"],
        "bos": "<|begin_of_text|>",
        "eos": "<|eot_id|>",
    },
    "qwen": {
        "regex": QWEN2,
        "nfc": True,
        "special": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        "markup": ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"],
        "eos": "<|im_end|>",
    },
    "tekken": {
        "regex": TEKKEN,
        "ignore_merges": True,
        "special": [
            "<unk>",
            "<s>",
            "</s>",
            "[INST]",
            "[/INST]",
            "[TOOLS]",
            "[/TOOLS]",
            "[CALLS]",
            "[RESULT]",
            "[/RESULT]",
        ],
        "bos": "<s>",
        "eos": "</s>",
    },
}


def corpus() -> list[str]:
    licence = (HERE.parents[2] / "LICENSE").read_text()
    return [*licence.splitlines(keepends=True)[:120], *samples.texts(600)]


def byte_level(kind: dict[str, Any]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    if kind.get("nfc"):
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(kind["regex"]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.model.ignore_merges = bool(kind.get("ignore_merges"))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in kind["special"]])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in kind.get("markup", [])])
    if "bos" in kind:
        bos = kind["bos"]
        ids = [(bos, tokenizer.token_to_id(bos))]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=ids
        )
    return tokenizer


def sentencepiece_model() -> tuple[Tokenizer, dict[str, Any], sentencepiece.SentencePieceProcessor]:
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line.strip("\n") for line in corpus() if line.strip() and "\0" not in line]),
        model_writer=out,
        model_type="bpe",
        vocab_size=900,
        byte_fallback=True,
        character_coverage=0.99,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=True,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
    )
    model = sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())
    size = model.get_piece_size()
    tokens = [model.id_to_piece(index) for index in range(size)]
    scores = [model.get_score(index) for index in range(size)]

    def kind(index: int) -> int:
        if model.is_unknown(index):
            return 2
        return 3 if model.is_control(index) else 6 if model.is_byte(index) else 1

    gguf = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [
            *tokens,
            "[INST]",
            "[/INST]",
            "[TOOLS]",
            "[/TOOLS]",
            "[CALLS]",
            "[RESULT]",
            "[/RESULT]",
        ],
        "tokenizer.ggml.scores": [*scores, *[-1000.0] * 7],
        "tokenizer.ggml.token_type": [*map(kind, range(size)), *[3] * 7],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
    }
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = generate_merges(vocab, dict(zip(tokens, scores, strict=True)))
    tokenizer = LlamaTokenizer(vocab=vocab, merges=merges).backend_tokenizer
    # Llama 2's own tokenizer.json has the prefix as a normalizer.
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = None
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    names = ["<unk>", "<s>", "</s>", *gguf["tokenizer.ggml.tokens"][size:]]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in names])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer, gguf, model


def chats(tokenizer: PreTrainedTokenizerFast, names: list[str]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name in names:
        chat = {"add_generation_prompt": True, **samples.CHATS[name]}
        try:
            made[name] = tokenizer.apply_chat_template(chat.pop("messages"), tokenize=True, return_dict=False, **chat)
        except Exception as error:  # noqa: BLE001 - whatever the template raises is the golden value
            made[name] = str(error)
    return made


def dump(name: str, value: Any) -> None:
    (HERE / f"{name}.json").write_text(json.dumps(value, ensure_ascii=True, separators=(",", ":")) + "\n")


def save(name: str, tokenizer: Tokenizer, kind: dict[str, Any], extra: dict[str, Any]) -> None:
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=kind.get("bos"), eos_token=kind["eos"])
    fast.chat_template = samples.TEMPLATES[name]
    special = tuple(token.content for token in tokenizer.get_added_tokens_decoder().values())
    texts = samples.texts(500, special)
    ids = [fast.encode(text) for text in texts]
    value = {
        "tokenizer": json.loads(tokenizer.to_str()),
        "bos": kind.get("bos"),
        "eos": kind["eos"],
        "ids": ids,
        "decoded": [fast.decode(each, skip_special_tokens=True, clean_up_tokenization_spaces=False) for each in ids],
        "chats": chats(fast, list(samples.CHATS)),
        **extra,
    }
    dump(name, value)


def smollm2(path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    texts = samples.texts(1100, samples.SMOLLM_SPECIAL)
    as_built = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    differ = [text for text, one, other in zip(texts, as_built, ids, strict=True) if one != other]
    print(len(texts), "texts;", len(differ), "differ without single digits, such as", differ[:3])
    dump("smollm2", {"ids": ids, "chats": chats(tokenizer, list(samples.SMOLLM_CHATS))})


def main() -> None:
    for name, kind in KINDS.items():
        save(name, byte_level(kind), kind, {})
    tokenizer, gguf, model = sentencepiece_model()
    ordinary = samples.texts(500)
    extra = {"gguf": gguf, "sentencepiece": [model.encode(text) for text in ordinary]}
    save("spm", tokenizer, {"bos": "<s>", "eos": "</s>"}, extra)
    if len(sys.argv) > 1:
        smollm2(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
