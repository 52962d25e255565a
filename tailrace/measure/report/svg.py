"""Plots as SVG text: axes, lines, bands, points, bars. Colours are classes (`c0`, `c1`, ...) that the page defines."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

Point = tuple[float, float]

WIDTH, HEIGHT = 420, 270
LEFT, RIGHT, TOP, BOTTOM = 72, 12, 16, 44
MOST_POINTS = 2000
"""Marks of one scatter, at most: more cannot be told apart."""


@dataclass(frozen=True)
class Axis:
    """From `low` to `high`, evenly or by powers; `show` makes a tick's text."""

    label: str
    low: float
    high: float
    show: Callable[[float], str]
    log: bool = False

    def at(self, value: float) -> float:
        """Where a value is: 0 at the low end, 1 at the high end; a little beyond at most."""
        if self.log:
            return math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        return max(-0.02, min(1.02, (value - self.low) / (self.high - self.low)))

    def ticks(self) -> list[float]:
        """Round values."""
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            steps = (1, 2, 5) if self.high / self.low < 1000 else (1,)
            made = [step * 10.0**power for power in powers for step in steps]
        else:
            step = _round((self.high - self.low) / 5)
            first = math.ceil(self.low / step - 1e-9)
            made = [step * place for place in range(first, first + 12)]
        return [tick for tick in made if self.low * 0.999999 <= tick <= self.high * 1.000001]


def _round(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return power * next(one for one in (1, 2, 5, 10) if one * power >= step * 0.999)


def axis(
    label: str, values: Sequence[float], show: Callable[[float], str], *, log: bool = False, zero: bool = True
) -> Axis:
    """One that holds all the values."""
    known = [value for value in values if math.isfinite(value) and (value > 0 or not log)]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    if log:
        low, high = low or 1e-6, high or 1.0
        return Axis(label, low / 1.1, max(high, low * 1.5) * 1.1, show, True)
    low = min(low, 0.0) if zero else low
    return Axis(label, low, high + (high - low) * 0.05 if high > low else low + (abs(low) or 1.0), show)


@dataclass
class Plot:
    """One plot. What is drawn first lies below."""

    x: Axis
    y: Axis
    title: str
    _parts: list[str] = field(default_factory=list)
    _legend: list[tuple[str, str]] = field(default_factory=list)

    def line(self, points: Sequence[Point], colour: str, label: str = "", *, dots: bool = False) -> None:
        """A line through points; with `dots`, a mark at each that tells its values."""
        path = " ".join(f"{self._x(x):.1f},{self._y(y):.1f}" for x, y in points)
        self._parts.append(f'<polyline class="line {colour}" points="{path}"/>')
        if dots:
            self.scatter(points, colour, size=3.0)
        if label:
            self._legend.append((colour, label))

    def band(self, lower: Sequence[Point], upper: Sequence[Point], colour: str) -> None:
        """What lies between two lines: an interval."""
        path = " ".join(f"{self._x(x):.1f},{self._y(y):.1f}" for x, y in (*lower, *reversed(upper)))
        self._parts.append(f'<polygon class="band {colour}" points="{path}"/>')

    def scatter(self, points: Sequence[Point], colour: str, label: str = "", *, size: float = 2.0) -> None:
        """A mark at each point."""
        every = max(1, -(-len(points) // MOST_POINTS))
        for x, y in points[::every]:
            told = escape(f"{self.x.show(x)}, {self.y.show(y)}")
            self._parts.append(
                f'<circle class="dot {colour}" cx="{self._x(x):.1f}" cy="{self._y(y):.1f}" r="{size}">'
                f"<title>{told}</title></circle>"
            )
        if label:
            self._legend.append((colour, label))

    def upright(self, x: float, colour: str, label: str = "") -> None:
        """A line from bottom to top."""
        at = f"{self._x(x):.1f}"
        self._parts.append(f'<line class="mark {colour}" x1="{at}" x2="{at}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        if label:
            self._legend.append((colour, label))

    def level(self, y: float, colour: str, label: str = "") -> None:
        """A line from left to right."""
        at = f"{self._y(y):.1f}"
        self._parts.append(f'<line class="mark {colour}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>')
        if label:
            self._legend.append((colour, label))

    def shade(self, begin: float, end: float) -> None:
        """A stretch of the x axis that is not measured."""
        left, right = self._x(begin), self._x(end)
        if right > left:
            self._parts.append(
                f'<rect class="shade" x="{left:.1f}" width="{right - left:.1f}" y="{TOP}" '
                f'height="{HEIGHT - BOTTOM - TOP}"/>'
            )

    def text(self, x: float, y: float, words: str) -> None:
        """A few words beside a point."""
        at = self._x(x)
        fits = at + 6 + 7 * len(words) <= WIDTH
        side = ("start", 6) if fits else ("end", -6)
        self._parts.append(
            f'<text class="word" x="{at + side[1]:.1f}" y="{self._y(y) - 6:.1f}" text-anchor="{side[0]}">'
            f"{escape(words)}</text>"
        )

    def __str__(self) -> str:
        return (
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(self.title, quote=True)}">'
            f"{self._axes()}{''.join(self._parts)}</svg>{legend(self._legend)}"
        )

    def _x(self, value: float) -> float:
        return LEFT + self.x.at(value) * (WIDTH - LEFT - RIGHT)

    def _y(self, value: float) -> float:
        return HEIGHT - BOTTOM - self.y.at(value) * (HEIGHT - TOP - BOTTOM)

    def _axes(self) -> str:
        parts = []
        for tick in self.y.ticks():
            at = self._y(tick)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
            parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{escape(self.y.show(tick))}</text>')
        bottom, last = HEIGHT - BOTTOM, -math.inf
        for tick in self.x.ticks():
            at, words = self._x(tick), self.x.show(tick)
            parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{bottom}"/>')
            if at - last > 7 * len(words) + 8:
                within = min(at, WIDTH - 3.5 * len(words) - 2)  # all of it, also at the right end
                parts.append(f'<text x="{within:.1f}" y="{bottom + 16}" text-anchor="middle">{escape(words)}</text>')
                last = at
        middle = (LEFT + WIDTH - RIGHT) / 2
        parts.append(f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(self.x.label)}</text>')
        high = (TOP + bottom) / 2
        parts.append(
            f'<text x="13" y="{high}" text-anchor="middle" transform="rotate(-90 13 {high})">'
            f"{escape(self.y.label)}</text>"
        )
        return "".join(parts)


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """What each colour is."""
    if not entries:
        return ""
    items = "".join(
        f'<span><i class="key {colour}"></i>{escape(label)}</span>' for colour, label in dict.fromkeys(entries)
    )
    return f'<p class="legend">{items}</p>'


def cumulative(values: Sequence[float]) -> list[Point]:
    """For each value, the share of all that are at most as large; thinned where there are very many."""
    ordered = sorted(values)
    n = len(ordered)
    if n <= MOST_POINTS:
        places: Sequence[int] = range(n)
    else:  # every quantile that can be seen, and all of the tail
        places = sorted({round(place * (n - 1) / 1000) for place in range(1001)} | set(range(n - 200, n)))
    made = [(ordered[place], (place + 1) / n) for place in places]
    return [(ordered[0], 0.0), *made] if made else []


def stack(rows: Sequence[tuple[str, Sequence[tuple[str, float, str]]]]) -> str:
    """Horizontal bars of one length, each cut into (colour, share 0 to 1, words)."""
    made = []
    for label, parts in rows:
        cells = "".join(
            f'<i class="{colour}" style="width:{share * 100:.2f}%" title="{escape(words, quote=True)}">'
            f"{escape(f'{share:.0%}') if share > 0.07 else ''}</i>"
            for colour, share, words in parts
        )
        made.append(f'<div class="bar"><b>{escape(label)}</b><span>{cells}</span></div>')
    return f'<div class="bars">{"".join(made)}</div>'


def lengths(rows: Sequence[tuple[str, float, str, str]]) -> str:
    """Horizontal bars of (label, share 0 to 1 of the longest, words, colour)."""
    made = [
        f'<div class="bar"><b>{escape(label)}: {escape(words)}</b>'
        f'<span><i class="{colour}" style="width:{share * 100:.2f}%"></i></span></div>'
        for label, share, words, colour in rows
    ]
    return f'<div class="bars">{"".join(made)}</div>'
