"""The OpenAI Agents SDK's ordinary thing: an agent's loop with tools, a form for its answer, a handoff, a session."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    handoff,
    set_tracing_disabled,
)
from agents.models.interface import Model
from conftest import Place
from openai import AsyncOpenAI
from openai.types.responses import ResponseTextDeltaEvent
from pydantic import BaseModel, ConfigDict, Field

set_tracing_disabled(True)


class Person(BaseModel):
    """A person, and nothing else: with more properties allowed a small model goes on and on."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)


@function_tool
def weather(city: Literal["Oslo", "Bern"]) -> str:
    """The weather in a city."""
    return f"It rains in {city}."


@pytest.fixture(params=[OpenAIChatCompletionsModel, OpenAIResponsesModel])
def kind(request: pytest.FixtureRequest) -> type[Model]:
    return request.param


def run(server: Place, kind: type[Model], play: Any) -> Any:
    """Plays with a model whose client lives as long as the loop does."""

    async def main() -> Any:
        async with AsyncOpenAI(base_url=server.base, api_key="none", max_retries=0) as client:
            return await play(kind(model=server.model, openai_client=client))

    return asyncio.run(main())


def settings(**options: Any) -> ModelSettings:
    return ModelSettings(**{"temperature": 0, "max_tokens": 500, **options})


def test_the_loop_calls_a_tool_and_goes_on_to_an_answer(server: Place, kind: type[Model]) -> None:
    async def play(model: Model) -> Any:
        agent = Agent("Clerk", instructions="Be brief.", model=model, tools=[weather],
                      model_settings=settings(tool_choice="required", parallel_tool_calls=False))  # fmt: skip
        return await Runner.run(agent, "How is the weather in Oslo?", max_turns=4)

    result = run(server, kind, play)
    names = [type(item).__name__ for item in result.new_items]
    assert names[:2] == ["ToolCallItem", "ToolCallOutputItem"]
    assert result.new_items[1].output.startswith("It rains in ")
    assert result.final_output
    assert result.context_wrapper.usage.output_tokens > 0


def test_a_tools_answer_may_be_the_last_word_and_streams_as_events(server: Place, kind: type[Model]) -> None:
    async def play(model: Model) -> tuple[Any, list[str]]:
        agent = Agent("Clerk", model=model, tools=[weather], tool_use_behavior="stop_on_first_tool",
                      model_settings=settings(tool_choice="weather"))  # fmt: skip
        result = Runner.run_streamed(agent, "How is the weather in Oslo?")
        return result, [event.name async for event in result.stream_events() if event.type == "run_item_stream_event"]

    result, names = run(server, kind, play)
    assert names[:2] == ["tool_called", "tool_output"]
    assert result.final_output.startswith("It rains in ")


def test_text_streams_and_is_what_it_is_without(server: Place, kind: type[Model]) -> None:
    async def play(model: Model) -> tuple[str, str]:
        agent = Agent("Clerk", instructions="Be brief.", model=model, model_settings=settings())
        whole = await Runner.run(agent, "What is a weir?")
        result = Runner.run_streamed(agent, "What is a weir?")
        raw = [event.data async for event in result.stream_events() if event.type == "raw_response_event"]
        return whole.final_output, "".join(one.delta for one in raw if isinstance(one, ResponseTextDeltaEvent))

    whole, streamed = run(server, kind, play)
    assert whole == streamed != ""


def test_the_last_answer_has_the_form_that_was_asked_for(server: Place, kind: type[Model]) -> None:
    async def play(model: Model) -> Any:
        agent = Agent("Clerk", model=model, output_type=Person, model_settings=settings())
        return await Runner.run(agent, "Invent a person.")

    assert isinstance(run(server, kind, play).final_output, Person)


def test_one_agent_hands_over_to_another(server: Place, kind: type[Model]) -> None:
    async def play(model: Model) -> Any:
        miller = Agent("Miller", instructions="Be brief.", model=model, model_settings=settings())
        first = Agent("Clerk", model=model, handoffs=[handoff(miller)],
                      model_settings=settings(tool_choice="transfer_to_miller"))  # fmt: skip
        return await Runner.run(first, "What is a mill?", max_turns=3)

    result = run(server, kind, play)
    assert result.last_agent.name == "Miller"
    assert result.final_output


def test_a_session_remembers(server: Place, kind: type[Model]) -> None:
    async def play(model: Model) -> tuple[Any, Any]:
        agent = Agent("Clerk", instructions="Be brief.", model=model, model_settings=settings())
        session = SQLiteSession("one")
        first = await Runner.run(agent, "Name a river.", session=session)
        second = await Runner.run(agent, "And where is it?", session=session)
        return first, second

    first, second = run(server, kind, play)
    assert second.final_output
    tokens = [one.context_wrapper.usage.input_tokens for one in (first, second)]
    assert tokens[1] > tokens[0]


def test_a_response_goes_on_from_the_one_before(server: Place) -> None:
    async def play(model: Model) -> tuple[Any, Any]:
        agent = Agent("Clerk", model=model, model_settings=settings(store=True))
        first = await Runner.run(agent, "Name a river.")
        second = await Runner.run(agent, "And where is it?", previous_response_id=first.last_response_id)
        return first, second

    first, second = run(server, OpenAIResponsesModel, play)
    assert second.final_output
    tokens = [one.context_wrapper.usage.input_tokens for one in (first, second)]
    assert tokens[1] > tokens[0]
