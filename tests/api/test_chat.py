"""Chat completions through a real socket, with the official client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.api.conftest import Running


def ask(server: Running, text: str, **options: Any) -> Any:
    return server.client().chat.completions.create(
        model="stand", messages=[{"role": "user", "content": text}], **options
    )


def streamed(server: Running, text: str, **options: Any) -> tuple[str, str | None, list[Any]]:
    chunks = list(ask(server, text, stream=True, **options))
    content = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    finish = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason]
    assert len(finish) == 1
    return content, finish[0], chunks


def test_an_answer_has_text_finish_reason_and_usage(quick: Running) -> None:
    answer = ask(quick, "hello")
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == "hello"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens == 8
    assert answer.usage.completion_tokens == 6
    assert answer.usage.total_tokens == 14
    assert answer._request_id.startswith("req-")


@pytest.mark.parametrize("text", ["plain", "naïve café", "日本語テキスト", "Привет", "👩‍👩‍👧 family 😀", 'a\n\t"\\b'])
@pytest.mark.parametrize("logprobs", [None, 2])
def test_streamed_text_equals_whole_text_and_never_has_half_a_character(
    quick: Running, text: str, logprobs: int | None
) -> None:
    options: dict[str, Any] = {} if logprobs is None else {"logprobs": True, "top_logprobs": logprobs}
    whole = ask(quick, text, **options).choices[0]
    content, finish, chunks = streamed(quick, text, **options)
    assert whole.message.content == content == text
    assert whole.finish_reason == finish == "stop"
    assert all("\ufffd" not in (chunk.choices[0].delta.content or "") for chunk in chunks)


def test_a_character_cut_by_max_tokens_is_one_replacement_character_in_both_forms(quick: Running) -> None:
    whole = ask(quick, "ab😀", max_tokens=4).choices[0]
    content, finish, _ = streamed(quick, "ab😀", max_tokens=4)
    assert whole.message.content == content == "ab\ufffd"
    assert whole.finish_reason == finish == "length"


def test_the_first_chunk_names_the_role_and_all_share_one_id(quick: Running) -> None:
    _, _, chunks = streamed(quick, "xyz")
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert len({chunk.id for chunk in chunks}) == 1


STOPS = [
    (" 7 8 9", "1 2 3 4 5 6"),
    (["zz", "5"], "1 2 3 4 "),
    (["6 7", "6 7 8"], "1 2 3 4 5 "),
    (["4", "3 4"], "1 2 "),
    ("10 11", "1 2 3 4 5 6 7 8 9 10"),
    (["9 10", "9 10 "], "1 2 3 4 5 6 7 8 "),
]


@pytest.mark.parametrize(("stop", "expected"), STOPS)
def test_stop_strings_end_the_text_and_nothing_of_them_is_shown(quick: Running, stop: Any, expected: str) -> None:
    counting = "1 2 3 4 5 6 7 8 9 10"
    whole = ask(quick, counting, stop=stop)
    content, finish, _ = streamed(quick, counting, stop=stop)
    assert whole.choices[0].message.content == content == expected
    assert whole.choices[0].finish_reason == finish == "stop"
    assert whole.usage.completion_tokens <= len(counting) + 1


def test_a_stop_string_ends_generation_in_the_engine(quick: Running) -> None:
    answer = ask(quick, "abc STOP and a long rest", stop="STOP")
    assert answer.usage.completion_tokens == len("abc STOP")


def test_the_stop_string_stays_where_it_is_asked_for(quick: Running) -> None:
    options = {"stop": "7 8", "extra_body": {"include_stop_str_in_output": True}}
    assert ask(quick, "6 7 8 9", **options).choices[0].message.content == "6 7 8"
    assert streamed(quick, "6 7 8 9", **options)[0] == "6 7 8"


def test_a_stop_token_id_ends_the_text_before_it(quick: Running) -> None:
    ident = quick.post("/tokenize", {"prompt": "c", "add_special_tokens": False}).json()["tokens"][0]
    answer = ask(quick, "abcd", extra_body={"stop_token_ids": [ident]})
    assert answer.choices[0].message.content == "ab"
    assert answer.choices[0].finish_reason == "stop"
    kept = ask(quick, "abcd", extra_body={"stop_token_ids": [ident], "include_stop_str_in_output": True})
    assert kept.choices[0].message.content == "abc"


def test_min_tokens_and_ignore_eos_hold_the_end_off(quick: Running) -> None:
    answer = ask(quick, "ab", max_tokens=9, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 9
    assert answer.choices[0].finish_reason == "length"
    answer = ask(quick, "a" * 30, stop="a", max_tokens=20, extra_body={"min_tokens": 5})
    assert answer.usage.completion_tokens == 6


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_max_tokens_bound_the_output(quick: Running, field: str) -> None:
    answer = ask(quick, "0123456789", **{field: 5})
    assert answer.usage.completion_tokens == 5
    assert answer.choices[0].finish_reason == "length"


def test_contradicting_max_tokens_are_refused_and_equal_ones_are_not(quick: Running) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(quick, "abc", max_tokens=5, max_completion_tokens=6)
    assert refused.value.param == "max_completion_tokens"
    assert "max_tokens (5)" in refused.value.message
    assert ask(quick, "abc", max_tokens=2, max_completion_tokens=2).usage.completion_tokens == 2


def test_usage_comes_last_when_asked_for_and_never_otherwise(quick: Running) -> None:
    _, _, without = streamed(quick, "abc")
    assert all(chunk.usage is None and chunk.choices for chunk in without)
    _, _, chunks = streamed(quick, "abc", stream_options={"include_usage": True})
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].choices == []
    assert chunks[-1].usage == ask(quick, "abc").usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )


def test_a_stream_ends_with_done(quick: Running) -> None:
    body = {"model": "stand", "messages": [{"role": "user", "content": "ab"}], "stream": True}
    answer = quick.post("/v1/chat/completions", body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-request-id"]
    events = [line for line in answer.text.split("\n\n") if line]
    assert all(event.startswith("data: ") for event in events)
    assert events[-1] == "data: [DONE]"
    assert all("usage" not in json.loads(event[6:]) for event in events[:-1])


def test_continuous_usage_alone_has_no_chunk_at_the_end(quick: Running) -> None:
    options = {"include_usage": False, "continuous_usage_stats": True}
    body = {"model": "stand", "messages": [{"role": "user", "content": "abc"}], "stream": True}
    answer = quick.post("/v1/chat/completions", {**body, "stream_options": options})
    events = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
    assert all(event["choices"] for event in events)
    assert [event["usage"]["completion_tokens"] for event in events[1:]] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "idle",
    [
        {"logprobs": False, "top_logprobs": 0},
        {"top_logprobs": 0},
        {"tool_choice": "auto"},
        {"tool_choice": "none"},
        {"tool_choice": "auto", "tools": []},
        {"tool_choice": None, "tools": None},
    ],
)
def test_what_changes_nothing_is_accepted(quick: Running, idle: dict[str, Any]) -> None:
    body = {"model": "stand", "messages": [{"role": "user", "content": "abc"}]}
    answer = quick.post("/v1/chat/completions", {**body, **idle})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["logprobs"] is None
    assert answer.json()["choices"][0]["message"]["content"] == "abc"


def test_continuous_usage_counts_up(quick: Running) -> None:
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    _, _, chunks = streamed(quick, "abcd", **options)
    counts = [chunk.usage.completion_tokens for chunk in chunks[1:]]
    assert counts == sorted(counts)
    assert counts[-1] == 5


def test_several_choices_each_have_their_own_text_and_index(quick: Running) -> None:
    answer = ask(quick, "abc", n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.message.content for choice in answer.choices} == {"abc"}
    assert answer.usage.prompt_tokens == 6
    assert answer.usage.completion_tokens == 12
    chunks = list(ask(quick, "abc", n=3, stream=True))
    for index in range(3):
        mine = [c.choices[0] for c in chunks if c.choices[0].index == index]
        assert "".join(choice.delta.content or "" for choice in mine) == "abc"
        assert mine[-1].finish_reason == "stop"


def test_a_seed_gives_the_same_text_whatever_shares_the_batch(quick: Running) -> None:
    def draw(seed: int | None) -> str:
        body = {"prompt": "w", "max_tokens": 12, "temperature": 0.9, "model": "stand", "seed": seed}
        return str(quick.post("/v1/completions", body).json()["choices"][0]["text"])

    from concurrent.futures import ThreadPoolExecutor

    alone = {draw(7) for _ in range(4)}
    with ThreadPoolExecutor(9) as pool:
        unseeded = [pool.submit(draw, None) for _ in range(5)]
        beside = [pool.submit(draw, 7) for _ in range(4)]
        assert {one.result() for one in beside} == alone
        assert len({one.result() for one in unseeded}) > 1
    assert len(alone) == 1
    assert draw(8) not in alone


def test_choices_of_one_seed_differ_and_repeat(quick: Running) -> None:
    body = {"prompt": "w", "max_tokens": 12, "temperature": 0.9, "model": "stand", "seed": 7, "n": 3}
    first, second = (quick.post("/v1/completions", body).json()["choices"] for _ in range(2))
    assert [c["text"] for c in first] == [c["text"] for c in second]
    assert len({c["text"] for c in first}) == 3


def test_logprobs_have_openais_shape_and_stream_equal(quick: Running) -> None:
    content = ask(quick, "hé", logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert [bytes(one.bytes) for one in content][:3] == [b"h", b"\xc3", b"\xa9"]
    assert all(len(one.top_logprobs) == 3 for one in content)
    _, _, chunks = streamed(quick, "hé", logprobs=True, top_logprobs=3)
    pieces = [one for chunk in chunks if chunk.choices[0].logprobs for one in chunk.choices[0].logprobs.content]
    assert pieces == content


def test_logprobs_without_top_are_of_the_chosen_token_alone(quick: Running) -> None:
    content = ask(quick, "abc", logprobs=True).choices[0].logprobs.content
    assert len(content) == 4
    assert all(one.top_logprobs == [] for one in content)
    assert ask(quick, "abc").choices[0].logprobs is None


CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


def test_a_conversation_that_called_tools_can_be_replayed(quick: Running) -> None:
    def prompt(assistant: dict[str, Any]) -> list[int]:
        messages = [
            {"role": "user", "content": "go"},
            {"role": "assistant", "tool_calls": [CALL], **assistant},
            {"role": "tool", "tool_call_id": "call_1", "content": "42"},
            {"role": "user", "content": "so?"},
        ]
        answer = quick.post("/v1/chat/completions", {"model": "stand", "messages": messages})
        assert answer.status_code == 200, answer.text
        return list(quick.post("/tokenize", {"messages": messages}).json()["tokens"])

    assert prompt({}) == prompt({"content": None}) == prompt({"content": ""})


def test_what_the_server_answered_can_be_sent_back(quick: Running) -> None:
    message = ask(quick, "abc").choices[0].message.model_dump()
    messages = [{"role": "user", "content": "a"}, message, {"role": "user", "content": "b"}]
    assert quick.post("/v1/chat/completions", {"model": "stand", "messages": messages}).status_code == 200


@pytest.mark.parametrize("role", ["system", "developer"])
def test_text_parts_are_text_and_developer_is_system(quick: Running, role: str) -> None:
    parts = [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]
    plain = quick.post("/tokenize", {"messages": [{"role": "system", "content": "x\ny"}]}).json()["tokens"]
    assert quick.post("/tokenize", {"messages": [{"role": role, "content": parts}]}).json()["tokens"] == plain


def test_control_tokens_typed_by_a_user_are_ordinary_text(quick: Running) -> None:
    tokens = quick.post("/tokenize", {"messages": [{"role": "user", "content": "<role><say><eos>"}]}).json()["tokens"]
    assert tokens[:2] == [0, 2]
    assert tokens[-1] == 3
    assert all(token > 7 for token in tokens[2:-1])


def test_models_and_aliases_answer_by_their_name(quick: Running) -> None:
    client = quick.client()
    assert [model.id for model in client.models.list()] == ["stand", "alias"]
    assert client.models.retrieve("alias").id == "alias"
    answer = client.chat.completions.create(model="alias", messages=[{"role": "user", "content": "a"}])
    assert answer.model == "alias"
    for call in (
        lambda: client.models.retrieve("nope"),
        lambda: client.chat.completions.create(model="nope", messages=[{"role": "user", "content": "a"}]),
    ):
        with pytest.raises(openai.NotFoundError) as missing:
            call()
        assert missing.value.code == "model_not_found"


def test_cached_prompt_tokens_are_reported(quick: Running) -> None:
    text = "the same long prefix, again and again: " * 4
    assert ask(quick, text, max_tokens=1).usage.prompt_tokens_details.cached_tokens == 0
    cached = ask(quick, text, max_tokens=1).usage.prompt_tokens_details.cached_tokens
    assert 0 < cached <= len(text) + 3
    assert cached % 16 == 0


def test_harmless_parameters_are_accepted(quick: Running) -> None:
    answer = ask(
        quick,
        "abc",
        user="me",
        metadata={"a": "b"},
        store=False,
        response_format={"type": "text"},
        tool_choice="none",
        modalities=["text"],
        service_tier="auto",
        temperature=None,
        stop=None,
        logit_bias=None,
        tools=[{"type": "function", "function": {"name": "f"}}],
    )
    assert answer.choices[0].message.content == "abc"
