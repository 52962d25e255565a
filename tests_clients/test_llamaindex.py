"""LlamaIndex's ordinary thing: chats, completions, tools, structured output, and a question to an index."""

from typing import Literal

import pytest
from conftest import Place
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, ConfigDict, Field


class Person(BaseModel):
    """A person, and nothing else: with more properties allowed a small model goes on and on."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)


def weather(city: Literal["Oslo", "Bern"]) -> str:
    """The weather in a city."""
    return f"It rains in {city}."


@pytest.fixture
def llm(server: Place) -> OpenAILike:
    return OpenAILike(
        model=server.model, api_base=server.base, api_key="none", temperature=0, max_tokens=48, max_retries=0,
        is_chat_model=True, is_function_calling_model=True, context_window=8192,
    )  # fmt: skip


@pytest.fixture
def vectors(embedder: Place) -> OpenAILikeEmbedding:
    return OpenAILikeEmbedding(model_name=embedder.model, api_base=embedder.base, api_key="none", max_retries=0)


def test_an_answer_and_its_stream_are_the_same(llm: OpenAILike) -> None:
    messages = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="Name a river.")]
    whole = llm.chat(messages)
    assert whole.message.content
    deltas = [chunk.delta or "" for chunk in llm.stream_chat(messages)]
    assert "".join(deltas) == whole.message.content
    assert llm.complete("Name a river.").text == "".join(
        one.delta or "" for one in llm.stream_complete("Name a river.")
    )


def test_text_completions(llm: OpenAILike) -> None:
    plain = llm.model_copy(update={"is_chat_model": False})
    assert plain.complete("The Rhine is").text == "".join(
        one.delta or "" for one in plain.stream_complete("The Rhine is")
    )


def test_a_tool_is_called_and_its_answer_taken(llm: OpenAILike) -> None:
    tool = FunctionTool.from_defaults(fn=weather)
    answer = llm.chat_with_tools([tool], user_msg="How is the weather in Oslo?", tool_required=True)
    calls = llm.get_tool_calls_from_response(answer)
    assert {call.tool_name for call in calls} == {"weather"}
    assert calls[0].tool_kwargs["city"] in ("Oslo", "Bern")
    said = llm.predict_and_call(
        [tool], "How is the weather in Oslo?", tool_required=True, allow_parallel_tool_calls=True
    )
    assert said.response.startswith("It rains in ")
    results = [
        ChatMessage(role="tool", content=weather(**call.tool_kwargs), additional_kwargs={"tool_call_id": call.tool_id})
        for call in calls
    ]
    final = llm.chat([ChatMessage(role="user", content="How is the weather in Oslo?"), answer.message, *results])
    assert final.message.content


@pytest.mark.parametrize("functions", [True, False])
def test_structured_output_is_what_was_asked_for(llm: OpenAILike, functions: bool) -> None:
    llm = llm.model_copy(update={"should_use_structured_outputs": not functions})
    person = llm.structured_predict(Person, PromptTemplate("Invent a person from {place}."), place="Oslo")
    assert isinstance(person, Person)


def test_a_question_is_answered_from_an_index(llm: OpenAILike, vectors: OpenAILikeEmbedding) -> None:
    texts = ["The mill at Weir Lane grinds flour.", "Chess is played on sixty-four squares.", "Cats sleep all day."]
    index = VectorStoreIndex.from_documents([Document(text=text) for text in texts], embed_model=vectors)
    engine = index.as_query_engine(llm=llm, similarity_top_k=1)
    answer = engine.query("What does the mill do?")
    assert [node.node.get_content() for node in answer.source_nodes] == texts[:1]
    assert str(answer)
    streamed = index.as_query_engine(llm=llm, similarity_top_k=1, streaming=True).query("What does the mill do?")
    assert "".join(streamed.response_gen) == str(answer)
