"""Where engines are: programs on PATH, packages of this interpreter or of another."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tailrace.deploy.engines.driver import NotFound

PATIENCE = 60.0
"""Seconds that an engine may take to tell its version."""

FOREIGN: Mapping[str, str | None] = dict.fromkeys(("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV"))
"""What is taken out of the environment of another interpreter: it is about this one."""

_QUESTION = """
import importlib.metadata as metadata, importlib.util as util, json, sys
module, *distributions = sys.argv[1:]
found = {"there": util.find_spec(module) is not None, "distribution": "", "version": ""}
for name in distributions:
    try:
        found.update(distribution=name, version=metadata.version(name))
        break
    except metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


class Package:
    """A Python package in an interpreter: `distribution` is the name that it was installed by."""

    def __init__(self, python: str, distribution: str, version: str) -> None:
        self.python, self.distribution, self.version = python, distribution, version


def package(name: str, given: str | None, module: str, distributions: Sequence[str], program: str) -> Package:
    """The package `module` of the engine `name`: where that was given, in the interpreter of its `program` on PATH, or
    in this interpreter. Raises NotFound."""
    if given is not None:
        python = _interpreter(name, given)
        found = _ask(python, module, distributions)
        if found is None:
            raise NotFound(f"{name}: {python} has no module {module}")
        return found
    on_path = shutil.which(program)
    candidates = [_beside(on_path)] if on_path is not None else []
    for python in filter(None, [*candidates, sys.executable]):
        if (found := _ask(python, module, distributions)) is not None:
            return found
    raise NotFound(
        f"{name} is not installed: no {program} on PATH, no module {module} in {sys.executable}. Where it is "
        f"elsewhere: --engine-path {name}=PATH (a virtual environment, its python or its {program})"
    )


def program(name: str, given: str | None, called: str) -> str:
    """The executable of an engine that is a program: where that was given (itself, or a folder that it is in), or on
    PATH. Raises NotFound."""
    if given is None:
        found = shutil.which(called)
        if found is None:
            raise NotFound(
                f"{name} is not installed: no {called} on PATH. Where it is elsewhere: --engine-path {name}=PATH "
                "(that file, or a folder that it is in)"
            )
        return found
    path = Path(given).expanduser()
    if path.is_dir():
        inside = [path / called, path / "bin" / called, *sorted(path.rglob(called))]
        found_inside = next((one for one in inside if runs(one)), None)
        if found_inside is None:
            raise NotFound(f"{name}: there is no {called} in {given}")
        return str(found_inside)
    if not runs(path):
        raise NotFound(f"{name}: {given} is no file that can be run")
    return str(path)


def runs(path: Path) -> bool:
    """Whether that is a file that can be run."""
    return path.is_file() and os.access(path, os.X_OK)


def version(argv: Sequence[str], pattern: str, env: Mapping[str, str | None] | None = None) -> str:
    """What the pattern's group finds in what a program prints; "unknown" where it does not."""
    try:
        done = _run(argv, env or {})
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    found = re.search(pattern, done.stdout + done.stderr)
    return found[1].strip() if found else "unknown"


def _interpreter(name: str, given: str) -> str:
    """Of a virtual environment, of a program in one, or itself."""
    path = Path(given).expanduser()
    if path.is_dir():
        python = path / "bin" / "python"
        if not runs(python):
            raise NotFound(f"{name}: {given} is no virtual environment: it has no bin/python")
        return str(python)
    if not runs(path):
        raise NotFound(f"{name}: {given} is no file that can be run")
    if re.fullmatch(r"python[0-9.]*", path.name):
        return str(path)
    python_beside = _beside(str(path))
    if python_beside is None:
        raise NotFound(f"{name}: {given} names no python in its first line, and has none beside it")
    return python_beside


def _beside(script: str) -> str | None:
    """The interpreter of a Python program: that of its first line, or the one in its folder."""
    with open(script, "rb") as file:
        first = file.readline(500).decode(errors="replace").strip()
    named = first.removeprefix("#!").split(" ")[0]
    if first.startswith("#!") and "python" in Path(named).name and runs(Path(named)):
        return named
    python = Path(script).parent / "python"
    return str(python) if runs(python) else None


def _ask(python: str, module: str, distributions: Sequence[str]) -> Package | None:
    try:
        done = _run([python, "-c", _QUESTION, module, *distributions], environment(python))
        told = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    return Package(python, told["distribution"], told["version"] or "unknown") if told["there"] else None


def environment(python: str) -> Mapping[str, str | None]:
    """What has to be changed of ours for that interpreter."""
    return {} if python == sys.executable else FOREIGN


def _run(argv: Sequence[str], env: Mapping[str, str | None]) -> subprocess.CompletedProcess[str]:
    changed = {name: value for name, value in {**os.environ, **env}.items() if value is not None}
    return subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=PATIENCE,
        check=False, env=changed, cwd="/",
    )  # fmt: skip
