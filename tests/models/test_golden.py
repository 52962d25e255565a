"""Every architecture and every rope gives the logits that Hugging Face transformers gives (tests/golden/make.py)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tailrace.backends.reference import ReferenceBackend
from tailrace.models import load_model, open_checkpoint
from tailrace.models.fields import Fields
from tailrace.models.rope import build_rope, read_rope
from tests.batches import logits_of, pages_for

GOLDEN = Path(__file__).parent.parent / "golden"
PROMPT = np.load(GOLDEN / "prompt.npy").tolist()
LOGITS = np.load(GOLDEN / "logits.npz")
ROPES = np.load(GOLDEN / "ropes.npz")
TABLES = json.loads((GOLDEN / "ropes.json").read_text())

ARCHITECTURES = sorted(name for name in LOGITS.files if not name.startswith("rope-"))
LONG_ROPES = sorted(name for name in LOGITS.files if name.startswith("rope-") and "dynamic" not in name)
LONG = [0, 1000, 8000, 20000]


def backend_of(name: str, length: int, **options: object) -> ReferenceBackend:
    model = load_model(open_checkpoint(GOLDEN / "models" / name), max_context=length)
    return ReferenceBackend(model, pages=pages_for(length) + 3, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_gives_the_logits_of_transformers(name: str) -> None:
    found = logits_of(backend_of(name, 80), PROMPT[:80], range(80))
    assert np.abs(found - LOGITS[name]).max() < 1e-4


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_chunks_and_other_pages_do_not_change_the_logits(name: str) -> None:
    found = logits_of(backend_of(name, 80), PROMPT[:80], range(80), chunk=7, first_page=3)
    assert np.abs(found - LOGITS[name]).max() < 1e-4


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_float64_agrees_too(name: str) -> None:
    found = logits_of(backend_of(name, 80, dtype=np.float64), PROMPT[:80], range(80))
    assert np.abs(found - LOGITS[name]).max() < 1e-4


@pytest.mark.parametrize("name", LONG_ROPES)
def test_a_rope_gives_the_logits_of_transformers_at_every_length(name: str) -> None:
    found = logits_of(backend_of(name, LONG[-1] + 1), PROMPT, LONG)
    assert np.abs(found - LOGITS[name]).max(axis=1).max() < 1e-4


@pytest.mark.parametrize("length", [64, 1001, 8001, 20001])
def test_the_dynamic_rope_takes_its_base_from_the_served_context(length: int) -> None:
    found = logits_of(backend_of("rope-dynamic", length), PROMPT[:length], [length - 1])
    assert np.abs(found - LOGITS[f"rope-dynamic-{length}"]).max() < 1e-4


def test_the_dynamic_base_does_not_move_with_the_prompt() -> None:
    backend = backend_of("rope-dynamic", 20001)
    whole = logits_of(backend, PROMPT[:2001], [2000])
    parts = logits_of(backend, PROMPT[:2001], [2000], chunk=500)
    assert np.abs(whole - parts).max() < 1e-4
    assert np.abs(whole - logits_of(backend_of("rope-dynamic", 2001), PROMPT[:2001], [2000])).max() > 1e-2


@pytest.mark.parametrize("name", sorted(TABLES))
def test_frequencies_of_published_models(name: str) -> None:
    table = TABLES[name]
    trained = table.get("max_position_embeddings", 4096)
    rope = read_rope(Fields("test", {"rope_parameters": table["rope"]}), trained)
    built = build_rope(rope, table["head_dim"], trained)
    # One unit in the last place: torch's float32 power is not always the nearest.
    np.testing.assert_array_max_ulp(built.inv_freq, ROPES[f"{name}.inv_freq"], 2)
    assert built.scale == pytest.approx(float(ROPES[f"{name}.scale"]), rel=1e-12)
