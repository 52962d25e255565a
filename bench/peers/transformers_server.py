"""Hugging Face transformers as a bare `/v1/completions`: `python transformers_server.py DIR --port PORT`.

Runs in an environment that has torch and transformers; everything else is the standard library. Takes prompts of token
ids, answers greedily, as a stream, and refuses what it does not do. Requests that arrive together and have prompts of
one length run as one batch, from their prompts to the last one's end; the others wait. There is no prefix cache.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

GATHER = 0.005
"""Seconds for which an idle engine waits for a batch to grow, counted from the last arrival."""
MOST_BODY = 16 << 20


class Refused(Exception):
    """A request that this server does not do."""


@dataclass
class Request:
    """One completion. `tokens` gets its token ids one by one, then None; or an error."""

    prompt: list[int]
    max_tokens: int
    ignore_eos: bool
    tokens: SimpleQueue[int | Exception | None] = field(default_factory=SimpleQueue)
    left: bool = False
    """The client is gone: whatever it still wants is not computed."""

    @staticmethod
    def of(body: Any, vocab: int, context: int) -> Request:
        """The request that a body asks for. Raises Refused."""
        if not isinstance(body, dict):
            raise Refused("the body is no object")
        prompt, count = body.get("prompt"), body.get("max_tokens", 16)
        if not isinstance(prompt, list) or not prompt or any(type(t) is not int or not 0 <= t < vocab for t in prompt):
            raise Refused(f"prompt must be a list of token ids below {vocab}")
        if type(count) is not int or not 0 < count <= context - len(prompt):
            raise Refused(f"max_tokens must be a number, and with the prompt at most {context}")
        if body.get("temperature", 1) != 0:
            raise Refused("temperature must be 0: this server is greedy")
        if body.get("stream") is not True:
            raise Refused("stream must be true")
        return Request(prompt, count, body.get("ignore_eos") is True)


class Engine(threading.Thread):
    """The model, and the thread that runs batches of requests."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        super().__init__(name="engine", daemon=True)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").eval()
        self.text = AutoTokenizer.from_pretrained(folder)
        ends = self.model.generation_config.eos_token_id
        self.ends = frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends])
        self.inbox: SimpleQueue[Request] = SimpleQueue()

    def run(self) -> None:
        waiting: list[Request] = []
        while True:
            waiting += self._arrivals(block=not waiting)
            length = len(waiting[0].prompt)
            batch = [request for request in waiting if len(request.prompt) == length]
            waiting = [request for request in waiting if len(request.prompt) != length]
            try:
                self._complete(batch)
            except Exception as error:  # noqa: BLE001 - whatever torch raises, those who wait must hear of it
                for request in batch:
                    request.tokens.put(error)

    def _arrivals(self, *, block: bool) -> Iterator[Request]:
        if block:
            yield self.inbox.get()
        try:
            while True:
                yield self.inbox.get(timeout=GATHER)
        except Empty:
            return

    @torch.inference_mode()
    def _complete(self, batch: list[Request]) -> None:
        """Runs a batch to its end. A request that is done, or whose client has left, leaves the batch at once."""
        ids = torch.tensor([request.prompt for request in batch])
        counts = [0] * len(batch)
        cache = None
        while batch:
            output = self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = output.past_key_values
            tokens = output.logits[:, -1].argmax(dim=-1)
            going = []
            for row, (request, token) in enumerate(zip(batch, tokens.tolist(), strict=True)):
                counts[row] += 1
                request.tokens.put(token)
                if counts[row] == request.max_tokens or (token in self.ends and not request.ignore_eos):
                    request.tokens.put(None)
                elif not request.left:
                    going.append(row)
            if len(going) < len(batch):
                batch, counts = [batch[row] for row in going], [counts[row] for row in going]
                rows = torch.tensor(going, dtype=torch.long)
                tokens = tokens[rows]
                if batch:
                    cache.batch_select_indices(rows)
            ids = tokens[:, None]


class Handler(BaseHTTPRequestHandler):
    """HTTP/1.0: an answer ends with its connection."""

    engine: Engine
    name: str
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        """Says nothing."""

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._json(200, {"object": "list", "data": [{"id": self.name, "object": "model"}]})
        elif self.path == "/health":
            self._json(200, {})
        else:
            self._refuse(404, f"there is no {self.path}")

    def do_POST(self) -> None:
        if self.path != "/v1/completions":
            self._refuse(404, f"there is no {self.path}")
            return
        config = self.engine.model.config
        try:
            length = int(self.headers.get("Content-Length", ""))
            if not 0 <= length <= MOST_BODY:
                raise Refused(f"a body has at most {MOST_BODY} bytes")
            body = json.loads(self.rfile.read(length))
            request = Request.of(body, config.vocab_size, config.max_position_embeddings)
        except (Refused, ValueError) as error:
            self._refuse(400, str(error))
            return
        self.engine.inbox.put(request)
        try:
            self._stream(request)
        except OSError:
            request.left = True

    def _stream(self, request: Request) -> None:
        self._head(200, "text/event-stream")
        count, last = 0, None
        while (token := request.tokens.get()) is not None:
            if isinstance(token, Exception):
                self._event({"error": {"message": repr(token), "type": "server_error"}})
                return
            count, last = count + 1, token
            self._event({"choices": [{"index": 0, "text": self.engine.text.decode([token]), "finish_reason": None}]})
        ended = last in self.engine.ends and not request.ignore_eos
        self._event({"choices": [{"index": 0, "text": "", "finish_reason": "stop" if ended else "length"}]})
        total = len(request.prompt) + count
        usage = {"prompt_tokens": len(request.prompt), "completion_tokens": count, "total_tokens": total}
        self._event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, fields: dict[str, Any]) -> None:
        made = {"object": "text_completion", "model": self.name, **fields}
        self.wfile.write(b"data: " + json.dumps(made).encode() + b"\n\n")

    def _head(self, status: int, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()

    def _json(self, status: int, fields: dict[str, Any]) -> None:
        self._head(status, "application/json")
        self.wfile.write(json.dumps(fields).encode())

    def _refuse(self, status: int, why: str) -> None:
        self._json(status, {"error": {"message": why, "type": "invalid_request_error"}})


class Server(ThreadingHTTPServer):
    request_queue_size = 256  # a whole workload arrives at once
    daemon_threads = True


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("folder", type=Path, metavar="DIR", help="a checkpoint: config.json, safetensors, tokenizer.json")
    p.add_argument("--port", type=int, required=True)
    p.add_argument("--dtype", choices=["bf16", "fp32"], default="fp32")
    p.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = p.parse_args()
    if not (args.folder / "config.json").is_file():
        p.error(f"{args.folder} has no config.json")
    torch.set_num_threads(args.threads)
    Handler.engine = Engine(args.folder, torch.bfloat16 if args.dtype == "bf16" else torch.float32)
    Handler.name = args.folder.resolve().name
    Handler.engine.start()
    with Server(("127.0.0.1", args.port), Handler) as server:
        server.serve_forever()


if __name__ == "__main__":
    main()
