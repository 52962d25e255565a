"""The jinja2 sandbox that chat templates run in: Hugging Face's conventions, with bounded work.

Imported on first use only: jinja2 takes a tenth of a second to import. A template cannot reach Python's internals
(`ImmutableSandboxedEnvironment`), and cannot take long or much memory: loops, calls, filters and everything that makes
text is charged to a `Budget`, and what could grow without a loop (repetition, widths, joins) is measured beforehand.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_TEXT = 32_000_000
"""Characters of any one string, and entries of any one list times ten, that a template may make."""
MAX_TOTAL = 256_000_000
"""Characters that a template may make in all."""
MAX_WIDTH = 10_000
"""Widths and repetitions in formats and filters."""
MAX_SECONDS = 3.0
"""For one rendering."""


class BudgetExceededError(jinja2.TemplateError):
    """The template does more work than any conversation needs."""


class Budget:
    """What one rendering may still do. Every charge also looks at the clock."""

    def __init__(self, seconds: float) -> None:
        self._left = MAX_TOTAL
        self._until = time.monotonic() + seconds

    def charge(self, cost: int = 1) -> None:
        """Takes `cost` characters; raises `BudgetExceededError` when there is no more."""
        self._left -= cost + 20
        if self._left < 0 or time.monotonic() > self._until:
            raise BudgetExceededError("the chat template does too much work")

    def text(self, size: int) -> None:
        """Charges for a string of this size, before it is made where that is known."""
        if size > MAX_TEXT:
            raise BudgetExceededError("the chat template makes too long a text")
        self.charge(size)


_budget: ContextVar[Budget | None] = ContextVar("template_budget", default=None)


def render(template: jinja2.Template, variables: Mapping[str, Any], seconds: float | None = None) -> str:
    """Renders within a fresh budget. Raises what templates raise."""
    budget = Budget(MAX_SECONDS if seconds is None else seconds)
    token = _budget.set(budget)
    try:
        pieces = []
        for piece in template.generate(variables):
            budget.text(len(piece))
            pieces.append(piece)
        return "".join(pieces)
    finally:
        _budget.reset(token)


def _measure(value: Any) -> int:
    """Characters that a value would be as text, about; charges for looking."""
    budget = _budget.get()
    if budget is None or isinstance(value, str):
        return str.__len__(value) if isinstance(value, str) else 0
    budget.charge()
    if isinstance(value, Mapping):
        return sum(_measure(key) + _measure(item) + 6 for key, item in value.items())
    if isinstance(value, list | tuple):
        total = 0
        for item in value:
            total += _measure(item) + 4
            if total > MAX_TEXT:
                break
        return total
    return value.bit_length() // 3 + 1 if isinstance(value, int) else 24


def _measured(*values: Any) -> None:
    budget = _budget.get()
    if budget is not None:
        budget.text(sum(map(_measure, values)))


def _sized(result: Any) -> Any:
    budget = _budget.get()
    if budget is not None and isinstance(result, str | list | tuple | dict):
        budget.text(str.__len__(result) if isinstance(result, str) else 10 * len(result))
    return result


def _refuse_wide(values: Iterable[Any]) -> None:
    if any(isinstance(value, int) and abs(value) > MAX_WIDTH for value in values):
        raise BudgetExceededError(f"the chat template asks for a width of more than {MAX_WIDTH}")


_PERCENT_WIDTH = re.compile(r"%[^%a-zA-Z*]*\d{5}")
_BRACE_WIDTH = re.compile(r"\{[^{}]*\d{5}")
_PERCENT_STAR = re.compile(r"%[^%a-zA-Z*]*\*")
_BRACE_STAR = re.compile(r"\{[^{}]*\{")


def _check_format(pattern: str, values: Iterable[Any], width: re.Pattern[str], star: re.Pattern[str]) -> None:
    """Formats can ask for widths in the pattern or, where it has a `star`, in the values."""
    if width.search(pattern):
        raise BudgetExceededError(f"the chat template asks for a width of more than {MAX_WIDTH}")
    values = list(values)
    if star.search(pattern):
        _refuse_wide(values)
    _measured(pattern, values)


def _check_replace(text: str, old: str, new: str) -> None:
    text, old, new = str(text), str(old), str(new)
    count = text.count(old) if old else len(text) + 1
    _measured(text)
    budget = _budget.get()
    if budget is not None:
        budget.text(len(text) + count * str.__len__(new))


@jinja2.pass_context
def _metered(context: Any, items: Iterable[Any], cost: int) -> Iterator[Any]:
    """What every loop's iterable is wrapped in; `cost` is the literal text in the loop's body."""
    budget = _budget.get()
    for item in items:
        if budget is not None:
            budget.charge(cost)
        yield item


@jinja2.pass_context
def _joined(context: Any, items: Iterable[Any]) -> str:
    """What `a ~ b` becomes."""
    items = list(items)
    _measured(items)
    return "".join(map(str, items))


@jinja2.pass_context
def _output(context: Any, value: Any) -> Any:
    """What every `{{ expression }}` goes through. Taking the context keeps jinja2 from running it while compiling."""
    _measured(value)
    return value


class _Metering(CodeGenerator):
    """Rewrites a template so that loops and `~` go through the budget."""

    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:  # noqa: N802 - jinja2's name
        if frame is None:
            self.environment.literal_chars = _literals(node)  # type: ignore[attr-defined]  # set by Sandbox
            _meter(node)
        super().visit_Template(node, frame)


def _literals(node: nodes.Node) -> int:
    return sum(len(data.data) for data in node.find_all(nodes.TemplateData))


def _filtered(value: nodes.Node, name: str, args: list[nodes.Node]) -> nodes.Node:
    return nodes.Filter(value, name, args, [], None, None).set_lineno(value.lineno)


def _meter(node: nodes.Node) -> None:
    for loop in list(node.find_all(nodes.For)):
        cost = sum(map(_literals, loop.body))
        loop.iter = _filtered(loop.iter, "_metered", [nodes.Const(cost)])
    _meter_joins(node)


def _meter_joins(node: nodes.Node) -> None:
    for field, value in node.iter_fields():
        if isinstance(value, list):
            setattr(node, field, [_without_concat(item) for item in value])
        elif isinstance(value, nodes.Node):
            setattr(node, field, _without_concat(value))


def _without_concat(node: Any) -> Any:
    if not isinstance(node, nodes.Node):
        return node
    _meter_joins(node)
    if isinstance(node, nodes.Concat):
        return _filtered(nodes.List(node.nodes).set_lineno(node.lineno), "_joined", [])
    return node


class _Generation(Extension):
    """`{% generation %}` marks what an assistant wrote, for training; here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As Hugging Face does: plain JSON, without jinja2's escaping for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    _check_format(pattern, [], _PERCENT_WIDTH, _PERCENT_STAR)
    return datetime.datetime.now().strftime(pattern)


_WIDE = {"center", "indent", "wordwrap", "batch", "slice", "tojson", "truncate", "round"}
_TEXTUAL = {
    *("capitalize", "center", "e", "escape", "forceescape", "format", "indent", "join", "lower", "pprint", "replace"),
    *("string", "title", "tojson", "trim", "truncate", "upper", "urlencode", "wordcount", "wordwrap"),
}
_LEFT_OUT = ("striptags", "urlize", "xmlattr")  # work on HTML; the first turns harmless text into markup


def _filter(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that pays for what it makes."""

    @functools.wraps(call)
    def metered(*args: Any, **kwargs: Any) -> Any:
        budget = _budget.get()
        if budget is not None:
            passed = 1 if hasattr(call, "jinja_pass_arg") else 0
            values = [*args[passed:], *kwargs.values()]
            budget.charge()
            if name in _TEXTUAL:
                if values and not isinstance(values[0], str | list | tuple | Mapping | int | float | jinja2.Undefined):
                    values[0] = [*itertools.islice(values[0], MAX_TEXT // 10)] if hasattr(values[0], "__iter__") else ""
                    args = (*args[:passed], values[0], *args[passed + 1 :])
                _check_textual(name, values)
            if name in _WIDE:
                _refuse_wide(values[1:])
            if name == "sum" and any(
                not isinstance(value, int | float | str) for value in values[1:] if value is not None
            ):
                raise BudgetExceededError("the filter 'sum' adds numbers only")
            if name == "list" and values and isinstance(values[0], str):
                budget.text(10 * len(values[0]))
        return _sized(call(*args, **kwargs))

    return metered


def _check_textual(name: str, values: list[Any]) -> None:
    if name == "replace" and len(values) >= 3:
        _check_replace(*values[:3])
    elif name == "format":
        _check_format(str(values[0]), values[1:], _PERCENT_WIDTH, _PERCENT_STAR)
    elif name == "join":
        separator = str(values[1]) if len(values) > 1 else ""
        count = len(values[0]) if hasattr(values[0], "__len__") else 0
        _measured(values[0], "")
        budget = _budget.get()
        if budget is not None:
            budget.text(count * str.__len__(separator))
    else:
        _measured(values[0] if values else "")


class Sandbox(ImmutableSandboxedEnvironment):
    """One environment for one template."""

    code_generator_class = _Metering
    intercepted_binops = frozenset({"+", "*", "**", "%"})
    literal_chars: int = 0

    def __init__(self) -> None:
        # Not optimized: folding constants would run filters while compiling, outside of any budget.
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], optimized=False)
        self.finalize = _output
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        del self.globals["lipsum"]
        self.filters["tojson"] = _tojson
        for name in _LEFT_OUT:
            del self.filters[name]
        self.filters = {name: _filter(name, call) for name, call in self.filters.items()}
        self.filters.update(_metered=_metered, _joined=_joined)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - jinja2's signature
        """Every call that a template makes."""
        budget = _budget.get()
        if budget is not None:
            written = isinstance(__obj, Macro | LoopContext)
            budget.charge(__self.literal_chars if written else 0)
            owner = getattr(__obj, "__self__", None)
            if isinstance(owner, str):
                _check_method(__obj.__name__, owner, [*args, *kwargs.values()])
        result = super().call(__context, __obj, *args, **kwargs)
        return _sized(result)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """`+`, `*`, `**` and `%`, measured before they are computed."""
        if operator == "*":
            _check_repeat(left, right)
        elif operator == "**":
            _check_power(left, right)
        elif operator == "%" and isinstance(left, str):
            _check_format(left, right if isinstance(right, tuple) else [right], _PERCENT_WIDTH, _PERCENT_STAR)
        elif operator == "+":
            _measured(*(value for value in (left, right) if isinstance(value, str)))
        return _sized(super().call_binop(context, operator, left, right))


def _check_method(name: str, owner: str, values: list[Any]) -> None:
    if name in {"format", "format_map"}:
        _check_format(owner, values, _BRACE_WIDTH, _BRACE_STAR)
    elif name in {"ljust", "rjust", "center", "zfill", "expandtabs"}:
        _refuse_wide(values)
    elif name == "replace" and len(values) >= 2:
        _check_replace(owner, values[0], values[1])
    elif name == "join" and values:
        items = values[0]
        _measured(items)
        budget = _budget.get()
        if budget is not None and hasattr(items, "__len__"):
            budget.text(len(items) * str.__len__(owner))


def _check_repeat(left: Any, right: Any) -> None:
    budget = _budget.get()
    if budget is None:
        return
    for value, times in ((left, right), (right, left)):
        if isinstance(value, str | list | tuple) and isinstance(times, int):
            budget.text((str.__len__(value) if isinstance(value, str) else 10 * len(value)) * max(times, 0))
            return
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > 4096:
        raise BudgetExceededError("the chat template computes too large a number")


def _check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * max(right, 0) > 4096:
        raise BudgetExceededError("the chat template computes too large a number")
