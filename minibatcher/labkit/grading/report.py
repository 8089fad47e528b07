"""What a teacher gets: a table, a CSV file, JSON, and pages that need no network."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from dataclasses import asdict
from html import escape
from pathlib import Path

from .run import Result

_STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em}
table{border-collapse:collapse}td,th{border:1px solid #999;padding:.3em .6em;text-align:left;vertical-align:top}
td:first-child{white-space:nowrap}
.bar{display:inline-block;height:1em;background:#0072B2}"""


def table(results: list[Result]) -> str:
    """One student: a line an exercise; several: a line each, and the means."""
    if len(results) == 1:
        one = results[0]
        lines = [f"{s.points}/{s.of}  {s.exercise}: {'; '.join([s.reason, *s.remarks])}" for s in one.scores]
        lines = [*one.problems, *lines, f"{one.name}: {one.total} of {_most(results)} points"]
        return "\n".join(map(_printable, lines))
    width = max((len(_printable(r.name)) for r in results), default=0)
    lines = [
        f"{_printable(r.name):{width}}  {r.total:4d} of {_most(results)}"
        + "".join(f"  ({_printable(p)})" for p in r.problems)
        for r in results
    ]
    mean = sum(r.total for r in results) / max(len(results), 1)
    lines.append(f"{len(results)} submissions, {mean:.1f} of {_most(results)} points on average")
    return "\n".join(lines)


def write_csv(path: Path, results: list[Result]) -> None:
    names = [score.exercise for score in results[0].scores] if results else []
    with open(path, "w", newline="", encoding="utf-8-sig") as file:
        writer = csv.writer(file)
        writer.writerow(["student", *names, "total", "of", "problems"])
        for r in results:
            row = [_cell(r.name), *(s.points for s in r.scores), r.total, _most(results)]
            writer.writerow([*row, _cell("; ".join(r.problems))])


def _cell(text: str) -> str:
    """A text that no spreadsheet takes for a formula."""
    text = _printable(text)
    return f"'{text}" if text.lstrip()[:1] in ("=", "+", "-", "@", "|", "%") else text


def write_json(path: Path, results: list[Result], facts: dict) -> None:
    students = [asdict(r) | {"total": r.total} for r in results]
    path.write_text(json.dumps(facts | {"of": _most(results), "students": students}, indent=1), encoding="utf-8")


def write_html(folder: Path, results: list[Result], facts: dict) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    links = []
    for number, r in enumerate(results, start=1):
        slug = re.sub(r"[^A-Za-z0-9]+", "-", r.name).strip("-")[:40]
        page = f"{number:03d}-{slug}.html"
        (folder / page).write_text(_student(r, facts, results), encoding="utf-8")
        links.append(f'<tr><td><a href="{page}">{_html(r.name)}</a></td><td>{r.total}</td></tr>')
    body = f"<h1>Grades</h1><p>{_html(facts['protections'])} Seed {facts['seed']}.</p>"
    body += f"<h2>Points</h2>{_histogram(results)}<h2>Hardest exercises</h2>{_hardest(results)}"
    head = f"<tr><th>student</th><th>of {_most(results)}</th></tr>"
    body += f"<h2>Students</h2><table>{head}{''.join(links)}</table>"
    (folder / "index.html").write_text(_page("Grades", body), encoding="utf-8")


def _student(r: Result, facts: dict, results: list[Result]) -> str:
    rows = "".join(
        f"<tr><td>{_html(s.exercise)}</td><td>{s.points} of {s.of}</td>"
        f"<td>{_html('; '.join([s.reason, *s.remarks]))}</td></tr>"
        for s in r.scores
    )
    problems = "".join(f"<p>{_html(p)}</p>" for p in r.problems)
    head = "<tr><th>exercise</th><th>points</th><th>why</th></tr>"
    total = f"<p>{r.total} of {_most(results)} points, seed {facts['seed']}</p>"
    return _page(r.name, f"<h1>{_html(r.name)}</h1>{total}{problems}<table>{head}{rows}</table>")


def _histogram(results: list[Result]) -> str:
    counts = Counter(r.total for r in results)
    rows = (
        f'<tr><th>{points}</th><td><span class="bar" style="width:{20 * n / max(counts.values()):.1f}em"></span> '
        f"{n}</td></tr>"
        for points, n in sorted(counts.items())
    )
    return f"<table><tr><th>points</th><th>students</th></tr>{''.join(rows)}</table>"


def _hardest(results: list[Result]) -> str:
    tried, solved = Counter(), Counter()
    for score in (score for r in results for score in r.scores):
        tried[score.exercise] += 1
        solved[score.exercise] += score.points > 0
    order = sorted(tried, key=lambda exercise: solved[exercise] / tried[exercise])
    rows = (f"<tr><td>{_html(e)}</td><td>{solved[e]} of {tried[e]}</td></tr>" for e in order)
    return f"<table><tr><th>exercise</th><th>solved by</th></tr>{''.join(rows)}</table>"


def _page(title: str, body: str) -> str:
    head = f'<meta charset="utf-8"><title>{_html(title)}</title><style>{_STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _html(text: str) -> str:
    return escape(_printable(text))


def _most(results: list[Result]) -> int:
    return sum(score.of for score in results[0].scores) if results else 0
