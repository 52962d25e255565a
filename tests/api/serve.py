"""`python -m tests.api.serve SETTINGS`: the real server process over the stand-in model. Without a loader, the
real model and its text."""

from __future__ import annotations

import sys

import msgspec

from tailrace.api.server import run
from tailrace.api.settings import Settings
from tests.api.stand import StandText

if __name__ == "__main__":
    settings = msgspec.json.decode(sys.argv[1], type=Settings)
    broken, infill = settings.model == "broken template", settings.model == "infill"
    load_text = None if not settings.loader else lambda _settings: StandText(broken_template=broken, infill=infill)
    sys.exit(run(settings, load_text=load_text, report=lambda line: print(line, flush=True)))
