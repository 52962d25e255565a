"""What is said of the endpoints that read texts, and of the tokenizer."""

from __future__ import annotations

from tailrace.api import schema, texts
from tailrace.api.reference import answers
from tailrace.api.reference.declare import Endpoint, Parameter, differs, needed, parameters, row
from tailrace.api.reference.generation import KWARGS, MODEL_ROW, PRIORITY, SAY, TOOL, USER_ROW
from tailrace.api.reference.schemas import COUNT, IDS, LIMITS, TEXT, TOOLS, one_or_some

SHARED: dict[str, Parameter] = {
    "model": MODEL_ROW,
    "user": USER_ROW,
    "priority": PRIORITY,
    "truncate_prompt_tokens": row(
        "vLLM's: texts are cut to so many tokens; -1: to what the model reads", -1, {"type": "integer", "minimum": -1}
    ),
}
EMBEDDING: dict[str, Parameter] = {
    **SHARED,
    "model": needed(MODEL_ROW.note, MODEL_ROW.example, TEXT),
    "input": needed(
        f"a text, token ids, or a list of at most {LIMITS.inputs:,} of either",
        "water",
        one_or_some(LIMITS.inputs),
    ),
    "encoding_format": row("", "base64"),
    "dimensions": differs("the model's own number, or one that it was trained to be cut to", 64),
}
RERANKING: dict[str, Parameter] = {
    **SHARED,
    "query": row("", "water"),
    "documents": row(f"texts, or objects with `text`; at most {LIMITS.inputs:,}", ["a wheel", "the old river"]),
    "top_n": row("all where it is absent", 1, COUNT),
    "return_documents": row("false where it is absent", True),
    "max_tokens_per_doc": row("of the document alone", 4, COUNT),
}
SCORING: dict[str, Parameter] = {
    **SHARED,
    "text_1": row("a text, which is compared with all on the right, or as many as there", "water"),
    "text_2": row("", ["a wheel", "the old river"]),
}
TOKENIZING: dict[str, Parameter] = {
    "model": row(MODEL_ROW.note, MODEL_ROW.example),
    "prompt": row("this or `messages`", "Rivers"),
    "messages": row("this or `prompt`", SAY),
    "add_special_tokens": row("true where it is absent", False, prompt="Rivers"),
    "add_generation_prompt": row("true where it is absent", False, messages=SAY),
    "return_token_strs": row("", True, prompt="Rivers"),
    "parse_special": row("control tokens that the text spells are such", True, prompt="Rivers"),
    "tools": row("belongs to `messages`", [TOOL], TOOLS, messages=SAY),
    "chat_template_kwargs": Parameter("", KWARGS.note, KWARGS.example, schema=KWARGS.schema, within={"messages": SAY}),
}
DETOKENIZING: dict[str, Parameter] = {
    "model": row(MODEL_ROW.note, MODEL_ROW.example),
    "tokens": row("token ids", [10, 11], IDS),
    "skip_special_tokens": row("control tokens are not shown", True),
}

TEXTS = (
    Endpoint(
        "POST",
        ("/v1/embeddings",),
        "Turns texts into numbers ([embeddings](embeddings.md)).",
        answers.EmbeddingList,
        parameters(texts.Embeddings, EMBEDDING),
        texts.Embeddings,
        needs="a model that embeds",
    ),
    Endpoint(
        "POST",
        ("/rerank", "/v1/rerank", "/v2/rerank"),
        "Orders documents by how well they answer a query; Cohere's and Jina's.",
        answers.Ranking,
        parameters(texts.Rerank, RERANKING),
        texts.Rerank,
        needs="a model that embeds or ranks",
    ),
    Endpoint(
        "POST",
        ("/score", "/v1/score"),
        "Scores pairs of texts; vLLM's.",
        answers.ScoreList,
        parameters(texts.Score, SCORING),
        texts.Score,
        needs="a model that embeds or ranks",
    ),
    Endpoint(
        "POST",
        ("/tokenize",),
        "The token ids of a text or a conversation; vLLM's.",
        answers.Tokens,
        parameters(schema.Tokenize, TOKENIZING),
        schema.Tokenize,
    ),
    Endpoint(
        "POST",
        ("/detokenize",),
        "The text of token ids; vLLM's.",
        answers.Prompt,
        parameters(schema.Detokenize, DETOKENIZING),
        schema.Detokenize,
    ),
)
