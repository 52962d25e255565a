"""What drafts give: one request, streamed through HTTP, by a server with drafts and by one without, in turns.

loop   32 random token ids, 128 tokens out: small models fall into loops on such
quote  an instruction with four sentences that it asks to be repeated, 128 out
chat   ordinary questions, 128 out
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import signal
import statistics
import time
import urllib.request

from bench import serve

TOKENS = 128
SENTENCES = (
    "The mill stood where the river left the hills.", "Its wheel had turned for two hundred years.",
    "In spring the water came brown and fast.", "In summer children swam below the weir.",
    "The miller's daughter kept the books.", "She wrote down every sack and every farthing.",
    "Nobody remembered who had built the first dam.", "The stones were older than the church.",
    "At night one could hear the tailrace from the road.", "It never froze, not even in the coldest year.",
)  # fmt: skip
QUESTIONS = (
    "What is a river?", "How does a steam engine work?", "Write a short story about a lighthouse.",
    "Why is the sky blue?", "Give me advice for a first job interview.", "How do I bake bread?",
    "Explain what a prime number is.", "What should I see in Rome?",
)  # fmt: skip
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"


def body(kind: str, rng: random.Random) -> dict[str, object]:
    """A request of this kind, without its model."""
    fixed = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    if kind == "loop":
        return fixed | {"prompt": serve.ids(32, rng)}
    if kind == "quote":
        text = " ".join(rng.sample(SENTENCES, 4))
        return fixed | {"messages": [{"role": "user", "content": f"Repeat this text word for word, twice:\n\n{text}"}]}
    return fixed | {"messages": [{"role": "user", "content": rng.choice(QUESTIONS)}]}


def seconds(server: serve.Server, made: dict[str, object]) -> float:
    """From the first token to the last."""
    path = "/v1/chat/completions" if "messages" in made else "/v1/completions"
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=600)
    try:
        asked = json.dumps(made | {"model": server.model})
        connection.request("POST", path, asked, {"Content-Type": "application/json"})
        came = [time.perf_counter() for line in connection.getresponse() if line.startswith(b'data: {"')]
        return came[-1] - came[0]
    finally:
        connection.close()


def accepted(server: serve.Server) -> float:
    """Tokens of drafts that came true, ever."""
    text = urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10).read().decode()
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(ACCEPTED))


def run(command: str, repeats: int) -> None:
    """Prints the table. `command` serves without drafts."""
    rng = random.Random(time.time_ns())
    took: dict[str, list[tuple[float, float]]] = {"loop": [], "quote": [], "chat": []}
    shares: dict[str, list[float]] = {kind: [] for kind in took}
    with contextlib.ExitStack() as stack:
        servers = []
        for extra in (" --draft-tokens 0", ""):
            servers.append(serve.Server(f"server{extra}", command + extra))
            stack.callback(servers[-1].stop)
        for server in servers:
            server.signal(signal.SIGSTOP)
        for _ in range(repeats):
            for kind, found in took.items():
                made = body(kind, rng)
                pair = []
                for server in servers:
                    server.signal(signal.SIGCONT)
                    seconds(server, made | {"max_tokens": 2})  # it has been asleep
                    before = accepted(server)
                    pair.append(seconds(server, made))
                    share = (accepted(server) - before) / TOKENS
                    server.signal(signal.SIGSTOP)
                shares[kind].append(share)
                found.append((pair[0], pair[1]))
    print(f"{'':8}{'without':>12}{'with':>12}{'quicker':>10}   pairs            of drafts")
    for kind, found in took.items():
        ratios = sorted(a / b for a, b in found)
        rates = [(TOKENS - 1) / statistics.median(times) for times in zip(*found, strict=True)]
        drafted = statistics.median(shares[kind])
        print(
            f"{kind:8}{rates[0]:8.0f} t/s{rates[1]:8.0f} t/s{statistics.median(ratios):9.2f}x"
            f"   {ratios[0]:.2f} to {ratios[-1]:.2f}{drafted:13.0%}"
        )
