"""Anthropic's Messages: another way to say a chat completion, and another shape of its answer.

What lives here: `schema.py` (request bodies), `convert.py` (a body as a chat's), `shape.py` (answers and events),
`dialect.py` (errors and headers), `endpoints.py`. Called by `front`, which imports it when somebody asks for it. What
is decided of a request is decided where chats are: limits, tools, grammars, the template.
"""
