"""The report that teaches: the question, the plot, what the numbers say, what people believe, and the numbers."""

from __future__ import annotations

import time
from html import escape

from tailrace.measure.lab.experiment import Belief, Finding, Lesson, Mark, Table, Verdict
from tailrace.measure.lab.perform import Chapter, Report
from tailrace.measure.report import page
from tailrace.measure.report.words import ms

KINDS = {Verdict.HOLDS: "good", Verdict.FAILS: "bad", Verdict.OPEN: "soft"}
STYLE = """
.from { color: var(--soft); font-size: .78rem; border: 1px solid var(--grid); border-radius: 4px; padding: 0 .35em;
  white-space: nowrap; }
section { border-top: 1px solid var(--grid); margin-top: 2rem; } section h2 { margin: 1rem 0 .2rem; }
.asked { font-size: 1.05rem; } ul { margin: .5rem 0; padding-left: 1.2rem; max-width: 85ch; } li { margin: .35rem 0; }
.belief { background: var(--card); border-radius: 8px; padding: .5rem .8rem; margin: .5rem 0; max-width: 85ch; }
.belief b { font-weight: 600; } .belief p { margin: .1rem 0; } nav { display: flex; flex-wrap: wrap; gap: .2rem 1rem; }
figure { max-width: 620px; } a { color: inherit; } .glance td:first-child { white-space: normal; min-width: 11rem; }
h3 { font-size: .98rem; margin: 1rem 0 .2rem; }
"""


def html(report: Report) -> str:
    """One self-contained page."""
    title = f"Lab: {report.model}"
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(report.began))
    parts = [f"<style>{STYLE}</style><h1>{escape(title)}</h1>"]
    parts.append(page.paragraph(f"{report.where} · {when} · {ms(report.seconds)} in all", "soft"))
    if len(report.chapters) > 1:
        links = "".join(f'<a href="#{one.name}">{escape(one.name)}</a>' for one in report.chapters)
        parts += [f"<nav>{links}</nav>", _summary(report)]
    parts += [_chapter(one) for one in report.chapters]
    parts.append(_how(report))
    return page.page(title, "".join(parts))


def _summary(report: Report) -> str:
    """What people believe, and what this run says of it."""
    rows = [
        f'<tr><td>{escape(belief.says)}</td><td class="{KINDS[belief.verdict]}">{escape(belief.verdict)}</td>'
        f'<td><a href="#{one.name}">{escape(one.name)}</a></td></tr>'
        for one in report.chapters if one.lesson is not None for belief in one.lesson.beliefs
    ]  # fmt: skip
    if not rows:
        return ""
    head = "<tr><th>what people say</th><th>this run says: it</th><th>see</th></tr>"
    return f'<h2>At a glance</h2><div class="wide glance"><table>{head}{"".join(rows)}</table></div>'


def _chapter(one: Chapter) -> str:
    head = f'<section id="{one.name}"><h2>{escape(_titled(one.name))}</h2>'
    head += f'<p class="asked">{escape(one.question)}</p>'
    if one.lesson is None:
        return f"{head}{page.paragraph(f'Not done: {one.missing}', 'bad')}</section>"
    return f"{head}{_lesson(one.lesson)}</section>"


def _titled(name: str) -> str:
    return "KV" if name == "kv" else name.capitalize()


def _lesson(lesson: Lesson) -> str:
    parts = [page.paragraph(lesson.did, "soft"), page.plots(lesson.figures), "<h3>What the numbers say</h3>"]
    parts.append(f"<ul>{''.join(map(_finding, lesson.findings))}</ul>")
    if lesson.beliefs:
        parts.append("<h3>What people say</h3>" + "".join(map(_belief, lesson.beliefs)))
    parts.append("<h3>The numbers</h3>" + "".join(map(_table, lesson.tables)))
    parts += [page.paragraph(note, "soft") for note in lesson.notes]
    return "".join(parts)


def _finding(one: Finding) -> str:
    return f"<li>{escape(one.text)} {_mark(one.mark)}</li>"


def _mark(mark: Mark) -> str:
    return f'<span class="from">{escape(mark)}</span>'


def _belief(one: Belief) -> str:
    return (
        f'<div class="belief"><p>“{escape(one.says)}” <b class="{KINDS[one.verdict]}">{escape(one.verdict)}</b></p>'
        f'<p class="soft">{escape(one.because)}</p></div>'
    )


def _table(one: Table) -> str:
    return page.table(one.heads, one.rows) + f"<p>{_mark(one.mark)}</p>"


def _how(report: Report) -> str:
    said = (
        "Every number is marked with where it comes from: measured in this run; predicted, that is computed from "
        "measured numbers or from the model's shape; or assumed, with its source. Means have intervals of 95 % "
        "(bootstrap), and n says of how many values they are. Warm-up is in none of them. Servers that were started "
        "for this ran with --draft-tokens 0, so that a step gives one token, and answers were asked for at "
        "temperature 0 with exactly their length.",
        "What people say is judged by this run alone, on this model and machine: where the interval of the number that "
        "decides has the bar in it, it is not decided.",
    )
    made = "".join(page.paragraph(text, "soft") for text in said)
    return f"<h2>How this was measured</h2>{made}<footer>Made by tailrace lab {escape(report.version)}.</footer>"
