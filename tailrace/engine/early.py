"""An engine process that starts before its settings are known: `python -m tailrace.engine.early`.

Interpreter and imports are most of an engine's start, and need no settings. So the command line starts one of these at
once, works out what is to be served meanwhile, and hands it over: one line on the process's standard input. Where that
closes without a line the process ends. Light at import: this is the first thing that `tailrace serve` loads.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tailrace.engine.spec import EngineSpec
    from tailrace.engine.supervisor import EngineProcess


def begin() -> subprocess.Popen[bytes]:
    """Starts a process that waits for `hand_over`, in a session of its own (see `supervisor.spawn`)."""
    command = [sys.executable, "-m", "tailrace.engine.early"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def hand_over(process: subprocess.Popen[bytes], spec: EngineSpec) -> EngineProcess:
    """Tells the process what to serve; from here on it is an engine like any other. A process that has ended by now is
    handed over all the same: its supervisor notices and starts another."""
    import contextlib
    import json
    import time
    from dataclasses import asdict

    from tailrace.engine.supervisor import EngineProcess, private_directory

    directory, now = private_directory(), time.monotonic()
    arguments = [json.dumps(asdict(spec)), directory, str(os.getpid()), repr(now)]
    with contextlib.suppress(BrokenPipeError):
        assert process.stdin is not None
        process.stdin.write(json.dumps(arguments).encode() + b"\n")
        process.stdin.close()
    return EngineProcess(process, directory, now)


def give_up(process: subprocess.Popen[bytes]) -> None:
    """Ends a process that got nothing to serve."""
    process.kill()
    process.communicate()


def _main() -> int:
    """Imports what the usual engine needs, waits for the line, and is the engine."""
    import json
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from tailrace.engine import process

    _import_ahead()
    line = sys.stdin.readline()
    return process.main(json.loads(line)) if line.endswith("\n") else 0


def _import_ahead() -> None:
    """What `engine.loading` will import; a failure is its to report."""
    import contextlib
    import importlib

    for name in ("engine.loading", "engine.assets", "engine.core", "models.load", "models.prepared", "backends.cpu",
                 "native._kernels"):  # fmt: skip
        with contextlib.suppress(ImportError):
            importlib.import_module(f"tailrace.{name}")


if __name__ == "__main__":
    status = _main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # as in `process`
