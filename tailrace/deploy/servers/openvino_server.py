"""An OpenAI-compatible server around OpenVINO GenAI's continuous batching pipeline, as a script.

Runs in the interpreter that OpenVINO GenAI is installed in: it imports that, numpy and the standard library, nothing of
ours. One thread steps the pipeline; the event loop has the HTTP, and makes text of tokens. Streamed completions and
chats, /health (200 once the model is loaded), /v1/models, /metrics. A parameter that it does not know is refused.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import queue
import signal
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

PARAMETERS = {
    "model", "messages", "prompt", "stream", "stream_options", "max_tokens", "temperature", "top_p", "top_k", "seed",
    "ignore_eos",
}  # fmt: skip
BLOCK = 32
"""Tokens of a KV block on a CPU (documentation of SchedulerConfig)."""
WINDOW = 16
"""Tokens that are decoded together, so that a character that several of them make comes whole."""

Ids = list[int]


class Refused(Exception):
    """A request that cannot be answered; the status and what is wrong."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Job(NamedTuple):
    """A request on its way to the pipeline. `tell` gets its tokens as they come, its finish reason at the end, or an
    exception; `left` is set once its client has gone."""

    ids: Ids
    body: dict[str, Any]
    tell: Callable[[Ids | str | Exception], None]
    left: threading.Event


class Engine(threading.Thread):
    """The pipeline and the one thread that touches it."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(daemon=True)
        self.options = options
        self.ready = threading.Event()
        self.tokenizer: Any = None
        self.gauges = (0, 0, 0.0)
        self.inbox: queue.Queue[Job] = queue.Queue()

    def run(self) -> None:
        try:
            self._load()
            self._serve()
        except Exception as error:  # noqa: BLE001  # a pipeline of another's may raise anything
            print(f"the pipeline failed: {error}", flush=True)
            os._exit(1)

    def _load(self) -> None:
        import openvino_genai  # type: ignore[import-not-found]  # of the interpreter that this runs in

        options = self.options
        scheduler = openvino_genai.SchedulerConfig()
        if options.prefix_cache is not None:
            scheduler.enable_prefix_caching = options.prefix_cache
        if options.parallel is not None:
            scheduler.max_num_seqs = options.parallel
        if options.kv_tokens is not None:
            scheduler.num_kv_blocks = -(-options.kv_tokens // BLOCK) + 1
        wanted = {"INFERENCE_NUM_THREADS": options.threads, "INFERENCE_PRECISION_HINT": options.precision}
        properties = {name: value for name, value in wanted.items() if value is not None}
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(options.model, scheduler, options.device, properties)
        self.tokenizer = self.pipeline.get_tokenizer()
        self.ready.set()

    def _serve(self) -> None:
        running: dict[int, tuple[Any, Job]] = {}
        count = 0
        while True:
            while not self.inbox.empty() or not running:
                job = self.inbox.get()
                count += 1
                try:
                    running[count] = (self._add(count, job), job)
                except Exception as error:  # noqa: BLE001  # likewise
                    job.tell(error)
            self.pipeline.step()
            for key, (handle, job) in list(running.items()):
                if self._read(handle, job):
                    del running[key]
            now = self.pipeline.get_metrics()
            at_work = now.scheduled_requests if running else 0
            self.gauges = (at_work, max(0, len(running) - at_work), now.cache_usage / 100)

    def _add(self, number: int, job: Job) -> Any:
        import numpy
        import openvino  # type: ignore[import-not-found]  # likewise
        import openvino_genai

        config, body = openvino_genai.GenerationConfig(), job.body
        config.max_new_tokens = body["max_tokens"]
        config.set_eos_token_id(self.tokenizer.get_eos_token_id())
        if body.get("ignore_eos"):
            config.ignore_eos, config.min_new_tokens, config.stop_token_ids = True, body["max_tokens"], set()
        if body.get("temperature", 1.0) > 0:
            config.do_sample, config.temperature = True, body.get("temperature", 1.0)
            config.top_p, config.rng_seed = body.get("top_p", 1.0), body.get("seed", 0)
            if body.get("top_k") is not None:
                config.top_k = body["top_k"]
        ids = openvino.Tensor(numpy.array([job.ids], dtype=numpy.int64))
        return self.pipeline.add_request(number, ids, config)

    def _read(self, handle: Any, job: Job) -> bool:
        """Tells what has come; whether that was all."""
        if job.left.is_set():
            handle.cancel()
            return True
        reason = ""
        while handle.can_read():
            for output in handle.read().values():
                job.tell(list(output.generated_ids))
                reason = getattr(output.finish_reason, "name", str(output.finish_reason)).lower()
        if "RUNNING" in str(handle.get_status()):
            return False
        job.tell("length" if "length" in reason else "stop")
        return True


class Words:
    """Tokens as text, piece by piece; half a character waits for its rest."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: Ids = []
        self._said = ""

    def add(self, ids: Ids) -> str:
        """What these add."""
        self._ids += ids
        text = str(self._tokenizer.decode(self._ids))
        if text.endswith("\ufffd") and len(self._ids) < 2 * WINDOW:
            return ""
        new, self._said = text[len(self._said) :], text
        if len(self._ids) > WINDOW:
            self._ids = self._ids[-1:]
            self._said = str(self._tokenizer.decode(self._ids))
        return new


class Server:
    """The HTTP of it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (line := await reader.readline()).strip():
                length = 0
                while (header := await reader.readline()).strip():
                    if header.lower().startswith(b"content-length:"):
                        length = int(header.split(b":")[1])
                content = await reader.readexactly(length)
                try:
                    await self._answer(line.split()[1].decode(), content, reader, writer)
                except Refused as refusal:
                    error = {"error": {"message": str(refusal), "type": "invalid_request_error"}}
                    self._whole(writer, refusal.status, json.dumps(error))
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, ValueError, IndexError):
            pass  # it hung up, or what it said was no HTTP
        finally:
            writer.close()

    async def _answer(
        self, path: str, content: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if path == "/health":
            self._whole(writer, 200 if self.engine.ready.is_set() else 503, "{}")
        elif path == "/v1/models":
            data = [{"id": self.engine.options.served, "object": "model", "owned_by": "openvino"}]
            self._whole(writer, 200, json.dumps({"object": "list", "data": data}))
        elif path == "/metrics":
            names = ("openvino_requests_running", "openvino_requests_waiting", "openvino_cache_usage")
            told = "".join(f"{name} {value}\n" for name, value in zip(names, self.engine.gauges, strict=True))
            self._whole(writer, 200, told, "text/plain")
        elif path in ("/v1/completions", "/v1/chat/completions"):
            await self._complete("chat" in path, self._checked(content), reader, writer)
        else:
            raise Refused(404, f"there is no {path}")

    def _checked(self, content: bytes) -> dict[str, Any]:
        if not self.engine.ready.is_set():
            raise Refused(503, "the model is being loaded")
        try:
            body = json.loads(content)
        except ValueError as error:
            raise Refused(400, f"the body is no JSON: {error}") from error
        unknown = sorted(set(body) - PARAMETERS)
        if unknown:
            raise Refused(400, f"this server does not know {', '.join(unknown)}")
        if not body.get("stream") or not isinstance(body.get("max_tokens"), int):
            raise Refused(400, "this server streams, and wants max_tokens")
        return dict(body)

    def _ids(self, chat: bool, body: dict[str, Any]) -> Ids:
        if isinstance(body.get("prompt"), list):
            return list(body["prompt"])
        tokenizer = self.engine.tokenizer
        text = tokenizer.apply_chat_template(body["messages"], True) if chat else body["prompt"]
        return [int(one) for one in tokenizer.encode(text, add_special_tokens=not chat).input_ids.data[0]]

    async def _complete(
        self, chat: bool, body: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            ids = self._ids(chat, body)
        except Exception as error:
            raise Refused(400, f"that prompt cannot be read: {error}") from error
        loop, told = asyncio.get_running_loop(), asyncio.Queue[Ids | str | Exception]()

        def tell(news: Ids | str | Exception) -> None:
            loop.call_soon_threadsafe(told.put_nowait, news)

        job = Job(ids, body, tell, threading.Event())
        self.engine.inbox.put(job)
        news = await told.get()
        if isinstance(news, Exception):
            raise Refused(400, str(news))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        words, count = Words(self.engine.tokenizer), 0
        try:
            while not isinstance(news, str):
                if isinstance(news, Exception):
                    self._event(writer, {"error": {"message": str(news)}})
                    return
                count += len(news)
                self._event(writer, self._piece(chat, words.add(news), None))
                await writer.drain()
                if reader.at_eof() or writer.is_closing():
                    raise ConnectionResetError
                news = await told.get()
        finally:
            job.left.set()
        usage = {"prompt_tokens": len(ids), "completion_tokens": count, "total_tokens": len(ids) + count}
        self._event(writer, self._piece(chat, "", news))
        self._event(writer, {"choices": [], "usage": usage})
        self._chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")

    def _piece(self, chat: bool, text: str, finish: str | None) -> dict[str, Any]:
        said: dict[str, Any] = {"delta": {"content": text}} if chat else {"text": text}
        return {"choices": [{"index": 0, "finish_reason": finish, **said}]}

    def _event(self, writer: asyncio.StreamWriter, data: dict[str, Any]) -> None:
        self._chunk(writer, b"data: " + json.dumps(data).encode() + b"\n\n")

    def _chunk(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(b"%x\r\n%b\r\n" % (len(data), data))

    def _whole(self, writer: asyncio.StreamWriter, status: int, text: str, kind: str = "application/json") -> None:
        content = text.encode()
        head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + content)


async def serve(options: argparse.Namespace) -> None:
    """Until SIGTERM or SIGINT."""
    engine = Engine(options)
    engine.start()
    server = await asyncio.start_server(Server(engine).handle, "127.0.0.1", options.port, limit=1 << 24)
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with server:
        await stopped.wait()
    os._exit(0)  # the pipeline's threads are not waited for


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a .gguf file, or a folder with openvino_model.xml")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--served", default="model", help="the model's name in requests")
    parser.add_argument("--parallel", type=int, help="most requests in a step (max_num_seqs)")
    parser.add_argument("--kv-tokens", type=int, help="tokens of the KV cache; it grows by itself where none are given")
    parser.add_argument("--threads", type=int, help="INFERENCE_NUM_THREADS")
    parser.add_argument("--precision", help="INFERENCE_PRECISION_HINT")
    parser.add_argument("--device", default="CPU")
    parser.add_argument("--prefix-cache", action=argparse.BooleanOptionalAction)
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
