"""Ledgers in both kinds of database."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa

from tests import postgres


@pytest.fixture
def postgresql(a_postgresql: postgres.Server | None) -> postgres.Server:
    """A PostgreSQL server without tables of ours."""
    if a_postgresql is None:
        pytest.skip(postgres.why_not())
    engine = sa.create_engine(sa.make_url(a_postgresql.url).set(drivername="postgresql+psycopg"))
    with engine.begin() as connection:
        for table in ("ledger", "runs", "requests", "usage"):
            connection.execute(sa.text(f"DROP TABLE IF EXISTS tailrace_{table}"))
    engine.dispose()
    return a_postgresql


@pytest.fixture(params=["sqlite", "postgresql"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty ledger's place."""
    if request.param == "sqlite":
        return str(tmp_path / "deep" / "ledger.db")
    return str(request.getfixturevalue("postgresql").url)
