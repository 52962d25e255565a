"""What a model wrote, taken apart: reasoning, tool calls, and the text that is meant for people.

What lives here: `parts.py` (what comes out), `parser.py` (`AnswerParser`: both parsers together), `reasoning.py`,
`tools.py` and `formats.py` (tool calls in each format), `call.py` and `jsonread.py` (one call, read as it comes),
`choose.py` (which format a chat template means).

Pure: text in, parts out, whatever the pieces in which the text comes. Called by `api`, through `text`; knows nothing of
requests, ids of calls, or tokens.
"""
