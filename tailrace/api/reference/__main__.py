"""`python -m tailrace.api.reference FILE`: writes the page of all endpoints."""

from __future__ import annotations

import sys
from pathlib import Path

from tailrace.api.reference.page import page

if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
