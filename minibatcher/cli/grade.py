"""`minibatcher grade`: points for the labs that students hand in."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..errors import MinibatcherError


class GradeError(MinibatcherError):
    """Options that can't be followed; the sentence says what to change."""


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "grade",
        help="grade notebooks of the labs",
        description="Grade notebooks: a file a student, or a folder of files, or of a folder a student. Answers run in "
        "processes of their own with limits on time, memory and processes, without right answers, and are judged "
        "outside by what they do. Without root on Linux an answer can reach your files: use a container for strangers.",
        epilog="Exit code: 0 all graded, 1 some submission unreadable, 2 wrong use, 130 interrupted. A run that was "
        "interrupted goes on where it was, by the file *.graded.jsonl beside the reports.",
    )
    parser.add_argument("submissions", nargs="+", type=Path, metavar="SUBMISSION", help="notebooks or folders of them")
    parser.add_argument("--lab", metavar="ID", help="grade this lab alone, such as lab-7.1 (default: those handed in)")
    parser.add_argument("--labs", type=Path, metavar="FOLDER", help="the book's labs (default: labs/ of its folder)")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write a line a student")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything")
    parser.add_argument("--html", type=Path, metavar="DIR", help="write a page a student and a summary")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="submissions at once (default: 1)")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the random inputs (default: 0, which students can try too)"
    )
    parser.set_defaults(run=run_grade)


def run_grade(args: argparse.Namespace) -> int:
    from ..labkit.grading import report
    from ..labkit.grading.run import Grader
    from ..labkit.grading.submissions import students

    missing = [path for path in args.submissions if not path.exists()]
    if missing:
        raise GradeError(f"there is no {str(missing[0])!r}")
    for option, path in (("--csv", args.csv), ("--json", args.json), ("--html", args.html)):
        if path is not None and not path.name:
            raise GradeError(f"{option} needs a name, not {str(path)!r}")
    if args.jobs < 1:
        raise GradeError(f"--jobs must be at least 1, not {args.jobs}")
    found = students(args.submissions)
    if not found:
        raise GradeError("no notebooks there; a folder must hold *.ipynb, or a folder for each student")
    labs, exercises, folder = _labs(args, [path for _, files in found for path in files])
    store = _store(args)
    grader = Grader(labs, exercises, args.seed, args.jobs, hide=(folder.parent / "solutions", *_folders(args)))
    with _bar(len(found)) as bar:
        results = grader.grade(found, store, lambda result: bar.update())
    facts = {"seed": args.seed, "protections": _said(grader.protections)}
    print(report.table(results))
    print(f"{facts['protections']} Seed {args.seed}.", file=sys.stderr)
    if args.csv:
        report.write_csv(args.csv, results)
    if args.json:
        report.write_json(args.json, results, facts)
    if args.html:
        report.write_html(args.html, results, facts)
    return 1 if any(result.problems for result in results) else 0


def _labs(args: argparse.Namespace, files: list[Path]) -> tuple[dict, dict, Path]:
    """The labs that count, their exercises, and the folder of the pristine ones."""
    from ..labkit.build import _find_root
    from ..labkit.grading.submissions import Unreadable, lab_of, read_cells, read_lab
    from ..labkit.manifest import load_manifest

    folder = args.labs or _find_root("--labs FOLDER/labs") / "labs"
    exercises = load_manifest()
    known = {exercise.lab for exercise in exercises.values()}
    labs = {p.stem: read_lab(p, exercises) for p in sorted(folder.glob("*.ipynb")) if p.stem in known}
    if not labs:
        raise GradeError(f"no labs in {str(folder)!r}; name their folder by --labs")
    if args.lab:
        name = args.lab if args.lab in labs else f"lab-{args.lab}"
        if name not in labs:
            raise GradeError(f"no lab {args.lab!r} in {str(folder)!r}; there are {', '.join(labs)}")
        wanted = {name}
    else:
        wanted = set()
        for path in files:
            if wanted == set(labs):
                break
            try:
                wanted.add(lab_of(read_cells(path, exercises), labs, exercises))
            except Unreadable:
                continue
    wanted = wanted & set(labs) or set(labs)
    labs = {name: lab for name, lab in labs.items() if name in wanted}
    return labs, {e.id: e for e in exercises.values() if e.lab in labs and e.id in labs[e.lab].stubs}, folder


def _folders(args: argparse.Namespace) -> list[Path]:
    """Where submissions and their marks lie: nothing for an answer to read."""
    reports = [path for path in (args.html, args.csv and args.csv.parent, args.json and args.json.parent) if path]
    return [path if path.is_dir() else path.parent for path in (*args.submissions, *reports)]


def _store(args: argparse.Namespace) -> Path | None:
    """Where results are kept from run to run; it and all reports can be written, or OSError is raised at once."""
    store = None
    for file in (args.html and args.html / "index.html", args.csv, args.json):
        if file:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.open("ab").close()
            store = file.with_suffix(".graded.jsonl")
    return store


def _bar(total: int):
    from tqdm import tqdm

    return tqdm(total=total, desc="grading", unit="submission", disable=None)


def _said(protections: dict[str, bool]) -> str:
    if not protections:
        return "No answer was run in this turn."
    on = [name for name, works in protections.items() if works]
    off = [name for name, works in protections.items() if not works]
    return f"Protections on: {', '.join(on)}" + (f"; not possible here: {', '.join(off)}." if off else ".")
