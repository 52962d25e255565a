"""Instructor's ordinary thing: a pydantic model out of an answer, in each of its modes."""

from __future__ import annotations

import anthropic
import instructor
import openai
import pytest
from conftest import Place
from instructor import Mode
from instructor.core.exceptions import IncompleteOutputException, InstructorRetryException
from pydantic import BaseModel, ConfigDict, Field


class Person(BaseModel):
    """A person, and nothing else: with more properties allowed a small model goes on and on."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)


ASKED = [{"role": "user", "content": "Invent a person."}]


def client_of(server: Place, mode: Mode) -> instructor.Instructor:
    return instructor.from_openai(openai.OpenAI(base_url=server.base, api_key="none", max_retries=0), mode=mode)


@pytest.mark.parametrize("mode", [Mode.TOOLS, Mode.JSON_SCHEMA])
def test_a_model_comes_out(server: Place, mode: Mode) -> None:
    client = client_of(server, mode)
    options = {"model": server.model, "messages": ASKED, "max_tokens": 120, "temperature": 0, "max_retries": 0}
    person, raw = client.chat.completions.create_with_completion(response_model=Person, **options)
    assert isinstance(person, Person)
    assert raw.usage.completion_tokens > 0


@pytest.mark.parametrize("mode", [Mode.TOOLS, Mode.JSON_SCHEMA])
def test_a_model_grows_as_it_is_streamed(server: Place, mode: Mode) -> None:
    options = {"model": server.model, "messages": ASKED, "max_tokens": 120, "temperature": 0}
    *_, last = client_of(server, mode).chat.completions.create_partial(response_model=Person, **options)
    assert Person.model_validate(last.model_dump())


@pytest.mark.parametrize("mode", [Mode.JSON, Mode.MD_JSON])
def test_any_object_is_validated_by_the_client(server: Place, mode: Mode) -> None:
    """These modes hold the model to nothing but JSON, or to nothing at all: what does not fit is tried again, with the
    error in the conversation."""
    options = {"model": server.model, "messages": ASKED, "max_tokens": 80, "max_retries": 2, "temperature": 0}
    try:
        made = client_of(server, mode).chat.completions.create(response_model=Person, **options)
    except (InstructorRetryException, IncompleteOutputException) as error:  # a model of this size may fail at it
        made = error
    assert isinstance(made, Person) or made.last_completion is not None  # but the server may not


def test_responses(server: Place) -> None:
    client = client_of(server, Mode.RESPONSES_TOOLS)
    person = client.responses.create(model=server.model, input="Invent a person.", temperature=0, response_model=Person)
    assert isinstance(person, Person)


def test_anthropic(server: Place) -> None:
    plain = anthropic.Anthropic(base_url=server.root, api_key="none", max_retries=0)
    options = {"model": server.model, "messages": ASKED, "max_tokens": 120, "max_retries": 0}
    person = instructor.from_anthropic(plain, mode=Mode.TOOLS).messages.create(response_model=Person, **options)
    assert isinstance(person, Person)
