"""Secrets in a command line, which every user of the machine can read (`ps`), are blotted out once they are read.

For the moments until then they can be seen; a file or the environment has no such moments.
"""

from __future__ import annotations

import os
from pathlib import Path

ARG_START, ARG_END = 45, 46
"""Fields of /proc/self/stat behind the name, from 0 (proc(5) counts `arg_start` and `arg_end` as 48 and 49)."""


def blotted(line: bytes, flag: str) -> bytes:
    """A command line (words that end in NUL) with the values of an option, one word or two, as crosses."""
    words = line.split(b"\0")
    start = flag.encode() + b"="
    for at, word in enumerate(words):
        if word.startswith(start):
            words[at] = start + b"x" * (len(word) - len(start))
        elif at and words[at - 1] == flag.encode():
            words[at] = b"x" * len(word)
    return b"\0".join(words)


def hide(flag: str) -> bool:
    """Blots the option's values out of this process's command line as the system shows it, and so out of that of later
    forks. False where the system does not let us, or is not Linux."""
    try:
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        start, end = int(fields[ARG_START]), int(fields[ARG_END])
        memory = os.open("/proc/self/mem", os.O_RDWR | os.O_CLOEXEC)
        try:
            line = os.pread(memory, end - start, start)
            os.pwrite(memory, blotted(line, flag), start)
        finally:
            os.close(memory)
    except (OSError, ValueError, IndexError):
        return False
    return True
