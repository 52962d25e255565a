"""LangChain's ordinary thing: chats, streams, tools, structured output, embeddings, on all of OpenAI's endpoints."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest
from conftest import Place
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, ConfigDict, Field


@tool
def weather(city: Literal["Oslo", "Bern"]) -> str:
    """The weather in a city."""
    return f"It rains in {city}."


class Person(BaseModel):
    """A person, and nothing else: with more properties allowed a small model goes on and on."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)


def chat_of(server: Place, **options: Any) -> ChatOpenAI:
    common = {
        "model": server.model,
        "base_url": server.base,
        "api_key": "none",
        "temperature": 0,
        "max_retries": 0,
        "stream_usage": True,
    }  # which LangChain asks for by itself only at its own address
    return ChatOpenAI(**{**common, "max_tokens": 40, **options})


@pytest.fixture(params=["chat completions", "responses"])
def chat(server: Place, request: pytest.FixtureRequest) -> ChatOpenAI:
    return chat_of(server, use_responses_api=request.param == "responses")


def test_an_answer_and_its_stream_are_the_same(chat: ChatOpenAI) -> None:
    messages = [SystemMessage("Be brief."), HumanMessage("Name three rivers.")]
    whole = chat.invoke(messages)
    assert whole.text
    assert whole.usage_metadata is not None
    assert 0 < whole.usage_metadata["output_tokens"] <= 40
    chunks = list(chat.stream(messages))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert len(chunks) > 3
    usage = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    assert sum(one["output_tokens"] for one in usage) == whole.usage_metadata["output_tokens"]


def test_many_at_once_get_what_each_gets_alone(chat: ChatOpenAI) -> None:
    questions = ["What is a weir?", "What is a mill?", "What is a dam?"]
    alone = [chat.invoke(question).text for question in questions]
    assert [one.text for one in chat.batch(questions)] == alone


def test_the_asynchronous_way_is_the_same(server: Place) -> None:
    async def together() -> None:  # once: LangChain keeps its connections from one loop to the next
        for responses in (False, True):
            chat = chat_of(server, use_responses_api=responses)
            whole = await chat.ainvoke("What is a weir?")
            chunks = [chunk.text async for chunk in chat.astream("What is a weir?")]
            assert "".join(chunks) == whole.text != ""

    asyncio.run(together())


def test_a_chain_with_a_prompt_and_a_parser_streams(chat: ChatOpenAI) -> None:
    prompt = ChatPromptTemplate([("system", "You answer in {language}."), ("human", "{question}")])
    chain = prompt | chat | StrOutputParser()
    asked = {"language": "English", "question": "What is a turbine?"}
    assert "".join(chain.stream(asked)) == chain.invoke(asked) != ""


@pytest.mark.parametrize("choice", ["weather", "required", "any"])
def test_a_tool_is_called_and_its_answer_taken(chat: ChatOpenAI, choice: str) -> None:
    messages: list[Any] = [HumanMessage("How is the weather in Oslo?")]
    asked = chat.bind_tools([weather], tool_choice=choice, strict=True)
    answer = asked.invoke(messages)
    assert isinstance(answer, AIMessage)
    [call] = answer.tool_calls[:1]
    assert call["name"] == "weather"
    assert call["args"]["city"] in ("Oslo", "Bern")
    streamed = None
    for chunk in asked.stream(messages):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed is not None
    assert [(one["name"], one["args"]) for one in streamed.tool_calls] == [
        (one["name"], one["args"]) for one in answer.tool_calls
    ]
    results = [weather.invoke(one) for one in answer.tool_calls]
    assert all(isinstance(one, ToolMessage) for one in results)
    final = chat.bind_tools([weather], tool_choice="none").invoke([*messages, answer, *results])
    assert final.text
    assert not final.tool_calls


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_structured_output_is_what_was_asked_for(chat: ChatOpenAI, method: Literal["json_schema"]) -> None:
    options = {} if method == "json_mode" else {"strict": True}
    question = 'Invent a person as JSON like {"name": "Ada", "age": 36}.'
    got = chat.with_structured_output(Person, method=method, include_raw=True, **options).invoke(question)
    assert got["raw"].response_metadata
    if method == "json_mode":  # any object: whether it is a person is up to the model
        assert got["parsed"] is None or isinstance(got["parsed"], Person)
    else:
        assert got["parsing_error"] is None
        assert isinstance(got["parsed"], Person)


def test_log_probabilities_and_other_parameters_are_taken(server: Place) -> None:
    chat = chat_of(server, logprobs=True, top_logprobs=3, seed=7, stop=["\n\n"], temperature=0.7, top_p=0.9, n=2)
    result = chat.generate([[HumanMessage("Say something.")]])
    assert len(result.generations[0]) == 2
    tokens = result.generations[0][0].generation_info["logprobs"]["content"]
    assert all(len(token["top_logprobs"]) == 3 for token in tokens)


def test_text_completions(server: Place) -> None:
    llm = OpenAI(model=server.model, base_url=server.base, api_key="none", temperature=0, max_tokens=12, max_retries=0)
    whole = llm.invoke("The Rhine is")
    assert whole
    assert "".join(llm.stream("The Rhine is")) == whole


def test_a_response_goes_on_from_the_one_before(server: Place) -> None:
    chat = chat_of(server, use_responses_api=True, use_previous_response_id=True, store=True)
    first = chat.invoke("Name a river.")
    second = chat.invoke([HumanMessage("Name a river."), first, HumanMessage("And where is it?")])
    assert second.text
    assert second.usage_metadata["input_tokens"] > first.usage_metadata["input_tokens"]


def test_embeddings_find_what_is_near(embedder: Place) -> None:
    options = {"check_embedding_ctx_length": False, "max_retries": 0}  # else it sends ids of OpenAI's own tokenizer
    model = OpenAIEmbeddings(model=embedder.model, base_url=embedder.base, api_key="none", **options)
    near, far = model.embed_documents(["A water wheel turns.", "He plays chess."])
    query = model.embed_query("the mill's wheel")
    assert len(query) == 384

    def score(vector: list[float]) -> float:
        return sum(a * b for a, b in zip(vector, query, strict=True))

    assert score(near) > score(far)
    assert asyncio.run(model.aembed_query("the mill's wheel")) == query
