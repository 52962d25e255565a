"""What a start does with a model's text, and what it leaves for later."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailrace.api.server import text_of
from tailrace.api.settings import Settings
from tailrace.engine import assets
from tailrace.terms import InvalidInput
from tailrace.text import Text

CHAT = [{"role": "user", "content": "hi"}]


def test_only_the_first_start_of_a_model_compiles_its_template(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warmed: list[Text] = []
    warm = Text.warm
    monkeypatch.setattr(Text, "warm", lambda self: (warmed.append(self), warm(self)))
    settings = Settings(str(smollm2), cache_dir=str(tmp_path))
    first = text_of(settings)
    assert warmed == [first]
    second = text_of(settings)
    assert warmed == [first]
    assert second.encode_chat(CHAT) == first.encode_chat(CHAT)
    assert second.encode("Hello, world 123") == first.encode("Hello, world 123")


def test_a_model_whose_template_is_wrong_is_not_served_at_any_start(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_self: Text) -> None:
        raise InvalidInput("chat template, line 1: broken", param="messages")

    monkeypatch.setattr(Text, "warm", broken)
    for _ in range(2):
        with pytest.raises(InvalidInput, match="line 1"):
            text_of(Settings(str(smollm2), cache_dir=str(tmp_path)))
    assert assets.open_text(smollm2, tmp_path)[3] is not None  # nothing was kept
