"""OpenAI's Responses: a second shape over the generations of chat completions.

What lives here: `body.py` (what a request may say), `items.py` (input items to messages), `translate.py` (a request as
a chat completion, and errors in this endpoint's own words), `truncation.py` (what is left out of a conversation that is
too long), `writer.py` (an answer as items and events), `shape.py` (the response object), `endpoints.py`.

Imported when somebody asks for it (`front`), so a server that is not asked starts as it did without.
"""
