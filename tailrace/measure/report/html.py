"""The report: what was found first, then plots, then how it was done."""

from __future__ import annotations

import time
from collections.abc import Sequence
from html import escape

import msgspec

from tailrace.measure import result
from tailrace.measure.report import contest, curves, page, plots, sides, words
from tailrace.measure.result import Bench, Measured

TITLES = {
    "run": "Benchmark",
    "import": "Benchmark",
    "sweep": "Load sweep",
    "search": "Highest load",
    "compare": "A and B",
    "engines": "Engines side by side",
}


def html(bench: Bench) -> str:
    """One self-contained page."""
    first = bench.runs[0] if bench.runs else None
    title = "Prediction" if _predicted(bench) else TITLES[bench.kind]
    if first is not None:
        title += f": {first.workload}" + ("" if bench.kind == "engines" else f" on {first.model}")
    parts = [f"<h1>{escape(title)}</h1>"]
    if first is not None:
        when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(first.began)) if first.began else ""
        urls = " and ".join(dict.fromkeys(run.url for run in bench.runs))
        told = sides.title(bench) if bench.kind == "engines" else urls
        parts.append(page.paragraph(" · ".join(filter(None, (told, when))), "soft"))
    if bench.kind == "engines":
        parts += contest.html(bench)
    elif bench.kind == "compare":
        parts += _compared(bench)
    elif bench.kind in ("sweep", "search"):
        parts += _levels(bench)
    else:
        for run in bench.runs:
            parts += _run(bench, run, alone=len(bench.runs) == 1)
    parts.append(_how(bench))
    return page.page(title, "".join(parts))


def _predicted(bench: Bench) -> bool:
    """Whether nothing in it was measured."""
    return bool(bench.runs) and all(run.source == "predicted" for run in bench.runs)


def _run(bench: Bench, run: Measured, *, alone: bool) -> list[str]:
    heading = run.load if alone or run.label == run.load else f"{run.label} · {run.load}"
    parts = [] if alone and not run.load else [f"<h2>{escape(heading)}</h2>"]
    parts += [_tiles(bench, run), _judgements(bench, run), page.table(words.HEADS, words.latencies(run))]
    parts.append(page.plots([*plots.of_run(bench, run)]))
    return parts


def _tiles(bench: Bench, run: Measured) -> str:
    summary = run.summary
    entries = []
    for metric in ("ttft", "itl", "tpot", "e2e"):
        median = words.quantile(run, metric, "p50")
        if median and (metric != "tpot" or summary.itl_basis == "tokens"):
            tail = words.quantile(run, metric, "p99")
            entries.append((median, words.NAMES[metric], "median" + (f"; p99 {tail}" if tail else "")))
    rates = summary.rates
    if rates.output_tokens is not None:
        entries.append((words.rate(rates.output_tokens), "output tokens/s", f"{words.rate(rates.requests)} requests/s"))
    good = summary.goodput
    if good is not None and bench.slo is not None:
        entries.append(
            (f"{good.attainment:.1%}", "good", f"wanted {bench.slo.share:.0%}: {'kept' if good.met else 'not kept'}")
        )
    if bench.price is not None:
        cost = result.cost(summary, bench.price)
        if cost.per_million_output is not None:
            entries.append(
                (f"${cost.per_million_output:.3g}", "a million output tokens", f"at ${bench.price:g} an hour")
            )
    entries.append((f"{summary.requests:,}", "requests", words.failed(run)))
    return page.tiles(entries)


def _judgements(bench: Bench, run: Measured) -> str:
    summary = run.summary
    parts = []
    if summary.failures:
        told = "; ".join(f"{count:,} x {error}" for error, count in summary.errors.items())
        parts.append(page.paragraph(f"{words.failed(run)}, and are in no latency below: {told}", "bad"))
    if summary.interrupted:
        parts.append(page.paragraph("The measurement was interrupted: this is what there was by then.", "bad"))
    if run.source == "measured":
        kind = "bad" if summary.client.reasons else "soft"
        parts.append(page.paragraph(f"Client: {words.verdict(run)}.", kind))
    named = {"Goodput": words.goodput(bench, run), "Throughput": words.throughput(run), "Shape": words.shape(run)}
    if bench.price is not None:
        named["Cost"] = words.cost(result.cost(summary, bench.price))
    parts += [page.paragraph(f"{name}: {text}.", "soft") for name, text in named.items() if text is not None]
    parts += [page.paragraph(note, "soft") for note in run.notes]
    return "".join(parts)


def _levels(bench: Bench) -> list[str]:
    heads, rows = words.levels(bench)
    found = words.found(bench)
    parts = [page.paragraph(found)] if found else []
    parts.append(page.plots([*curves.of_levels(bench)]))
    parts += ["<h2>Every level</h2>", page.table(heads, rows, words.chosen(bench))]
    failed = [run for run in bench.runs if run.summary.failures]
    parts += [_judgements(bench, run) for run in failed]
    chosen = words.chosen(bench)
    if chosen is not None:
        parts += _run(bench, bench.runs[chosen], alone=False)
    return parts


def _compared(bench: Bench) -> list[str]:
    urls = list(dict.fromkeys(run.url for run in bench.runs))
    parts = [page.paragraph(f"A is {urls[0]}, B is {urls[-1]}. They were measured in turns, and pairs are compared.")]
    parts.append(page.table(*words.differences(bench)))
    parts.append(page.plots([*curves.of_pairs(bench)]))
    heads, rows = words.levels(bench)
    return [*parts, "<h2>Every run</h2>", page.table(heads, rows)]


def _how(bench: Bench) -> str:
    setting = msgspec.json.format(msgspec.json.encode(bench.setting), indent=2).decode() if bench.setting else ""
    definitions: Sequence[str] = (
        "TTFT: the first piece that carries text, reasoning or tool arguments, minus when the request was due (open "
        "loop) or sent (closed loop).",
        "TPOT: (last token - first visible one) / tokens after that one. ITL: gaps between tokens; where several came "
        "at once, chunk gaps are shown apart and ITL is from usage. E2E: last token minus due or sent.",
        "Tokens are as the server's usage counts them. Rates are of the steady window, without warm-up and drain. "
        "Failures are in no latency, and in every share. Intervals are of 95 %, bootstrapped over requests.",
    )
    made = "".join(page.paragraph(text, "soft") for text in definitions)
    predicted = _predicted(bench)
    made = f"<h2>How this was {'predicted' if predicted else 'measured'}</h2>{made}"
    if setting:
        made += "<details><summary class=soft>Everything that was set</summary>"
        made += f"<pre class=wide>{escape(setting)}</pre></details>"
    command = "compare" if bench.kind == "engines" else "bench"
    how = "Predicted by tailrace simulate" if predicted else f"Measured from outside by tailrace {command}"
    return made + f"<footer>{how} {escape(bench.version)}.</footer>"
