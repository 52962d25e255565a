"""Embeddings, rerank and score, through a real socket."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from tailrace.api.access import store
from tailrace.api.access.store import Quota
from tailrace.backends.cpu import available_kernels
from tailrace.backends.encoding import TextBatch
from tailrace.backends.reference.encoder import ReferenceEncoder
from tailrace.models.bert import EncoderModel
from tailrace.models.checkpoint import open_checkpoint
from tailrace.models.load import load_encoder
from tests.api.conftest import Running, serving, until
from tests.models import random_bert, random_llama

NEAR = 1e-2 if available_kernels()[0] == "amx" else 2e-3
"""How far a score of random weights may be from the reference's: with AMX products are of bf16."""
TEXTS = ["the water mill turns", "a wheel!", "the old river runs the wheels"]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("embed")
    return random_bert.write(place / "tiny", pooling="mean_tokens", matryoshka_dimensions=[32, 64])


@pytest.fixture(scope="module")
def server(embedder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    cache = str(tmp_path_factory.mktemp("cache"))
    with serving(model=str(embedder), loader="", served_names=["tiny"], cache_dir=cache, threads=2) as running:
        yield running


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_bert.write(tmp_path_factory.mktemp("rank") / "tiny", labels=1)


@pytest.fixture(scope="module")
def reranking(ranker: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    cache = str(tmp_path_factory.mktemp("cache"))
    with serving(model=str(ranker), loader="", served_names=["tiny"], cache_dir=cache, threads=2) as running:
        yield running


def ids_of(text: str) -> list[int]:
    """WordPiece by hand: every word of these tests is one token, but for "wheels"."""
    words = text.replace("!", " !").replace("wheels", "wheel ##s").split()
    return [random_bert.VOCAB.index(word) for word in words]


def read(model: EncoderModel, rows: list[tuple[list[int], list[int]]]) -> Any:
    tokens = [token for ids, _ in rows for token in ids]
    kinds = [kind for _, row in rows for kind in row]
    starts = np.cumsum([0, *(len(ids) for ids, _ in rows)]).astype(np.int32)
    return ReferenceEncoder(model).encode(TextBatch(np.array(tokens, np.int32), np.array(kinds, np.int32), starts))


def embed(server: Running, given: Any, **options: Any) -> Any:
    return server.client().embeddings.create(model="tiny", input=given, **options)


def vectors(answer: Any) -> Any:
    return np.array([row.embedding for row in answer.data])


def test_embeddings_are_those_of_the_oracle_in_order(server: Running, embedder: Path) -> None:
    answer = embed(server, TEXTS)
    ids = [[2, *ids_of(text), 3] for text in TEXTS]
    oracle = read(load_encoder(open_checkpoint(embedder)), [(row, [0] * len(row)) for row in ids])
    assert (vectors(answer) * oracle).sum(1).min() > 0.9999
    assert [row.index for row in answer.data] == [0, 1, 2]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))
    assert answer.model == "tiny"


def test_a_text_alone_and_in_company_gives_the_same_numbers(server: Running) -> None:
    together = vectors(embed(server, TEXTS))
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda at: vectors(embed(server, TEXTS[at % 3]))[0], range(24)))
    for at, one in enumerate(answers):
        assert np.array_equal(one, together[at % 3])


def test_floats_base64_and_token_ids_are_the_same_numbers(server: Running) -> None:
    floats = vectors(embed(server, TEXTS, encoding_format="float")).astype(np.float32)
    assert np.array_equal(floats, vectors(embed(server, TEXTS)).astype(np.float32))
    raw = server.post("/v1/embeddings", {"model": "tiny", "input": TEXTS[0], "encoding_format": "base64"}).json()
    assert np.array_equal(np.frombuffer(base64.b64decode(raw["data"][0]["embedding"]), "<f4"), floats[0])
    ids = [[2, *ids_of(text), 3] for text in TEXTS]
    assert np.array_equal(vectors(embed(server, ids)).astype(np.float32), floats)
    assert np.array_equal(vectors(embed(server, ids[1])).astype(np.float32), floats[1:2])


def test_a_prefix_of_an_embedding_has_length_one_where_the_model_knows_it(server: Running) -> None:
    whole, cut = vectors(embed(server, TEXTS)), vectors(embed(server, TEXTS, dimensions=32))
    expected = whole[:, :32] / np.linalg.norm(whole[:, :32], axis=1, keepdims=True)
    assert np.abs(cut - expected).max() < 1e-6
    assert np.array_equal(vectors(embed(server, TEXTS, dimensions=64)), whole)


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "input", "missing_required_parameter"),
        ({"input": []}, "input", "invalid_value"),
        ({"input": ""}, "input", "invalid_value"),
        ({"input": ["a", ""]}, "input", "invalid_value"),
        ({"input": ["a", 5]}, "input", "invalid_type"),
        ({"input": {"a": 1}}, "input", "invalid_type"),
        ({"input": [[1], [999]]}, "input", "invalid_value"),
        ({"input": "a", "dimensions": 33}, "dimensions", "invalid_value"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "invalid_type"),
        ({"input": "a", "user": "u" * 513}, "user", "invalid_value"),
        ({"input": "a", "temperature": 1}, "temperature", "unknown_parameter"),
        ({"input": "a", "truncate_prompt_tokens": 999}, "truncate_prompt_tokens", "invalid_value"),
        ({"input": "a b", "truncate_prompt_tokens": 2}, "truncate_prompt_tokens", "invalid_value"),
        ({"input": ["a", "a " * 60]}, "input[1]", "context_length_exceeded"),
        ({"input": ["a"] * 2049}, "input", "invalid_value"),
        ({"input": "a", "model": "other"}, "model", "model_not_found"),
    ],
)
def test_wrong_input_is_refused_by_name(server: Running, body: dict[str, Any], param: str, code: str) -> None:
    answer = server.post("/v1/embeddings", {"model": "tiny", **body})
    assert answer.status_code == (404 if code == "model_not_found" else 400)
    error = answer.json()["error"]
    assert error["param"].startswith(param)
    assert error["code"] == code


def test_a_long_text_is_cut_only_where_that_is_asked_for(server: Running) -> None:
    answer = embed(server, "a " * 60, extra_body={"truncate_prompt_tokens": -1})
    assert answer.usage.prompt_tokens == random_bert.POSITIONS
    short = embed(server, "a " * 60, extra_body={"truncate_prompt_tokens": 10})
    assert np.array_equal(vectors(short), vectors(embed(server, "a " * 8)))


def test_users_cannot_write_control_tokens(server: Running) -> None:
    assert embed(server, "a [SEP] b").usage.prompt_tokens > 5


def test_words_that_the_vocabulary_lacks_are_read_as_unknown(server: Running) -> None:
    unknown = random_bert.VOCAB.index("[UNK]")
    ids = [2, *ids_of("the"), unknown, unknown, *ids_of("wheel"), 3]
    assert np.array_equal(vectors(embed(server, "the 😀 東 wheel")), vectors(embed(server, ids)))


def test_a_model_that_embeds_ranks_by_cosine(server: Running) -> None:
    rows = vectors(embed(server, TEXTS, encoding_format="float"))
    body = {"query": TEXTS[0], "documents": TEXTS[1:]}
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        found = server.post(path, body).json()["results"]
        scores = {row["index"]: row["relevance_score"] for row in found}
        for at in (0, 1):
            assert math.isclose(scores[at], float(rows[0] @ rows[at + 1]), abs_tol=1e-5)
        assert found[0]["relevance_score"] >= found[1]["relevance_score"]
    score = server.post("/v1/score", {"model": "tiny", "text_1": TEXTS[0], "text_2": TEXTS[1]}).json()["data"]
    assert math.isclose(score[0]["score"], scores[0], abs_tol=1e-6)


def expected(ranker: Path, pairs: list[tuple[str, str]]) -> list[float]:
    rows = []
    for left, right in pairs:
        a, b = [2, *ids_of(left), 3], [*ids_of(right), 3]
        rows.append((a + b, [0] * len(a) + [1] * len(b)))
    return [1 / (1 + math.exp(-float(row[0]))) for row in read(load_encoder(open_checkpoint(ranker)), rows)]


def test_a_cross_encoder_reads_query_and_document_as_a_pair(reranking: Running, ranker: Path) -> None:
    documents = [TEXTS[1], {"text": TEXTS[2]}, TEXTS[0]]
    body = {"model": "tiny", "query": TEXTS[0], "documents": documents, "return_documents": True}
    answer = reranking.post("/rerank", body).json()
    scores = expected(ranker, [(TEXTS[0], text) for text in (TEXTS[1], TEXTS[2], TEXTS[0])])
    results = answer["results"]
    assert [row["index"] for row in results] == sorted(range(3), key=lambda at: -scores[at])
    for row in results:
        assert math.isclose(row["relevance_score"], scores[row["index"]], abs_tol=NEAR)
        document = documents[row["index"]]
        assert row["document"]["text"] == (document if isinstance(document, str) else document["text"])
    best = reranking.post("/rerank", {**body, "top_n": 1, "return_documents": False}).json()["results"]
    assert best == [{key: results[0][key] for key in ("index", "relevance_score")}]
    lengths = [len(ids_of(TEXTS[0])) + len(ids_of(text)) + 3 for text in TEXTS]
    assert answer["usage"]["total_tokens"] == sum(lengths)


def test_scores_are_of_pairs_or_of_one_with_all(reranking: Running, ranker: Path) -> None:
    one = reranking.post("/score", {"text_1": TEXTS[0], "text_2": TEXTS[1:]}).json()
    both = reranking.post("/score", {"text_1": [TEXTS[0]] * 2, "text_2": TEXTS[1:]}).json()
    assert [row["score"] for row in one["data"]] == [row["score"] for row in both["data"]]
    for row, exact in zip(one["data"], expected(ranker, [(TEXTS[0], text) for text in TEXTS[1:]]), strict=True):
        assert math.isclose(row["score"], exact, abs_tol=NEAR)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "a", "documents": ["a"], "top_n": 0}, "top_n"),
        ("/rerank", {"query": "a", "documents": ["a"], "rank_fields": ["x"]}, "rank_fields"),
        ("/rerank", {"query": "a", "documents": ["a", "a " * 60]}, "documents[1]"),
        ("/rerank", {"query": "a " * 60, "documents": ["a"]}, "query"),
        ("/rerank", {"documents": ["a"]}, "query"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a"]}, "text_1"),
        ("/score", {"text_1": [], "text_2": ["a"]}, "text_1"),
    ],
)
def test_wrong_pairs_are_refused_by_name(reranking: Running, path: str, body: dict[str, Any], param: str) -> None:
    answer = reranking.post(path, body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_a_document_is_cut_where_that_is_asked_for(reranking: Running) -> None:
    body = {"query": "a", "documents": ["b " * 60]}
    cut = reranking.post("/rerank", {**body, "max_tokens_per_doc": 5}).json()["results"][0]["relevance_score"]
    assert cut == reranking.post("/rerank", {**body, "documents": ["b " * 5]}).json()["results"][0]["relevance_score"]
    assert reranking.post("/rerank", {**body, "truncate_prompt_tokens": -1}).status_code == 200


def test_each_model_says_what_it_cannot_do(server: Running, reranking: Running, quick: Running) -> None:
    def code(running: Running, call: Any) -> Any:
        with pytest.raises(openai.BadRequestError) as caught:
            call(running.client())
        assert caught.value.param == "model"
        return caught.value.code

    name = quick.get("/v1/models").json()["data"][0]["id"]
    chat = [{"role": "user", "content": "hi"}]
    assert code(server, lambda c: c.chat.completions.create(model="tiny", messages=chat)) == "unsupported_model"
    assert code(server, lambda c: c.completions.create(model="tiny", prompt="hi")) == "unsupported_model"
    assert code(reranking, lambda c: c.embeddings.create(model="tiny", input="hi")) == "unsupported_model"
    assert code(quick, lambda c: c.embeddings.create(model=name, input="hi")) == "unsupported_model"
    assert quick.post("/rerank", {"query": "a", "documents": ["a"]}).json()["error"]["code"] == "unsupported_model"


def test_requests_are_logged_counted_and_leave_nothing_behind(server: Running) -> None:
    before = server.metric("tailrace_prompt_tokens_total")
    answer = server.post("/v1/embeddings", {"model": "tiny", "input": TEXTS})
    assert answer.headers["x-request-id"]
    line = until(
        lambda: next((r for r in server.requests() if r["http_request"] == answer.headers["x-request-id"]), None),
        "the line of the request",
    )
    assert (line["endpoint"], line["finish"], line["tokens"]["computed"]) == ("embeddings", "stop", 20)
    assert line["covered"] > 0.9
    until(lambda: server.metric("tailrace_prompt_tokens_total") == before + 20, "the tokens are counted")
    assert server.metric("tailrace_num_requests_running") == 0


def test_a_keys_tokens_are_charged_before_and_kept_after(embedder: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    key = store.create(file, "ada", limits=Quota(tokens_per_minute=20))[1]
    with serving(model=str(embedder), loader="", served_names=["tiny"], keys=str(file), cache_dir=str(tmp_path)) as one:
        client = one.client(key, max_retries=0)
        client.embeddings.create(model="tiny", input=TEXTS[0])
        with pytest.raises(openai.RateLimitError):
            client.embeddings.create(model="tiny", input=[TEXTS[2]] * 3)
        with pytest.raises(openai.AuthenticationError):
            one.client("other").embeddings.create(model="tiny", input="a")


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_a_model_that_generates_embeds_where_it_is_told_to(tmp_path: Path, pooling: str) -> None:
    folder = random_llama.write(tmp_path / "llama")
    options = {"loader": "", "served_names": ["tiny"], "pooling": pooling, "cache_dir": str(tmp_path / "cache")}
    with serving(model=str(folder), **options) as one:
        together = vectors(embed(one, ["abc", "a longer text of more tokens", "z"]))
        assert together.shape == (3, random_llama.HIDDEN)
        assert np.abs(np.linalg.norm(together, axis=1) - 1).max() < 1e-5
        assert np.array_equal(vectors(embed(one, "z")), together[2:])
        answer = one.post("/v1/completions", {"model": "tiny", "prompt": "a"})
        assert answer.json()["error"]["code"] == "unsupported_model"


def test_settings_of_the_kv_cache_are_refused_for_encoders(embedder: Path) -> None:
    from tailrace.engine.loading import load
    from tailrace.engine.spec import EngineSpec
    from tailrace.terms import InvalidInput, ModelError

    for options in ({"kv_tokens": 4096}, {"kv_disk": "/tmp/x"}, {"quantize": "int8"}):
        with pytest.raises(InvalidInput):
            load(EngineSpec(str(embedder), **options))
    with pytest.raises(ModelError, match="can read"):
        load(EngineSpec(str(embedder), max_context=1000))


def test_several_labels_rank_nothing(tmp_path: Path) -> None:
    from tailrace.engine.loading import load
    from tailrace.engine.spec import EngineSpec
    from tailrace.terms import ModelError

    with pytest.raises(ModelError, match="3 labels"):
        load(EngineSpec(str(random_bert.write(tmp_path / "model", labels=3)), cache_dir=str(tmp_path)))
    assert json.loads((tmp_path / "model" / "config.json").read_text())["id2label"]
