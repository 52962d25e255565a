"""`serve` has two parsers made from one declaration: the quick one must never mean anything else than typer's."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import typer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tailrace.cli import options
from tailrace.cli.main import main


def by_typer(arguments: list[str]) -> dict[str, Any] | int:
    """The values that typer gives the command, or the exit status with which it refuses."""
    seen: list[dict[str, Any]] = []

    def take(values: dict[str, Any]) -> int:
        seen.append(values)
        return 0

    app = typer.Typer()
    app.command("serve")(options.command(options.SERVE, take, "doc"))
    try:
        app(arguments, standalone_mode=True)
    except SystemExit as end:
        return seen[0] if seen else int(end.code or 0)
    raise AssertionError


def values_of(option: options.Option) -> st.SearchStrategy[str]:
    if option.choices:
        return st.sampled_from([*option.choices, "nonsense"])
    if option.kind is int:
        return st.one_of(st.integers(-5, 10**6).map(str), st.sampled_from(["1_000", " 5", "0x10", "5.0", "", "٣"]))
    if option.kind is float:
        return st.one_of(st.floats(0, 100).map(str), st.sampled_from(["1e3", "nan", "inf", "x", ""]))
    return st.text(st.characters(codec="ascii", exclude_characters="\0"), max_size=6)


@st.composite
def words(draw: st.DrawFn) -> list[str]:
    option = draw(st.sampled_from(options.SERVE.options))
    if option.kind is bool:
        return [draw(st.sampled_from([option.flag, f"--no-{option.flag[2:]}", f"{option.flag}=1"]))]
    value = draw(values_of(option))
    return draw(st.sampled_from([[option.flag, value], [f"{option.flag}={value}"], [option.flag]]))


ODD = [["model.gguf"], ["--help"], ["--nonsense"], ["-p"], ["--"], ["-"], ["--no-port"]]
lines = st.lists(st.one_of(words(), st.sampled_from(ODD)), max_size=5).map(
    lambda parts: [word for part in parts for word in part]
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(lines)
def test_what_the_quick_parser_accepts_typer_accepts_with_the_same_values(arguments: list[str]) -> None:
    quick = options.parse(arguments, options.SERVE)
    if quick is not None:
        assert repr(by_typer(arguments)) == repr({name: quick[name] for name in by_order(quick)})


def by_order(values: dict[str, Any]) -> list[str]:
    """The order in which typer hands the values over."""
    names = [options.SERVE.argument.name, *(option.name for option in options.SERVE.options)]
    assert set(names) == set(values)
    return names


def test_every_option_is_known_to_both() -> None:
    for option in options.SERVE.options:
        value = {"int": "7", "float": "1.5", "bool": "", "str": option.choices[-1] if option.choices else "x"}
        text = value[option.kind.__name__]
        arguments = [option.flag, *([text] if text else [])]
        quick = options.parse(arguments, options.SERVE)
        assert quick is not None, option.flag
        assert quick[option.name] == ([text] if option.many else True if not text else option.kind(text))
        assert by_typer(arguments) == quick


@pytest.mark.parametrize(
    "arguments",
    [["--port"], ["--port", "x"], ["--port", "--host"], ["--kernels", "sse9"], ["a", "b"], ["--nonsense"], ["--help"],
     ["-h"], ["--quiet=1"], ["--"], ["--port", "-1"], ["--host="]],
)  # fmt: skip
def test_the_quick_parser_leaves_doubtful_lines_to_typer(arguments: list[str]) -> None:
    assert options.parse(arguments, options.SERVE) is None


def test_mistakes_end_with_status_2_and_say_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, word in (
        (["serve", "--port", "x"], "--port"),
        (["serve", "--kernels", "sse9"], "portable"),
        (["serve", "--prot", "1"], "--port"),
        (["serve", "--host", "0.0.0.0"], "--api-key"),
        (["serve", "--port", "70000"], "70000"),
        (["serve", "--drain-timeout", "nan"], "--drain-timeout"),
        (["sevre"], "serve"),
    ):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == 2, arguments
        assert word in capsys.readouterr().err


def test_the_quick_path_imports_neither_typer_nor_rich(environment: dict[str, str]) -> None:
    import subprocess

    code = """
import sys
from tailrace.cli import main, options, serve
values = options.parse(["--port=0", "--kv-tokens", "1024"], options.SERVE)
serve.settings(values).check()
print(*sorted({"typer", "rich", "click", "starlette", "numpy", "asyncio", "jinja2", "tokenizers"} & set(sys.modules)))
"""
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ""
