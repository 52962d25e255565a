"""`make soak`: thousands of mixed requests against a real server; pages and memory must come back to where they were.

Streams and not, several answers, stop strings, errors, clients that leave in the middle. Every round ends idle: no
request may be running or waiting, no page in use, and memory may not keep growing.

--tiers   a pool that is too small for what runs, and KV on disk: sessions that come back from there, long answers that
          preempt each other, aborts. The same request must get the same answer every time.
--valkey  the same with a Valkey server in place of the disk; with --faults it is killed, and what is in it spoilt, too.
--faults  the same, and in each round the engine, in every fifth the server, is killed in the middle of it, and files of
          the tier are changed, cut short and deleted. Requests may fail with 503 or break off; no answer may be wrong.

--crowd N  rounds of N clients at once, most of them slow, vanishing or malformed; those that behave must get what they
           get alone.

`--model stand` serves the tests' stand-in without a model: quick, and mistakes with pages are wrong tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import hashlib
import http.client
import json
import os
import random
import shlex
import signal
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

if __name__ == "__main__":  # run as a script: the project's root is one up
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import crowd, valkeyserver
from bench.serve import Server

WORDS = ("river", "turbine", "water", "channel", "power", "tail", "wheel", "gate", "mill", "dam", "weir", "sluice")
ROUND = 200
"""Requests until the server is looked at."""
SESSIONS = 60
"""Sessions that come and go in the tiers' soak."""
SERIES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:num_preemptions_total",
    'tailrace_kv_hit_tokens_total{tier="ram"}',
    'tailrace_kv_hit_tokens_total{tier="disk"}',
    'tailrace_kv_hit_tokens_total{tier="valkey"}',
    'tailrace_kv_resumed_tokens_total{source="tier"}',
    "tailrace_kv_disk_pages",
    "tailrace_kv_disk_dropped_total",
    "tailrace_kv_disk_requeued_total",
    "tailrace_kv_disk_misses_total",
    "tailrace_kv_valkey_pages",
    "tailrace_kv_valkey_misses_total",
    "tailrace_engine_restarts_total",
)


def body(rng: random.Random) -> dict[str, object]:
    """A random request, sometimes a wrong one."""
    prompt = " ".join(rng.choices(WORDS, k=rng.choice([1, 5, 30, 200])))
    made: dict[str, object] = {"prompt": prompt, "max_tokens": rng.choice([1, 5, 20, 60]), "seed": rng.randrange(99)}
    made["temperature"] = rng.choice([0, 0.8, 1.3])
    extras: list[dict[str, object]] = [
        {}, {"n": 2}, {"stop": ["the", "a"]}, {"logprobs": 3}, {"echo": True}, {"ignore_eos": True},
        {"presence_penalty": 0.5}, {"top_p": 0.9}, {"prompt": ""}, {"temperature": -1}, {"max_tokens": 10**9},
    ]  # fmt: skip
    return made | rng.choice(extras)


def session(rng: random.Random) -> dict[str, object]:
    """A turn of one of the sessions: the same few turns come again and again, so that answers can be compared."""
    number = rng.randrange(SESSIONS)
    own = random.Random(number)
    ids = [own.randrange(100, 400) for _ in range(own.choice([40, 150, 400]))]
    turn = rng.randrange(3)
    ids += [own.randrange(100, 400) for _ in range(20 * turn)]
    long = number % 6 == 0
    return {"prompt": ids, "max_tokens": 120 if long else own.choice([1, 2, 8]), "seed": number, "ignore_eos": True,
            "temperature": own.choice([0, 0.8])}  # fmt: skip


class Answers:
    """What each request was answered at first; whatever else it is answered later is wrong."""

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self._known: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def take(self, asked: str, text: str) -> None:
        digest = hashlib.sha256(text.encode()).digest()
        with self._lock:
            if self._known.setdefault(asked, digest) != digest:
                self.wrong.append(f"{asked[:80]}... was answered differently: {text[:80]!r}")


def one(port: int, model: str, rng: random.Random, answers: Answers | None = None) -> str:
    """Sends one; "left" when this client went away in the middle, else the status."""
    stream = rng.random() < 0.5
    leaves = rng.random() < 0.15
    asked = json.dumps((body(rng) if answers is None else session(rng)) | {"model": model})
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request(
            "POST",
            "/v1/completions",
            json.dumps(json.loads(asked) | {"stream": stream}),
            {"Content-Type": "application/json"},
        )
        if leaves and not stream:
            return "left"
        response = connection.getresponse()
        if leaves:
            response.read(40)
            return "left"
        content = response.read()
        if answers is not None and response.status == 200:
            text = text_of(content, stream=stream)
            if text is None:
                return "broken off"
            answers.take(asked, text)
        return str(response.status)
    finally:
        connection.close()


def text_of(content: bytes, *, stream: bool) -> str | None:
    """The text of an answer; None where it ended with an error."""
    if not stream:
        return str(json.loads(content)["choices"][0]["text"])
    chunks = [line[6:] for line in content.split(b"\n") if line.startswith(b"data: ")]
    if not chunks or chunks[-1] != b"[DONE]":
        return None
    pieces = [json.loads(chunk) for chunk in chunks[:-1]]
    if any("error" in piece for piece in pieces):
        return None
    return "".join(choice["text"] for piece in pieces for choice in piece.get("choices", ()))


def gauges(port: int) -> dict[str, float]:
    """Running and waiting requests, the share of KV in use, and what the tiers did, from /metrics."""
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
    found = dict.fromkeys(SERIES, 0.0)
    for line in text.splitlines():
        for name in SERIES:
            if line.startswith(name) and line[len(name)] in " {":
                found[name] += float(line.split()[-1])
    return found


def settle(port: int) -> dict[str, float]:
    """The gauges once nothing runs and no page is held; AssertionError when that takes more than ten seconds. What was
    being loaded for a client that has left holds its pages until that has ended, and the next heartbeat says so."""
    for _ in range(200):
        now = gauges(port)
        if not any(now[name] for name in SERIES[:3]):
            return now
        time.sleep(0.05)
    raise AssertionError(f"not idle, or pages are missing: {now}")


def children(pid: int) -> list[int]:
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


class Faults:
    """Harm in the middle of a round, on a thread of its own."""

    def __init__(self, rng: random.Random, folder: Path, shared: valkeyserver.Server | None) -> None:
        self._rng = rng
        self._folder = folder
        self._shared = shared
        self.kinds: collections.Counter[str] = collections.Counter()

    @contextlib.contextmanager
    def during(self, server: Server, *, kill_server: bool) -> Iterator[None]:
        """Kills the engine or the server once, and the Valkey server, which starts again, and spoils files, while the
        block runs."""
        ended = threading.Event()

        def harm() -> None:
            while not ended.wait(0.2):
                self._spoil()

        thread = threading.Thread(target=harm)
        thread.start()
        timer = threading.Timer(self._rng.uniform(0.3, 2.0), self._kill, (server, kill_server))
        timers = [timer]
        if self._shared is not None:
            timers.append(threading.Timer(self._rng.uniform(0.3, 2.0), self._restart, (self._shared,)))
        for one in timers:
            one.start()
        try:
            yield
        finally:
            ended.set()
            for one in timers:
                one.join()  # each round has its kills, however short it was
            thread.join()

    def _restart(self, shared: valkeyserver.Server) -> None:
        shared.kill()
        time.sleep(self._rng.uniform(0.0, 1.0))
        shared.start()
        self.kinds["Valkey killed"] += 1

    def _kill(self, server: Server, whole: bool) -> None:
        pids = [server.process.pid] if whole else children(server.process.pid)[:1]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self.kinds["servers killed" if whole else "engines killed"] += 1

    def _spoil(self) -> None:
        if self._shared is not None:
            self._spoil_shared(self._shared)
        files = [path for path in self._folder.iterdir() if path.suffix in (".seg", ".idx")]
        for path in self._rng.sample(files, min(1, len(files))):  # it has many pages
            with contextlib.suppress(FileNotFoundError):
                kind = self._rng.choice(["deleted", "cut", "changed"])
                if kind == "deleted":
                    path.unlink()
                elif kind == "cut":
                    os.truncate(path, self._rng.randrange(path.stat().st_size + 1))
                else:
                    with open(path, "r+b") as file:
                        file.seek(self._rng.randrange(max(1, path.stat().st_size)))
                        file.write(bytes([self._rng.randrange(256)]))
                self.kinds[f"files {kind}"] += 1

    def _spoil_shared(self, shared: valkeyserver.Server) -> None:
        from valkey.exceptions import ValkeyError

        with contextlib.suppress(ValkeyError), shared.client() as client:
            if (name := client.randomkey()) is None:
                return
            kind, size = self._rng.choice(["deleted", "cut", "changed"]), client.strlen(name)
            if kind == "deleted":
                client.delete(name)
            elif kind == "cut":
                client.set(name, client.getrange(name, 0, self._rng.randrange(max(1, size))))
            else:
                client.setrange(name, self._rng.randrange(max(1, size)), bytes([self._rng.randrange(256)]))
            self.kinds[f"values {kind}"] += 1


def healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
            return True
    except OSError:
        return False


def command_of(args: argparse.Namespace, folder: Path, shared: valkeyserver.Server | None) -> str:
    """The server's command line."""
    if args.model == "stand":
        settings: dict[str, object] = {
            "model": "stand",
            "port": 0,
            "loader": "tests.api.stand:load",
            "log_requests": False,
        }
        if args.tiers:
            settings |= {"loader": "tests.api.stand:load_eager", "kv_tokens": 1024, "max_context": 700}
            if shared is not None:
                settings |= {"kv_valkey": shared.url, "kv_key_file": str(valkeyserver.key_beside(shared))}
            else:
                settings |= {"kv_disk": str(folder), "kv_disk_bytes": 8 << 20}
        text = json.dumps(settings).replace("{", "{{").replace("}", "}}").replace('"port": 0', '"port": {port}')
        return f"{sys.executable} -m tests.api.serve {shlex.quote(text)}"
    sizes = "--kv-tokens 4096 --max-context 2048"
    if args.tiers:
        disk = f"--kv-disk {shlex.quote(str(folder))} --kv-disk-bytes 256MiB"
        sizes = f"--kv-tokens 1024 --max-context 700 {disk if shared is None else valkeyserver.shared_by(shared)}"
    return f"{sys.executable} -m tailrace.cli serve {args.model} --port {{port}} {sizes}"


def crowds(args: argparse.Namespace, server: Server) -> None:
    """Rounds of a crowd at once. AssertionError where one client was treated wrongly, or something stays behind."""
    place = crowd.Place(server.port, server.model, patience=600.0)
    memory = []
    print(f"{'clients':>9}{'memory MB':>11}{'files':>7}{'seconds':>9}  answers")
    for seed in range(max(3, args.requests // args.crowd)):
        begin = time.monotonic()
        ends = asyncio.run(crowd.crowd(place, args.crowd, seed))
        settle(server.port)
        memory.append(server.memory())
        total = sum(map(collections.Counter, ends.values()), collections.Counter())
        files = len(os.listdir(f"/proc/{server.process.pid}/fd"))
        spent = time.monotonic() - begin
        print(
            f"{args.crowd * (seed + 1):9}{memory[-1]:11.0f}{files:7}{spent:9.1f}  {dict(sorted(total.items()))}",
            flush=True,
        )
        assert not crowd.amiss(place, ends), crowd.amiss(place, ends)
    assert files < 64, "connections stay open"
    assert memory[-1] < 1.05 * memory[1], "memory keeps growing"


class Soak:
    """The rounds, and what was counted in them."""

    def __init__(self, args: argparse.Namespace, folder: Path, shared: valkeyserver.Server | None) -> None:
        self.args = args
        self.counts: collections.Counter[str] = collections.Counter()
        self.answers = Answers() if args.tiers else None
        self.faults = Faults(random.Random(args.seed), folder, shared) if args.faults else None
        other = "disk" if args.valkey else "valkey"
        self._series = [name for name in SERIES[3:] if other not in name]
        self._command = command_of(args, folder, shared)
        self.server = self._start()
        settle(self.server.port)

    def _start(self) -> Server:
        return Server("soak", self._command, below=400)

    def client(self, number: int, count: int) -> None:
        """So many requests, one after the other."""
        rng = random.Random(self.args.seed * 1_000_003 + number)
        for _ in range(count):
            try:
                answer = one(self.server.port, self.server.model, rng, self.answers)
            except (OSError, http.client.HTTPException) as error:
                if self.faults is None or isinstance(error, TimeoutError):
                    answer = f"no answer: {error!r}"
                else:
                    answer = "broken off"
                    time.sleep(0.02)
            self.counts[answer] += 1

    def round(self, number: int, done: int, share: int) -> None:
        """`share` requests from all clients; then the server must be as it was."""
        clients = self.args.clients
        threads = [
            threading.Thread(target=self.client, args=(done + i, share // clients + (i < share % clients)))
            for i in range(clients)
        ]
        kill_server = self.faults is not None and number % 5 == 4
        with self.faults.during(self.server, kill_server=kill_server) if self.faults else contextlib.nullcontext():
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if kill_server:
            self.server.stop()
            self.server = self._start()
        for _ in range(600):
            if healthy(self.server.port):
                break
            time.sleep(0.05)
        now = settle(self.server.port)
        assert self.answers is None or not self.answers.wrong, self.answers.wrong[:3]
        print(f"{done + share:9}{self.server.memory():11.0f}  {dict(sorted(self.counts.items()))}", flush=True)
        self._tell(now)

    def _tell(self, now: dict[str, float]) -> None:
        if self.answers is not None:
            told = {name.removeprefix("tailrace_kv_").removeprefix("vllm:"): int(now[name]) for name in self._series}
            print(f"{'':20}  {told}{dict(self.faults.kinds) if self.faults else ''}", flush=True)

    def judge(self) -> None:
        """AssertionError where too little was answered, or too much went wrong."""
        done = sum(self.counts.values())
        assert self.counts["200"] > done / 3, "hardly anything was answered"
        assert not any(name.startswith("no answer") for name in self.counts), "a request was never answered"
        if self.faults is None:
            assert not any(name.startswith("5") for name in self.counts), "a request failed on the server's side"
        else:
            failures = {name for name in self.counts if name.startswith("5")}
            assert failures <= {"503"}, f"a request failed otherwise than with 503: {failures}"
        if self.answers is not None and self.faults is None:
            last = settle(self.server.port)
            for name in self._series[:4]:
                assert last[name] > 0, f"{name} is 0: the soak did not show what it is for"


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default="smollm2-135m")
    p.add_argument("--requests", type=int, default=4000)
    p.add_argument("--clients", type=int, default=12)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--tiers", action="store_true", help="a small pool, KV on disk, sessions that come back")
    p.add_argument("--valkey", action="store_true", help="with a Valkey server in place of the disk; implies --tiers")
    p.add_argument("--faults", action="store_true", help="with processes killed and files harmed; implies --tiers")
    p.add_argument("--crowd", type=int, default=0, metavar="N", help="so many clients at once, most of them bad ones")
    args = p.parse_args()
    args.tiers = args.tiers or args.faults or args.valkey
    os.chdir(Path(__file__).resolve().parent.parent)
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder, shared = Path(name), None
        if args.crowd:
            server = Server("soak", command_of(args, folder, shared), below=400)
            try:
                crowds(args, server)
            finally:
                server.stop()
            return
        if args.valkey:
            shared = stack.enter_context(contextlib.closing(valkeyserver.Server(folder, "--maxmemory", "2gb")))
            print(valkeyserver.version())
        soak = Soak(args, folder, shared)
        try:
            done, number = 0, 0
            print(f"{'requests':>9}{'memory MB':>11}  answers")
            while done < args.requests:
                share = min(ROUND, args.requests - done)
                soak.round(number, done, share)
                done, number = done + share, number + 1
            soak.judge()
        finally:
            soak.server.stop()


if __name__ == "__main__":
    main()
