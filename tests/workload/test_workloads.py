"""Workloads: read from files, the same for the same seed, with the shapes and the sharing that they say."""

from __future__ import annotations

import json
import random
import statistics
from itertools import islice
from pathlib import Path

import pytest

from tailrace.terms import InvalidInput
from tailrace.workload import amounts, content, make, sharegpt, spec
from tailrace.workload.session import Piece, Session

MINE = """
about = "mine"
input = 100
output = { kind = "uniform", low = 5, high = 10 }
shared = { tokens = 50, groups = 2 }
arrivals = { kind = "poisson", rate = 2.5 }

[turns]
count = 5
added = 20
pause = 1.5
branches = 3
branch_every = 2
"""


def some(text: str, count: int, seed: int = 0) -> list[Session]:
    return list(islice(make.sessions(spec.parse(text, "mine"), seed), count))


@pytest.mark.parametrize("name", spec.names())
def test_every_built_in_can_be_made_and_says_what_it_is(name: str) -> None:
    workload = spec.load(name)
    assert workload.about
    for session in islice(make.sessions(workload, 3), 20):
        for number, turn in enumerate(session.turns):
            assert turn.input >= 1
            assert turn.output >= 1
            assert all(before < number for before in turn.after)


def test_the_ones_that_everybody_means_have_the_shapes_that_everybody_means() -> None:
    assert [(turn.input, turn.output) for turn in make.session(spec.load("rag"), 0, 0).turns] == [(8000, 100)]
    chat = [make.session(spec.load("chat"), 0, number).turns[0] for number in range(2000)]
    asked, answered = (statistics.median(values) for values in ([t.input for t in chat], [t.output for t in chat]))
    assert asked == pytest.approx(answered, rel=0.1) == pytest.approx(256, rel=0.1)


def test_a_session_depends_on_the_seed_and_its_number_alone() -> None:
    workload = spec.parse(MINE, "mine")
    assert some(MINE, 5) == [make.session(workload, 0, number) for number in range(5)]
    assert make.session(workload, 0, 3) != make.session(workload, 1, 3)


def test_step_k_carries_all_before_it_and_branches_are_carried_by_the_next() -> None:
    session = some(MINE, 1)[0]
    turns = session.turns
    assert [turn.after for turn in turns] == [(), (0,), (0,), (0,), (1, 2, 3), (4,), (4,), (4,), (5, 6, 7)]
    assert [turn.pause for turn in turns] == [0.0] + [1.5] * 8
    first, branch, after = turns[0], turns[2], turns[4]
    assert branch.pieces[: len(first.pieces)] == first.pieces
    assert [piece.answer_of for piece in branch.pieces] == [None, None, 0, None]
    assert [piece.answer_of for piece in after.pieces] == [None, None, 0, None, 1, None, 2, None, 3, None]
    assert after.input == 50 + 100 + first.output + 3 * 20 + sum(turn.output for turn in turns[1:4]) + 20


def test_what_is_shared_is_what_has_the_same_source() -> None:
    sessions = some(MINE, 40)
    fronts = {session.turns[0].pieces[0] for session in sessions}
    assert {(piece.tokens, piece.role) for piece in fronts} == {(50, "system")}
    assert len(fronts) == 2
    rest = [piece.source for session in sessions for turn in session.turns for piece in turn.pieces[-1:]]
    assert len(set(rest)) == len(rest)


def test_the_same_source_is_the_same_text_as_far_as_it_goes() -> None:
    short, long, other = Piece("a", 10), Piece("a", 30), Piece("b", 10)
    assert content.ids(long, 40_000)[:10] == content.ids(short, 40_000) != content.ids(other, 40_000)
    assert content.words(long, 30).startswith(content.words(short, 10))
    assert all(200 <= token < 1000 for token in content.ids(Piece("a", 5000), 1000))
    assert all(0 <= token < 64 for token in content.ids(Piece("a", 5000), 64))


@pytest.mark.parametrize(
    ("amount", "mean", "low", "high"),
    [
        (7, 7, 7, 7),
        (amounts.Uniform(10, 20), 15, 10, 20),
        (amounts.Lognormal(100, 0.5, 20, 300), 112, 20, 300),
        (amounts.Exponential(3.0), 3, 0, 60),
        (amounts.Empirical([1, 9], [3, 1]), 3, 1, 9),
    ],
)
def test_amounts_have_the_mean_and_the_bounds_that_they_say(
    amount: amounts.Amount, mean: float, low: float, high: float
) -> None:
    rng = random.Random(1)
    drawn = [amounts.draw(amount, rng) for _ in range(20_000)]
    assert statistics.fmean(drawn) == pytest.approx(mean, rel=0.03)
    assert low <= min(drawn) <= max(drawn) <= high


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("input = 5", "give input and output, or else trace"),
        ('input = 5\noutput = 5\ntrace = { format = "mooncake", path = "x" }', "give input and output, or else trace"),
        ("input = -5\noutput = 5", "input"),
        ('input = { kind = "normal", mean = 5 }\noutput = 5', "normal"),
        ('input = { kind = "uniform", low = 9, high = 5 }\noutput = 5', "low (9) is above high (5)"),
        ('input = { kind = "empirical", values = [1, 2], weights = [1] }\noutput = 5', "a weight for each value"),
        ("input = 5\noutput = 5\ninptu = 6", "inptu"),
        ("input = 5\noutput = 5\n[turns]\ncount = 3\nbranches = 0", "branches"),
        ('input = 5\noutput = 5\narrivals = { kind = "poisson", rate = 0 }', "arrivals"),
        ('trace = { format = "mooncake", path = "x" }\n[shared]\ntokens = 5', "cannot be added to a trace"),
        ("input = ", "workload mine"),
    ],
)
def test_what_is_wrong_is_said(text: str, said: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        spec.parse(text, "mine")
    assert said in str(caught.value)


def test_a_workload_is_found_by_name_or_file_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(MINE)
    assert spec.load(str(tmp_path / "mine.toml")).name == "mine"
    for name, said in (("chatt", "there are agent, chat, code"), (str(tmp_path / "no.toml"), "cannot be read")):
        with pytest.raises(InvalidInput, match=said):
            spec.load(name)


def test_a_mooncake_trace_keeps_times_lengths_and_what_is_shared(tmp_path: Path) -> None:
    made = [
        {"timestamp": 0, "input_length": 1030, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 1500, "input_length": 900, "output_length": 0, "hash_ids": [0, 3]},
    ]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(line) + "\n" for line in made))
    (tmp_path / "t.toml").write_text('trace = { format = "mooncake", path = "t.jsonl" }')
    for name in ("t.jsonl", "t.toml"):
        one, other = make.sessions(spec.load(str(tmp_path / name)))
        assert (one.at, other.at) == (0.0, 1.5)
        assert ([t.input for t in one.turns], one.turns[0].output) == ([1030], 5)
        assert (other.turns[0].input, other.turns[0].output) == (900, 1)
        assert [piece.tokens for piece in one.turns[0].pieces] == [512, 512, 6]
        first, second = one.turns[0].pieces, other.turns[0].pieces
        assert first[0] == second[0]
        assert first[1].source != second[1].source
    (tmp_path / "t.jsonl").write_text("{}\n")
    with pytest.raises(InvalidInput, match="line 1"):
        list(make.sessions(spec.load(str(tmp_path / "t.jsonl"))))


def test_sharegpt_gives_questions_as_they_were_asked(tmp_path: Path) -> None:
    talks = [
        {"id": "a", "conversations": [
            {"from": "gpt", "value": "left out: nobody asked"}, {"from": "human", "value": "What is a weir?"},
            {"from": "gpt", "value": "A low dam."}, {"from": "human", "value": "And a sluice?"},
            {"from": "gpt", "value": "A gate in one that can be opened."}, {"from": "human", "value": "Thanks"},
        ]},
        {"id": "b", "conversations": [{"from": "human", "value": "alone"}]},
    ]  # fmt: skip
    path = tmp_path / "talks.json"
    path.write_text(json.dumps(talks))
    (one,) = make.sessions(spec.load(str(path)))
    assert [piece.text for piece in one.turns[0].pieces] == ["What is a weir?"]
    assert (len(one.turns), one.turns[0].output) == (1, 3)
    (tmp_path / "t.toml").write_text('trace = { format = "sharegpt", path = "talks.json", turns = 9 }')
    (one,) = make.sessions(spec.load(str(tmp_path / "t.toml")))
    assert [(piece.text, piece.answer_of) for piece in one.turns[1].pieces] == [
        ("What is a weir?", None), (None, 0), ("And a sluice?", None),
    ]  # fmt: skip
    assert one.turns[1].after == (0,)
    path.write_text("[]")
    with pytest.raises(InvalidInput, match="no conversation"):
        list(make.sessions(spec.load(str(path))))


@pytest.mark.parametrize("piece", [2, 7, 64, 1 << 20])
def test_sharegpt_is_read_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(sharegpt, "READ_BYTES", piece)
    asked = [f"Que fait l'écluse n\u00b0 {at} ? \\" for at in range(5)]
    talks = [
        {
            "id": None,
            "ok": True,
            "n": 1.5e3,
            "conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": "\u2713"}],
        }
        for text in asked
    ]
    path = tmp_path / "talks.json"
    for indent, ascii_only in ((None, True), (2, False)):
        whole = json.dumps(talks, indent=indent, ensure_ascii=ascii_only).encode()
        path.write_bytes(b"\n" + whole)
        found = list(make.sessions(spec.load(str(path))))
        assert [session.turns[0].pieces[0].text for session in found] == asked
        for cut in range(len(whole) - 1, 3 * len(whole) // 5, -7):  # what is whole before that is taken
            path.write_bytes(whole[:cut])
            found = list(make.sessions(spec.load(str(path))))
            assert [session.turns[0].pieces[0].text for session in found] == asked[: len(found)]
            assert len(found) in (3, 4, 5)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"conversations": []}', "does not begin with an array"),
        ("", "does not begin with an array"),
        ('[{"conversations": [}]}, {"conversations": []}, {"conversations": []}]', "Expecting value"),
        ('[{"conversations": 3}]', "Expected `array`, got `int`"),
        ('[{"conversations": []}', "no conversation"),
    ],
)
def test_what_is_no_sharegpt_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "talks.json"
    path.write_text(text)
    with pytest.raises(InvalidInput, match=words):
        list(make.sessions(spec.load(str(path))))


def test_the_workload_in_the_documentation_is_one() -> None:
    page = (Path(__file__).parents[2] / "docs" / "bench.md").read_text()
    workload = spec.parse(page.split("```toml\n")[1].split("```")[0], "mine")
    session = make.session(workload, 0, 0)
    assert session.turns[0].pieces[0].tokens == 1500
