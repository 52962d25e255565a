"""`tailrace chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from typing import Annotated, Any, NamedTuple

import typer

from tailrace.cli import local, output
from tailrace.cli.client import Client, CutOff, ServerError
from tailrace.cli.options import CHAT_TEMPLATE_HELP, LORA_HELP, QUANTIZE_HELP, Quantize, adapter_of
from tailrace.cli.pull import complete
from tailrace.terms import TailraceError

HELP = """/help            this
/system TEXT     set the system message and start over (without TEXT: show it)
/reset           forget the conversation
/exit            leave (so does Ctrl-D)
Ctrl-C           stop the answer"""


def command(
    model: Annotated[
        str | None, typer.Argument(help="A known name or a path. Default: what the running server has.",
                                   autocompletion=complete)
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="A running server. Default: the one on port 8000, else one is started.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy. Default: the server's.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus: keep the likeliest tokens up to this mass.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer. Default: what the context leaves.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed and conversation give the same answer.")] = None,
    quantize: Annotated[Quantize | None, typer.Option(help=QUANTIZE_HELP)] = None,
    lora: Annotated[str | None, typer.Option(help=LORA_HELP, metavar="DIR")] = None,
    chat_template: Annotated[str | None, typer.Option(help=CHAT_TEMPLATE_HELP, metavar="NAME|FILE")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="TAILRACE_API_KEY", show_envvar=True, help="The server's key.")
    ] = None,
) -> None:  # fmt: skip
    """Talk to a model in the terminal.

    Talks to the server that runs, or starts one for the time of the chat.
    After each answer: time to first token, output tokens per second, tokens.
    Commands: /help /system /reset /exit.

    [bold]Examples[/bold]

      tailrace chat
      tailrace chat smollm2-135m --system "Answer in one sentence."
      echo "What is a tailrace?" | tailrace chat --temperature 0
    """
    sampling = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens, "seed": seed}
    parameters = {name: value for name, value in sampling.items() if value is not None}
    adapter = adapter_of(lora)
    with local.connected(
        url, model, api_key, _note, quantize=quantize and quantize.value, lora=adapter, chat_template=chat_template
    ) as client:
        served = client.models()
        name = adapter[0] if adapter else model if model in served else served[0]
        chat = Chat(client, name, parameters, system)
        raise typer.Exit(chat.run())


class Stats(NamedTuple):
    """Of one answer: seconds to the first token and to the last, and tokens as the server counts them."""

    first: float
    last: float
    prompt_tokens: int
    tokens: int
    cached_tokens: int
    finish: str | None

    def line(self) -> str:
        """For people. The rate is that of the tokens after the first (1 / TPOT)."""
        parts = [f"TTFT {output.seconds(self.first)}"]
        if self.tokens > 1 and self.last > self.first:
            parts.append(f"{(self.tokens - 1) / (self.last - self.first):.1f} tokens/s")
        parts.append(f"{self.tokens} tokens in {output.seconds(self.last)}")
        cached = f", {self.cached_tokens} cached" if self.cached_tokens else ""
        parts.append(f"prompt {self.prompt_tokens}{cached}")
        if self.finish == "length":
            parts.append("cut at the length limit")
        return " · ".join(parts)


class Chat:
    """The conversation: its messages, and what is done with each line typed."""

    def __init__(self, client: Client, model: str, parameters: dict[str, Any], system: str | None) -> None:
        from rich.console import Console

        self._client, self._model, self._parameters = client, model, parameters
        self._system = system
        self._messages: list[dict[str, str]] = []
        self._out, self._err = Console(highlight=False), Console(stderr=True, highlight=False)
        self._interactive = sys.stdin.isatty()
        self._failed = False
        self._reasoning = False  # some has been shown, and the answer has not begun

    def run(self) -> int:
        """Until the input ends. 1 when, without a terminal, an answer failed."""
        if self._interactive:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 - gives input() editing and history
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have us started with it ignored
            self._err.print(f"[bold]{self._model}[/bold] at {self._client.url} · /help for commands", style="dim")
        while (line := self._read()) is not None:
            if line.startswith("/"):
                if not self._obey(line):
                    break
            elif line.strip():
                self._answer(line)
        return 1 if self._failed and not self._interactive else 0

    def _read(self) -> str | None:
        """The next line; None at the end. Ctrl-C drops a half-typed line."""
        while True:
            try:
                return input("> " if self._interactive else "")
            except EOFError:
                return None
            except KeyboardInterrupt:
                if not self._interactive:
                    return None
                print()

    def _obey(self, line: str) -> bool:
        """Runs a command; False ends the chat."""
        verb, _, rest = line.strip().partition(" ")
        if verb in ("/exit", "/quit"):
            return False
        if verb == "/reset":
            self._messages.clear()
            self._tell("Forgotten.")
        elif verb == "/system":
            self._set_system(rest.strip())
        elif verb == "/help":
            self._tell(HELP)
        else:
            self._tell(f"There is no {verb}.\n{HELP}")
        return True

    def _set_system(self, text: str) -> None:
        if text:
            self._system = text
            self._messages.clear()
            self._tell("System message set; the conversation starts over.")
        else:
            self._tell(f"System message: {self._system}" if self._system else "There is no system message.")

    def _answer(self, question: str) -> None:
        """Streams one answer. What was said before a stop or a failure in the middle stays in the conversation."""
        self._reasoning = False
        self._messages.append({"role": "user", "content": question})
        said: list[str] = []
        try:
            stats = self._stream(said)
        except KeyboardInterrupt:
            self._end_line()
            self._tell("Stopped.")
        except (TailraceError, ValueError) as error:
            self._end_line() if said else None
            self._failed = True
            self._err.print(f"[bold red]error:[/bold red] {_plain(str(error))}", soft_wrap=True)
            if isinstance(error, ServerError) and error.status == 400 and "context" in str(error):
                self._tell("The conversation may be too long by now: /reset starts over.")
        else:
            self._end_line()
            self._tell(stats.line())
        if said:
            self._messages.append({"role": "assistant", "content": "".join(said)})
        else:
            self._messages.pop()

    def _stream(self, said: list[str]) -> Stats:
        system = [{"role": "system", "content": self._system}] if self._system else []
        body = {"model": self._model, "messages": system + self._messages, **self._parameters,
                "stream_options": {"include_usage": True}}  # fmt: skip
        sent, first, last, finish = time.monotonic(), 0.0, 0.0, None
        usage: dict[str, Any] = {}
        with contextlib.closing(self._client.stream("/v1/chat/completions", body)) as chunks:
            for chunk in chunks:
                usage = chunk.get("usage") or usage
                for choice in chunk.get("choices", ()):
                    finish = choice.get("finish_reason") or finish
                    delta = choice.get("delta") or {}
                    text, reasoning = delta.get("content"), delta.get("reasoning_content")
                    if text or reasoning:
                        last = time.monotonic() - sent
                        first = first or last
                    if reasoning:
                        self._reason(reasoning)
                    if text:
                        self._end_reasoning()
                        said.append(text)
                        self._write(text)
        self._end_reasoning()
        if finish is None:
            raise CutOff("the answer ended without saying why")
        details = usage.get("prompt_tokens_details") or {}
        return Stats(first, last, usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0),
                     details.get("cached_tokens") or 0, finish)  # fmt: skip

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def _reason(self, text: str) -> None:
        """Reasoning is shown beside the answer, not as a part of it."""
        self._reasoning = True
        self._err.print(_plain(text), style="dim", end="", soft_wrap=True)

    def _end_reasoning(self) -> None:
        if self._reasoning:
            self._reasoning = False
            self._err.print("\n")

    def _end_line(self) -> None:
        self._write("\n")

    def _tell(self, text: str) -> None:
        self._err.print(_plain(text), style="dim", soft_wrap=True)


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
