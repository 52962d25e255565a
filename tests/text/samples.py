# ruff: noqa: RUF001 - look-alike characters are what tokenizers are tested on
"""Texts and conversations that tokenizers and templates are compared on; made the same way every time."""

from __future__ import annotations

import random
from typing import Any

PIECES = [
    *(
        "hello",
        " world",
        "The",
        " quick",
        " BROWN",
        "fox",
        "don't",
        "we'll",
        "I'M",
        "they'Ve",
        " 's",
        "naïve",
        "café",
        "Ångström",
    ),
    *("cafe\u0301", "e\u0301\u0302", "ａｂｃ", "ﬁne", "½", "x²", "№5", "Ⅻ", "０１", "٣٤", "१२"),
    *(
        "привет",
        " мир",
        "Ёлка",
        "你好",
        "世界",
        "，。",
        "日本語",
        "かな",
        "カナ",
        "한국어",
        "안녕",
        "مرحبا",
        "שלום",
        "ไทย",
        "हिन्दी",
    ),
    *(
        "—",
        "–",
        "…",
        "“quoted”",
        "‘x’",
        "«»",
        "€",
        "™",
        "½",
        "\u00a0",
        "\u3000",
        "\u2028",
        "\u200b",
        "\u200d",
        "\ufeff",
        "\u00ad",
    ),
    *("😀", "👍🏽", "🇫🇷", "👨‍👩‍👧", "❤️", "𝔘𝔫𝔦", "🏴󠁧󠁢󠁥󠁮󠁧󠁿"),
    *("1", "12", "123", "1234", "3.14", "1,000,000", "0x1F", "2024-01-31", " 7", "  42", "   9"),
    *(" ", "  ", "   ", "      ", "\n", "\n\n", "\r\n", "\t", "\t\t", " \n", "\n ", " \t ", "\x0b", "\x0c"),
    *("\x00", "\x01", "\x1b[0m", "\x7f", "\x85", "\x1c"),
    *(
        "{",
        "}",
        "()",
        "[]",
        "=>",
        "!=",
        "//",
        "/*",
        "*/",
        "#!",
        "<",
        ">",
        "</",
        "|",
        "<|",
        "|>",
        "@",
        "$x",
        "%d",
        "\\n",
        "&amp;",
    ),
    *(
        "def f(x):\n    return x",
        "if (a<b) {",
        "http://a.b/c?d=e#f",
        "user@host.org",
        "a_b-c",
        "CamelCaseWord",
        "snake_case",
    ),
    *("_", "__", "▁", "▁▁", "Ġ", "Ċ", "ab▁cd", "aaaaaaaaaaaaaaaaaaaa", "................", "----------------"),
]


def texts(count: int, extra: tuple[str, ...] = ()) -> list[str]:
    """Every piece alone and with a space before it, then random joins of a few pieces, some with `extra` among them."""
    rng = random.Random(20240607)
    made = ["", *PIECES, *(" " + piece for piece in PIECES), *extra]
    while len(made) < count:
        made.append("".join(rng.choice(PIECES) for _ in range(rng.randint(2, 12))))
    for _ in range(40 if extra else 0):
        made.append("".join(rng.choice([*extra, *extra, *PIECES]) for _ in range(rng.randint(2, 8))))
    return made


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'The weather at a place — "now" & <soon>.',
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Zürich", "東京"]}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}

CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}},
}

CHATS: dict[str, dict[str, Any]] = {
    "one": {"messages": [{"role": "user", "content": "Hello there!"}]},
    "no prompt": {"messages": [{"role": "user", "content": "Hello"}], "add_generation_prompt": False},
    "system": {
        "messages": [{"role": "system", "content": " Be brief. \n"}, {"role": "user", "content": "  Wie geht’s?  "}]
    },
    "turns": {
        "messages": [
            {"role": "user", "content": "if a < b and c > d: print('<b>hi</b>')"},
            {"role": "assistant", "content": " 1 < 2, so [yes]. \n\n"},
            {"role": "user", "content": "\nНу ладно — 12345 😀 <"},
            {"role": "assistant", "content": ">ok"},
            {"role": "user", "content": "|end"},
        ]
    },
    "thinking": {
        "messages": [
            {"role": "user", "content": "Why?"},
            {"role": "assistant", "content": "<think>\nBecause of x < y.\n</think>\n\nBecause."},
            {"role": "user", "content": "And?"},
            {"role": "assistant", "reasoning_content": "Hm.", "content": "So."},
            {"role": "user", "content": "Go on"},
        ]
    },
    "tools": {
        "messages": [
            {"role": "system", "content": "Use tools."},
            {"role": "user", "content": "Weather in Zürich?"},
            {"role": "assistant", "tool_calls": [CALL]},
            {
                "role": "tool",
                "tool_call_id": "abcdefghi",
                "name": "get_weather",
                "content": '{"sky": "<clear>", "t": -3.5}',
            },
            {"role": "assistant", "content": "Clear, −3.5 °C."},
            {"role": "user", "content": "Thanks"},
        ],
        "tools": [WEATHER],
    },
}

SMOLLM_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<file_sep>")
SMOLLM_CHATS = ("one", "no prompt", "system", "turns")

LLAMA3_STYLE = """{{- bos_token }}
{%- set first = 0 %}
{%- if messages[0]['role'] == 'system' %}
    {%- set instructions = messages[0]['content'] | trim %}
    {%- set first = 1 %}
{%- else %}
    {%- set instructions = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools %}
    {{- 'Tools:\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=2) }}
        {{- '\\n' }}
    {%- endfor %}
{%- endif %}
{{- instructions ~ '<|eot_id|>' }}
{%- for message in messages[first:] %}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- '}<|eot_id|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (message.content | tojson) + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

CHATML_STYLE = """{%- macro text_of(content) %}
    {%- if content is string %}
        {{- content }}
    {%- elif content %}
        {%- for part in content %}
            {{- part.text }}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- if tools or messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- text_of(messages[0].content) }}{% endif %}
    {%- if tools %}
        {{- '\\n\\n# Tools\\n<tools>' }}
        {%- for tool in tools %}
            {{- '\\n' }}
            {{- tool | tojson }}
        {%- endfor %}
        {{- '\\n</tools>' }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages | length - 1) %}
{%- for message in messages %}
    {%- set content = text_of(message.content) %}
    {%- if message.role == 'system' %}
        {%- if not loop.first %}{{ raise_exception('the system message must come first') }}{% endif %}
        {%- continue %}
    {%- elif message.role == 'assistant' %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- generation %}
        {%- if loop.index0 > 2 and reasoning %}
            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning.strip('\\n') }}
            {{- '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
            {%- if call.function.arguments is string %}
                {{- call.function.arguments }}
            {%- else %}
                {{- call.function.arguments | tojson }}
            {%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
        {%- endgeneration %}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""

MISTRAL_STYLE = """{%- if messages[0].role == 'system' %}
    {%- set prefix = messages[0].content + '\\n\\n' %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set prefix = '' %}
    {%- set turns = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in turns %}
    {%- if message.role == 'user' %}
        {%- if loop.last and tools %}
            {{- '[TOOLS]' + (tools | map(attribute='function') | list | tojson) + '[/TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + (prefix if loop.first else '') + message.content + ' [/INST]' }}
    {%- elif message.tool_calls %}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{ raise_exception('tool call ids must have 9 characters') }}{% endif %}
            {%- set made = {'name': call.function.name, 'arguments': call.function.arguments, 'id': call.id} %}
            {{- '[CALLS]' + (made | tojson) }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[RESULT]' + ({'content': message.content, 'call': message.tool_call_id} | tojson) + '[/RESULT]' }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content | trim + eos_token }}
    {%- else %}
        {{- raise_exception('only user and assistant roles, not ' + message.role) }}
    {%- endif %}
{%- endfor %}
"""

TEMPLATES = {"llama3": LLAMA3_STYLE, "qwen": CHATML_STYLE, "tekken": MISTRAL_STYLE, "spm": MISTRAL_STYLE}
