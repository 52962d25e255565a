"""What public APIs ask for a million tokens, where nobody says otherwise: two examples with their sources."""

from __future__ import annotations

import datetime

from tailrace.ledger.price import Api

EXAMPLES = {
    "gpt-4o-mini": Api(
        usd_per_million_input=0.15, usd_per_million_cached=0.075, usd_per_million_output=0.60,
        source="OpenAI's list price as elliotgate.com/models/openai/gpt-4o-mini has it",
        date=datetime.date(2026, 12, 1),
    ),
    "claude-sonnet-4.5": Api(
        usd_per_million_input=3.0, usd_per_million_cached=0.30, usd_per_million_output=15.0,
        source="platform.claude.com/docs/en/about-claude/pricing (writing to the cache, which costs more, left out)",
        date=datetime.date(2026, 12, 1),
    ),
}  # fmt: skip
"""Prices change every month; `--api` names others."""
