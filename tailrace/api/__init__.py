"""HTTP of one replica: OpenAI's and Anthropic's endpoints, limits, server-sent events, error mapping, metrics.

What lives here: `settings.py` (what a replica can be told), `schema.py` and `params.py` (bodies in, checked parameters
out), `tools.py` and `answers.py` (tools in, and how answers are taken apart), `grammars.py` and `constrained.py` (what
an answer must match), `generation.py` (one HTTP request as one or several engine requests), `shapes.py` and
`logprobs.py` (OpenAI's JSON), `endpoints.py`, `anthropic/` (Messages), `admin.py`, `front.py` (routes, errors),
`access/` (keys, limits), `reference/` (the table of all endpoints, the OpenAPI document), `tls.py`, `cors.py`,
`exchange.py` and `connection.py` (HTTP/1.1), `metrics.py`, `server.py` (the process).

Called by `cli`. Knows requests as `engine.protocol` messages; never touches pages, tensors or the scheduler.
"""
