"""A Chromium to test with: the machine's own, or one that is fetched without root.

`python tests_ui/browser.py` fetches one where there is none, and prints where it is. TAILRACE_CHROMIUM names another.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

PACKAGE = "@sparticuz/chromium@153"
"""A headless Chromium for x86-64 Linux with the libraries that a bare system lacks, compressed, as an npm package."""
PLACE = Path(sys.prefix) / "browser"
NAMES = ("chromium", "chromium-browser", "google-chrome")
UNPACK = """
import fs from "node:fs"; import zlib from "node:zlib"; import { pipeline } from "node:stream/promises";
const [from, to] = process.argv.slice(1);
await pipeline(fs.createReadStream(from), zlib.createBrotliDecompress(), fs.createWriteStream(to));
"""


def found() -> str | None:
    """Where a browser is; None where there is none."""
    own = PLACE / "chromium"
    named = [os.environ.get("TAILRACE_CHROMIUM"), *map(shutil.which, NAMES), str(own) if own.exists() else None]
    return next(filter(None, named), None)


def environment() -> dict[str, str]:
    """What a fetched browser needs to find its libraries."""
    libraries = str(PLACE / "lib")
    return {
        **os.environ,
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [libraries, os.environ.get("LD_LIBRARY_PATH")])),
    }


def fetch() -> str:
    """Fetches one into the environment that this runs in."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        sys.exit("There is no Chromium here, and none can be fetched for this machine: install one, or name it with "
                 "TAILRACE_CHROMIUM.")  # fmt: skip
    from playwright._impl._driver import compute_driver_executable

    tools = Path(__file__).with_name("browser.requirements.txt")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-qq", "-r", str(tools)]
    npm = shutil.which("npm")
    if npm is None:
        subprocess.run(pip, check=True)
        npm = str(Path(sys.prefix) / "bin" / "npm")
    PLACE.mkdir(parents=True, exist_ok=True)
    command = [
        npm,
        "install",
        "--prefix",
        str(PLACE),
        "--ignore-scripts",
        "--no-audit",
        "--no-fund",
        "--silent",
        PACKAGE,
    ]
    subprocess.run(command, check=True, env={**os.environ, "PATH": f"{Path(npm).parent}:{os.environ['PATH']}"})
    node = str(compute_driver_executable()[0])
    packed = PLACE / "node_modules" / "@sparticuz" / "chromium" / "bin"
    for name, to in (
        ("al2023.tar.br", "al2023.tar"),
        ("swiftshader.tar.br", "swiftshader.tar"),
        ("chromium.br", "part"),
    ):
        subprocess.run([node, "--input-type=module", "-e", UNPACK, str(packed / name), str(PLACE / to)], check=True)
        if to.endswith(".tar"):
            with tarfile.open(PLACE / to) as archive:
                archive.extractall(PLACE, filter="data")
            (PLACE / to).unlink()
    (PLACE / "part").chmod(0o755)
    (PLACE / "part").rename(PLACE / "chromium")
    shutil.rmtree(PLACE / "node_modules")
    return str(PLACE / "chromium")


if __name__ == "__main__":
    print(found() or fetch())
