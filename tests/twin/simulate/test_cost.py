"""What a step costs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailrace.terms import InvalidInput
from tailrace.twin.simulate import cost
from tailrace.twin.simulate.cost import Linear, Step

MIXED = Step(new=[4, 1], before=[10, 99], sampled=1)
"""Four tokens of a prompt after ten, which is not at its end; and a decode after 99."""


@pytest.mark.parametrize(
    ("counted", "times"),
    [
        ("request", 2),
        ("token", 5),
        ("sample", 1),
        ("read", (10 + 4) + (99 + 1)),
        ("pair", (11 + 12 + 13 + 14) + 100),  # each token attends to those before it, and to itself
    ],
)
def test_a_linear_cost_counts_what_a_step_has(counted: str, times: int) -> None:
    assert Linear(step=1.0, **{counted: 2.0}).seconds(MIXED) == 1.0 + 2.0 * times


def test_a_cost_is_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "cost.toml"
    file.write_text('kind = "linear"\nabout = "by hand"\nstep = 0.5\ntoken = 0.25\n')
    assert cost.read(file) == Linear(step=0.5, token=0.25, about="by hand")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('kind = "linear"', "missing required field `step`"),
        ('kind = "roofline"\nstep = 0.5', "Invalid value 'roofline'"),
        ('kind = "linear"\nstep = 0.5\nread = inf', "read must be finite"),
        ('kind = "linear"\nstep = 0.5\nread = nan', ">= 0"),
        ('kind = "linear"\nstep = 0.5\ntokens = 1.0', "unknown field `tokens`"),
        ('kind = "linear"\nstep = -1.0', ">= 0"),
        ('kind = "linear"\nstep = 0.0\ntoken = 0.1', "no step takes no time"),
        ("kind = ", "Invalid"),
    ],
)
def test_a_wrong_file_is_refused_with_what_is_wrong(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "cost.toml"
    file.write_text(text)
    with pytest.raises(InvalidInput, match=said) as caught:
        cost.read(file)
    assert str(file) in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"none\.toml cannot be read: No such file"):
        cost.read(tmp_path / "none.toml")
