"""OpenVINO GenAI's continuous batching pipeline. It has no server: `servers/openvino_server.py` is one, and runs in its
interpreter."""

from __future__ import annotations

from pathlib import Path

from tailrace.deploy.engines import finding
from tailrace.deploy.engines.driver import Command, Found, Gauges, Options, flags, is_gguf

SERVER = Path(__file__).parents[1] / "servers" / "openvino_server.py"


class _Openvino:
    name = "openvino"
    formats = "a .gguf file, or a folder with openvino_model.xml"
    gauges = Gauges(running=("openvino_requests_running",), waiting=("openvino_requests_waiting",),
                    kv_use=("openvino_cache_usage",))  # fmt: skip

    def find(self, given: str | None) -> Found:
        names = ("openvino-genai", "openvino_genai")
        found = finding.package(self.name, given, "openvino_genai", names, "openvino-genai")
        return Found((found.python, str(SERVER)), found.version, found.python, found.python)

    def unfit(self, model: str) -> str | None:
        if is_gguf(model) or (Path(model).expanduser() / "openvino_model.xml").is_file():
            return None
        return f"{self.name} takes {self.formats}, and {model} is none"

    def command(self, found: Found, options: Options, port: int) -> Command:
        cache = {None: (), True: ("--prefix-cache",), False: ("--no-prefix-cache",)}[options.prefix_cache]
        told = flags(
            {
                "--port": port, "--served": options.served, "--parallel": options.parallel,
                "--threads": options.threads, "--precision": options.dtype,
            }
        )  # fmt: skip
        argv = (*found.argv, str(Path(options.model).expanduser()), *told, *cache, *options.extra)
        return Command(self.name, argv, port, options.served, env=finding.environment(found.python or ""))


DRIVER = _Openvino()
