"""Requests in, tokens out: the state machine of a request, the scheduler, the step loop, and the process around them.

What lives here: `scheduler` (the policy, pure), `core` (the loop that runs its plans), `batch`, `plan`, `request`,
`watch`, `constrain` and `config` (their parts), `process`, `client` and `supervisor` (the process and its two ends),
`protocol` (all that crosses between them), `publisher` and `subscribers` (KV events, and who may follow them).

Called by `api` (through `client` and `protocol`). It must never know of HTTP, JSON or templates; tensors stay in
`backends`, text other than stop strings in `text`.
"""
