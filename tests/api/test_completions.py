"""Text completions, tokenize and detokenize through a real socket."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tailrace.api.generation import Choice, Generation
from tailrace.api.logprobs import text_logprobs
from tailrace.engine.protocol import Output, SamplingParams, TokenLogprob
from tailrace.engine.watch import StopWatch
from tailrace.text import Detokenizer, TokenBytes
from tests.api.conftest import Running
from tests.api.stand import BOS, FIRST_BYTE, PADDED, SAY, table


def ids(text: str) -> list[int]:
    return [FIRST_BYTE + value for value in text.encode()]


def complete(server: Running, prompt: Any, **options: Any) -> Any:
    return server.client().completions.create(model="stand", prompt=prompt, **options)


def post(server: Running, **body: Any) -> Any:
    return server.post("/v1/completions", {"model": "stand", **body})


def test_sixteen_tokens_are_the_default(quick: Running) -> None:
    answer = complete(quick, "tell me")
    assert answer.usage.completion_tokens == 16
    assert answer.choices[0].finish_reason == "length"


def test_token_ids_are_taken_as_they_are(quick: Running) -> None:
    answer = complete(quick, [*ids("abc"), SAY])
    assert answer.choices[0].text == "abc"
    assert answer.usage.prompt_tokens == 4


def test_texts_get_one_bos(quick: Running) -> None:
    assert complete(quick, "abc", max_tokens=1).usage.prompt_tokens == 4
    assert complete(quick, "<bos>abc", max_tokens=1).usage.prompt_tokens == 4


@pytest.mark.parametrize(
    "prompts", [["ab", "cd", "ef"], [[*ids("ab"), SAY], [*ids("cd"), SAY]]], ids=["texts", "token ids"]
)
def test_several_prompts_and_choices_are_numbered_prompt_by_prompt(quick: Running, prompts: list[Any]) -> None:
    answer = complete(quick, prompts, n=2, temperature=0, max_tokens=4)
    assert [choice.index for choice in answer.choices] == list(range(2 * len(prompts)))
    alone = [complete(quick, prompt, temperature=0, max_tokens=4).choices[0].text for prompt in prompts]
    assert [choice.text for choice in answer.choices] == [text for text in alone for _ in range(2)]


def test_streamed_text_equals_whole_text(quick: Running) -> None:
    for prompt in ([*ids("añ😀z"), SAY], "anything"):
        whole = complete(quick, prompt, seed=3, max_tokens=30)
        chunks = list(complete(quick, prompt, seed=3, max_tokens=30, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
        assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
        assert all(chunk.choices[0].finish_reason is None for chunk in chunks[:-1])


def test_echo_puts_the_prompt_before_the_text(quick: Running) -> None:
    say = {"extra_body": {"tailrace": {"parse_special": True}}}
    assert complete(quick, "abc<say>", echo=True, **say).choices[0].text == "abc<say>abc"
    chunks = list(complete(quick, "abc<say>", echo=True, stream=True, **say))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "abc<say>abc"
    assert complete(quick, [*ids("hé"), SAY], echo=True).choices[0].text == "hé<say>hé"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [None, 1])
def test_echo_without_new_tokens(quick: Running, stream: bool, logprobs: int | None) -> None:
    body = {"prompt": ["abc", "d"], "echo": True, "max_tokens": 0, "stream": stream, "logprobs": logprobs}
    answer = post(quick, **body)
    assert answer.status_code == 200, answer.text
    if stream:
        events = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
        for index, text in enumerate(("abc", "d")):
            mine = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
            assert "".join(choice["text"] for choice in mine) == text
            assert mine[-1]["finish_reason"] == "length"
    else:
        choices = answer.json()["choices"]
        assert [choice["text"] for choice in choices] == ["abc", "d"]
        assert answer.json()["usage"] == {
            "prompt_tokens": 6,
            "completion_tokens": 0,
            "total_tokens": 6,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        if logprobs is not None:
            assert choices[0]["logprobs"]["tokens"] == ["<bos>", "a", "b", "c"]
            assert choices[0]["logprobs"]["token_logprobs"][0] is None
            assert all(value < 0 for value in choices[0]["logprobs"]["token_logprobs"][1:])


def test_logprobs_line_up_with_the_text(quick: Running) -> None:
    for stream in (False, True):
        body = {"prompt": [*ids("añb"), SAY], "logprobs": 2, "echo": True, "stream": stream}
        answer = post(quick, **body)
        if stream:
            events = [json.loads(line[6:])["choices"][0] for line in answer.text.split("\n\n") if line[6:7] == "{"]
            text = "".join(event["text"] for event in events)
            parts = [event["logprobs"] for event in events if event["logprobs"]]
            logprobs = {name: [one for part in parts for one in part[name]] for name in parts[0]}
        else:
            choice = answer.json()["choices"][0]
            text, logprobs = choice["text"], choice["logprobs"]
        assert text == "añb<say>añb"
        assert len(logprobs["tokens"]) == 5 + 5
        assert len({len(value) for value in logprobs.values()}) == 1
        assert logprobs["top_logprobs"][0] is None
        assert all(2 <= len(row) <= 3 for row in logprobs["top_logprobs"][1:])
        assert logprobs["text_offset"] == [0, 1, 1, 2, 3, 8, 9, 9, 10, 11]


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_do_not_wait_for_what_a_stop_string_holds_back(quick: Running, stream: bool) -> None:
    said = "aaab ñ aaa"
    body = {"prompt": [*ids(said), SAY], "logprobs": 0, "stop": ["aaaa", "ñ b"], "stream": stream}
    answer = post(quick, **body)
    parts = [json.loads(line[6:])["choices"][0] for line in answer.text.split("\n\n") if line[6:7] == "{"]
    parts = parts if stream else answer.json()["choices"]
    offsets = [at for part in parts if part["logprobs"] for at in part["logprobs"]["text_offset"]]
    assert "".join(part["text"] for part in parts) == said
    assert offsets == [0, 1, 2, 3, 4, 5, 5, 6, 7, 8, 9, 10]


def test_of_tokens_that_spell_alike_the_likeliest_is_told_and_the_chosen_one_is_itself() -> None:
    half, other, whole = ids("ñ")[0], ids("é")[1], ids("a")[0]
    top = [(half, -0.5), (whole, -1.0), (other, -2.0)]
    for token, own, shown in ((half, -0.5, -0.5), (whole, -1.0, -0.5), (other, -2.0, -2.0)):
        told = text_logprobs(table(), [token], [TokenLogprob(token, own, top)], [0], 3)
        assert told["top_logprobs"] == [{"\ufffd": shown, "a": -1.0}]
        assert told["token_logprobs"] == [own]


@pytest.mark.parametrize("stop", [(), ("zz",)])
@pytest.mark.parametrize("include", [False, True])
def test_an_end_of_text_that_is_not_flagged_special_is_not_shown(stop: tuple[str, ...], include: bool) -> None:
    plain = TokenBytes.build([b"a", b"b", b"</s>"], [])
    params = SamplingParams(max_tokens=5, stop=stop, include_stop=include)
    for finish, shown in (("stop", "ab</s>" if include else "ab"), ("length", "ab</s>")):
        watch = StopWatch(plain, params) if stop else None
        choice = Choice(Generation(False), 0, "r", [0], params, Detokenizer(plain), watch, frozenset([2]))
        delta = choice.absorb(Output("r", [0, 1, 2], finish=finish))  # type: ignore[arg-type]
        assert delta.text == shown
        assert choice.output_tokens == 3


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["ab", ""], [[5], []], [1, "a"], ["a", [1]], {"a": 1}, None, 7])
def test_empty_and_mixed_prompts_are_refused_and_the_next_request_works(quick: Running, prompt: Any) -> None:
    answer = post(quick, prompt=prompt)
    if prompt in ("", [""], ["ab", ""]):
        assert answer.status_code == 400
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith("prompt")
    assert post(quick, prompt="a", max_tokens=1).status_code == 200


@pytest.mark.parametrize("token", [PADDED, PADDED + 5, -1, 1 << 40, 10**30])
def test_ids_that_are_no_tokens_are_refused(quick: Running, token: int) -> None:
    for answer in (
        post(quick, prompt=[5, token]),
        post(quick, prompt="a", logit_bias={str(token): 100}),
        post(quick, prompt="a", stop_token_ids=[token]),
        quick.post("/detokenize", {"tokens": [token]}),
    ):
        assert answer.status_code == 400, answer.text


def test_best_of_and_suffix_are_refused_unless_they_change_nothing(quick: Running) -> None:
    assert post(quick, prompt="a", best_of=1).status_code == 200
    assert post(quick, prompt="a", best_of=2, n=2).status_code == 200
    for body in ({"best_of": 3}, {"best_of": 2}, {"best_of": 1, "n": 2}, {"suffix": "x"}):
        refused = post(quick, prompt="a", **body)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] in body


def test_a_banned_token_is_never_drawn_and_a_pushed_one_always(quick: Running) -> None:
    push = ids("x")[0]
    answer = post(quick, prompt="a", logit_bias={str(push): 100}, max_tokens=5).json()
    assert answer["choices"][0]["text"] == "xxxxx"


def test_tokenize_and_detokenize_are_inverse(quick: Running) -> None:
    text = "añ 😀 <say>"
    answer = quick.post("/tokenize", {"model": "stand", "prompt": text, "return_token_strs": True}).json()
    assert answer["tokens"] == [BOS, *ids(text)]
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 2048
    plain = quick.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json()["tokens"]
    assert quick.post("/detokenize", {"tokens": plain}).json() == {"prompt": text}
    assert quick.post("/detokenize", {"tokens": [BOS, *plain]}).json()["prompt"] == "<bos>" + text
    special = quick.post("/tokenize", {"prompt": "<say>", "parse_special": True}).json()["tokens"]
    assert special == [BOS, SAY]


def test_tokenize_takes_one_of_prompt_and_messages(quick: Running) -> None:
    for body in ({}, {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}):
        assert quick.post("/tokenize", body).status_code == 400
    messages = [{"role": "user", "content": "a"}]
    open_end = quick.post("/tokenize", {"messages": messages}).json()["tokens"]
    closed = quick.post("/tokenize", {"messages": messages, "add_generation_prompt": False}).json()["tokens"]
    assert open_end == [*closed, SAY]


def test_a_suffix_goes_behind_what_is_written(fresh: Any) -> None:
    with fresh(model="infill", served_names=["stand"]) as running:
        answer = running.client().completions.create(model="stand", prompt="before ", suffix=" after", max_tokens=40)
        assert answer.choices[0].text == " after"  # the stand-in says what stands before its last token
        assert answer.usage.prompt_tokens == 4 + len("before  after")
        for body in ({"echo": True}, {"prompt": [FIRST_BYTE]}, {"tailrace": {"parse_special": True}}):
            refused = post(running, **{"prompt": "a", "suffix": "b", **body})
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "suffix"
