"""What is said of the endpoints that generate: chats, texts, responses, messages."""

from __future__ import annotations

from tailrace.api import schema
from tailrace.api.anthropic.schema import CountTokens, Messages
from tailrace.api.params import COMPLETION_MAX_TOKENS
from tailrace.api.priority import TIERS
from tailrace.api.reference import answers
from tailrace.api.reference.declare import MODEL, Endpoint, Json, Parameter, differs, needed, parameters, row
from tailrace.api.reference.schemas import (
    BIAS,
    CHOICE,
    CHOICES,
    CHOSEN,
    COUNT,
    FORMS,
    IDS,
    LABELS,
    LIKELY,
    LIMITS,
    LIST,
    MESSAGE_TOOLS,
    MESSAGES,
    OBJECT,
    PREDICTION,
    RESPONSE_TOOLS,
    SCHEMA,
    STOP,
    STOPS,
    STRUCTURED,
    TEXT,
    TOOLS,
    USER,
    one_or_some,
)
from tailrace.api.responses.body import LOGPROBS, Create

FORM: Json = {"type": "object", "properties": {"river": {"type": "string", "maxLength": 8}}, "required": ["river"]}
TOOL: Json = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
SAY = [{"role": "user", "content": "Hello!"}]
MODEL_ROW = row("a name that `GET /v1/models` lists", MODEL)
PRIORITY = row(
    "lower goes first; 0 where it is absent. A request that waits goes up by one every ten seconds. Below 0 only with "
    "an API key that may go first (`--least-priority`)",
    5,
)
USER_ROW = row("goes to the request's log line", "somebody", USER)
EXTRAS = row("`timeline`: the answer has the request's timeline. `token_times`: with each token's", {"timeline": True})
KWARGS = row(
    "values for the chat template; names that it does not look up are refused", {"enable_thinking": False}, OBJECT
)
SAMPLING: dict[str, Parameter] = {
    "temperature": row("0 takes the likeliest token; 1 where it is absent", 0.5),
    "top_p": row("1 where it is absent", 0.9),
    "top_k": row("vLLM's: 0 and -1 are no bound", 40),
    "min_p": row("vLLM's: likelihoods below this part of the greatest are never drawn", 0.05),
    "presence_penalty": row("", 0.5),
    "frequency_penalty": row("", 0.5),
    "repetition_penalty": row("vLLM's: 1 where it is absent", 1.1),
    "logit_bias": row(f"by token ids; at most {LIMITS.logit_bias:,}", {"10": -100}, BIAS),
    "seed": row("the same seed gives the same tokens, bit for bit, whatever else runs", 7),
    "stop": differs(f"a text or at most {LIMITS.stop_strings}, rather than 4", ["\n\n"], STOP),
    "stop_token_ids": row("vLLM's: ends the answer as EOS does", [10], {**IDS, "maxItems": LIMITS.stop_strings}),
    "min_tokens": row("vLLM's: the answer does not end before", 2, max_tokens=8),
    "ignore_eos": row("vLLM's: the answer goes on after EOS", True, max_tokens=4),
    "user": USER_ROW,
    "metadata": differs(
        "goes to the request's log line, and to the content store where the answer is stored; its `workload` is what "
        "the ledger calls the request's",
        {},
        LABELS,
    ),
    "priority": PRIORITY,
    "service_tier": differs(
        "a priority: `flex` is `priority` 30, `priority` is -30, `auto` and `default` are 0; not together with "
        "`priority`. The answer says it where it was given, `auto` as `default`, and `priority` too where the API key "
        "may not go first",
        "flex",
        {"enum": list(TIERS)},
    ),
    "tailrace": EXTRAS,
}
GENERATED: dict[str, Parameter] = {
    **SAMPLING,
    "model": MODEL_ROW,
    "include_stop_str_in_output": row("vLLM's", True),
    "n": differs(f"choices; prompts times n are at most {LIMITS.choices}", 2, CHOICES),
    "stream": row("server-sent events", True),
    "stream_options": row(
        "`include_usage`; vLLM's `continuous_usage_stats`. Needs `stream`", {"include_usage": True}, stream=True
    ),
    "response_format": row(
        "`text`, `json_object` or `json_schema`, which the answer is held to by a grammar",
        {"type": "json_schema", "json_schema": {"name": "river", "schema": FORM}},
        FORMS,
    ),
    "guided_json": row("vLLM's: a JSON schema that the answer matches", FORM, SCHEMA),
    "guided_regex": row("vLLM's: a regular expression", "[ab]{2}", TEXT),
    "guided_choice": row("vLLM's: one of these texts", ["yes", "no"], CHOSEN),
    "guided_grammar": row("vLLM's: a grammar (Lark)", 'start: "a"', TEXT),
    "structured_outputs": row("vLLM's newer name of the same", {"choice": ["yes", "no"]}, STRUCTURED),
}
CHAT: dict[str, Parameter] = {
    **GENERATED,
    "max_tokens": row("the rest of the context where it is absent", 8, COUNT),
    "messages": differs("texts only: images, sound and files are refused, and never fetched", SAY, MESSAGES),
    "max_completion_tokens": row("the newer name of `max_tokens`", 8, COUNT),
    "logprobs": row("", True),
    "top_logprobs": row("needs `logprobs`", 2, LIKELY, logprobs=True),
    "tools": differs("functions only; the chat template must know tools", [TOOL], TOOLS),
    "tool_choice": row("a call that must be made is held to a grammar", "none", CHOICE, tools=[TOOL]),
    "parallel_tool_calls": row("needs `tools`", False, tools=[TOOL]),
    "store": differs("true needs `--content-store`; false where it is absent", True),
    "prediction": row(
        "what is likely to be answered: the answer is the same, and sooner there",
        {"type": "content", "content": "Hi"},
        PREDICTION,
    ),
    "reasoning_effort": differs("where the chat template knows it; `none` where that has a switch alone", "none", TEXT),
    "chat_template_kwargs": KWARGS,
}
COMPLETION: dict[str, Parameter] = {
    **GENERATED,
    "max_tokens": row(f"{COMPLETION_MAX_TOKENS} where it is absent; 0 with `echo`", 8, {**COUNT, "minimum": 0}),
    "prompt": needed(
        f"a text, token ids, or a list of at most {LIMITS.prompts} of either",
        "Rivers",
        one_or_some(LIMITS.prompts),
    ),
    "echo": row("the prompt comes first", True),
    "logprobs": row("", 2, LIKELY),
    "best_of": differs("1, or equal to `n`: none is thrown away", 1, {"type": "integer"}),
    "suffix": differs(
        "where the model has tokens for fill-in-the-middle, else refused; prompts are texts then", " end"
    ),
}

RESPONSE: dict[str, Parameter] = {
    **SAMPLING,
    "model": MODEL_ROW,
    "input": needed(
        "a text, or items: messages, calls, their outputs, reasoning; texts only", "Hello!", {"anyOf": [TEXT, LIST]}
    ),
    "instructions": row("a system message before everything", "Be brief."),
    "max_output_tokens": row("the rest of the context where it is absent", 8, COUNT),
    "min_tokens": row("vLLM's: the answer does not end before", 2, max_output_tokens=8),
    "ignore_eos": row("vLLM's: the answer goes on after EOS", True, max_output_tokens=4),
    "store": differs("true needs `--content-store`; where it is absent the response is stored if it can be", True),
    "previous_response_id": differs("of a stored response; needs `--content-store`", None),
    "background": differs("needs `--content-store`; not together with `stream`", True, max_output_tokens=4),
    "truncation": row(
        "`auto` leaves out the oldest turns where the context is too short", "auto", {"enum": ["auto", "disabled"]}
    ),
    "include": differs(f"only `{LOGPROBS}`", [LOGPROBS], {"type": "array", "items": {"enum": [LOGPROBS]}}),
    "stream": row("server-sent events", True),
    "stream_options": row("nothing that it could say is served", {}, stream=True),
    "tools": differs(
        "functions only: the server has no tools of its own", [{"type": "function", "name": "look"}], RESPONSE_TOOLS
    ),
    "tool_choice": row("", "none", CHOICE, tools=[{"type": "function", "name": "look"}]),
    "parallel_tool_calls": row("", False, tools=[{"type": "function", "name": "look"}]),
    "max_tool_calls": row("of built-in tools, which are none", 1, COUNT),
    "text": row("`format`: as `response_format` of chats", {"format": {"type": "json_object"}}, max_output_tokens=8),
    "reasoning": differs("`effort`, where the chat template knows it", {"effort": "none"}),
    "top_logprobs": row(f"includes `{LOGPROBS}`", 2, LIKELY),
    "chat_template_kwargs": KWARGS,
}

CACHE = row("taken wherever it may stand, and changes nothing: every prefix is cached", {"type": "ephemeral"})
CLAUDE_TOOL: Json = {"name": "look", "input_schema": {"type": "object", "properties": {}}}
COUNTED: dict[str, Parameter] = {
    "model": MODEL_ROW,
    "messages": differs("texts, calls, results and thinking; the last one is the user's", SAY, {"minItems": 1}),
    "system": row("", "Be brief."),
    "tools": differs("the client's own: Anthropic's are refused", [CLAUDE_TOOL], MESSAGE_TOOLS),
    "tool_choice": row("a call that must be made is held to a grammar", {"type": "none"}, tools=[CLAUDE_TOOL]),
    "thinking": differs("needs a model whose reasoning is told apart", {"type": "disabled"}),
    "output_config": row(
        "`format`: a JSON schema that the text is held to", {"format": {"type": "json_schema", "schema": FORM}}
    ),
    "cache_control": CACHE,
}
MESSAGE: dict[str, Parameter] = {
    **COUNTED,
    "max_tokens": row("", 8, COUNT),
    "stop_sequences": row("", ["\n\n"], STOPS),
    "stream": row("server-sent events", True),
    "temperature": row("in every version of the API", 0.5, {"type": "number", "minimum": 0, "maximum": 1}),
    "top_p": row("in every version of the API", 0.9, {"type": "number", "minimum": 0, "maximum": 1}),
    "top_k": row("in every version of the API", 40),
    "metadata": row("`user_id` goes to the request's log line", {"user_id": "somebody"}),
    "service_tier": differs("both mean the standard tier", "auto"),
}

GENERATION = (
    Endpoint(
        "POST",
        ("/v1/chat/completions",),
        "Answers a conversation, whole or as a stream.",
        answers.ChatCompletion,
        parameters(schema.Chat, CHAT),
        schema.Chat,
        answers.ChatCompletionChunk,
    ),
    Endpoint(
        "POST",
        ("/v1/completions",),
        "Goes on with texts, whole or as a stream.",
        answers.TextCompletion,
        parameters(schema.Completion, COMPLETION),
        schema.Completion,
        answers.TextCompletion,
    ),
    Endpoint(
        "POST",
        ("/v1/responses",),
        "Answers a conversation as items ([Responses](responses.md)).",
        answers.Response,
        parameters(Create, RESPONSE),
        Create,
        answers.ResponseEvent,
        errors=(404, 507),
    ),
    Endpoint(
        "POST",
        ("/v1/messages",),
        "Answers a conversation as Anthropic has it ([Messages](anthropic.md)).",
        answers.AnswerMessage,
        parameters(Messages, MESSAGE),
        Messages,
        answers.MessageEvent,
    ),
    Endpoint(
        "POST",
        ("/v1/messages/count_tokens",),
        "Counts the tokens of a conversation.",
        answers.TokenCount,
        parameters(CountTokens, COUNTED),
        CountTokens,
    ),
)
