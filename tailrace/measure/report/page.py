"""The page around tables and plots: one file, no scripts, nothing fetched; light or dark as the reader's system is."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

STYLE = """
:root { color-scheme: light dark; --back: #fff; --card: #f6f7f9; --ink: #1a1f27; --soft: #5c6673; --grid: #dde1e7;
  --c0: #1f6fb8; --c1: #c2571a; --c2: #2c8558; --c3: #8a4fb0; --c4: #a08410; --c5: #607080; --c6: #c43b5e;
  --c7: #2a8c99;
  --good: #22794b; --bad: #c0262d; }
@media (prefers-color-scheme: dark) { :root { --back: #12161c; --card: #1a2029; --ink: #e4e8ee; --soft: #98a3b1;
  --grid: #313a46; --c0: #62aef0; --c1: #f09a5e; --c2: #62c592; --c3: #c495e6; --c4: #d9bd4a; --c5: #94a3b3;
  --c6: #f0829d; --c7: #62c3d0; --good: #62c592; --bad: #f4777d; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.2rem clamp(.8rem, 3vw, 2.5rem) 3rem; max-width: 1500px; background: var(--back);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.45rem; margin: .2rem 0; } h2 { font-size: 1.12rem; margin: 1.8rem 0 .5rem; }
p, li { margin: .3rem 0; max-width: 80ch; } ul { padding-left: 1.2rem; margin: .3rem 0; }
.soft, figcaption, footer { color: var(--soft); font-size: .87rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; }
th, td { text-align: right; padding: .28rem .7rem; border-bottom: 1px solid var(--grid); white-space: nowrap; }
th { color: var(--soft); font-weight: 600; } th:first-child, td:first-child { text-align: left; padding-left: 0; }
tr.chosen td { font-weight: 700; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(135px, 1fr)); gap: .6rem; margin: .9rem 0; }
.tile { background: var(--card); border-radius: 8px; padding: .6rem .8rem; }
.tile b { display: block; font-size: 1.3rem; }
.tile span { color: var(--soft); font-size: .82rem; display: block; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 370px), 1fr)); gap: .9rem;
  margin-top: .9rem; }
figure { margin: 0; background: var(--card); border-radius: 8px; padding: .8rem; } figure h3 { margin: 0 0 .3rem;
  font-size: .95rem; } svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--soft); font: 12.5px system-ui, sans-serif; }
svg text.word { fill: var(--ink); font-weight: 600; }
.grid { stroke: var(--grid); } .line { fill: none; stroke-width: 2; stroke-linejoin: round; } .band { opacity: .18; }
.dot { opacity: .75; } .mark { stroke-dasharray: 5 4; stroke-width: 1.5; } .shade { fill: var(--soft); opacity: .12; }
.legend { display: flex; flex-wrap: wrap; gap: .1rem 1rem; font-size: .85rem; margin: .2rem 0; }
.key { display: inline-block; width: .75em; height: .75em; border-radius: 2px; margin-right: .4em; }
.bars { display: grid; gap: .5rem; margin: .6rem 0; } .bar b { font-weight: 500; font-size: .85rem; display: block; }
.bar span { display: flex; height: 1.7rem; border-radius: 4px; overflow: hidden; background: var(--grid); }
.bar i { color: #fff; font: 600 .78rem/1.7rem system-ui; text-align: center; overflow: hidden; }
@media (prefers-color-scheme: dark) { .bar i { color: #10141a; } }
.good { color: var(--good); } .bad { color: var(--bad); } footer { margin-top: 2.5rem; }
code { overflow-wrap: anywhere; }
""" + "".join(
    f"i.c{n} {{ background: var(--c{n}); }} .line.c{n}, .mark.c{n} {{ stroke: var(--c{n}); }} "
    f".dot.c{n}, .band.c{n} {{ fill: var(--c{n}); }}\n"
    for n in range(8)
)


def page(title: str, body: str) -> str:
    """The whole file."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>'
        f"<body>{body}</body></html>\n"
    )


def figure(title: str, content: str, caption: str) -> str:
    """A plot with its name and what it says."""
    return f"<figure><h3>{escape(title)}</h3>{content}<figcaption>{escape(caption)}</figcaption></figure>"


def plots(figures: Sequence[str]) -> str:
    """Beside each other where there is room."""
    return f'<div class="plots">{"".join(figures)}</div>' if figures else ""


def tiles(entries: Sequence[tuple[str, str, str]]) -> str:
    """(number, what it is, more) each."""
    made = "".join(
        f'<div class="tile"><b>{escape(number)}</b>{escape(what)}<span>{escape(more)}</span></div>'
        for number, what, more in entries
    )
    return f'<div class="tiles">{made}</div>'


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], chosen: int | None = None) -> str:
    """Words on the left, numbers on the right; scrolls by itself where it is too wide."""
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    lines = "".join(
        f"<tr{' class=chosen' if place == chosen else ''}>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>"
        for place, row in enumerate(rows)
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'


def paragraph(text: str, kind: str = "") -> str:
    """Plain words."""
    return f"<p{f' class={kind}' if kind else ''}>{escape(text)}</p>"
