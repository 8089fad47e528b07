"""The grader against a bank of hostile, broken and unusual submissions: the exact points, and never its own end."""

from __future__ import annotations

import copy
import csv
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from minibatcher.cli import main
from minibatcher.labkit.audit import source_digest
from minibatcher.labkit.grading import report
from minibatcher.labkit.grading.run import Grader
from minibatcher.labkit.grading.submissions import read_lab, students
from minibatcher.labkit.manifest import load_manifest
from minibatcher.labkit.notebooks import dumps, read_source, student_copy

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the bank needs limits that only POSIX systems have")

ROOT = Path(__file__).parents[1]
EXERCISES = load_manifest()


def handed_out(folder: Path) -> dict[str, Path]:
    """The labs, from their masters: a reader may have worked in those of labs/."""
    return {master.stem: _handed_out(master, folder) for master in sorted((ROOT / "solutions").glob("*.md"))}


def _handed_out(master: Path, folder: Path) -> Path:
    lab = student_copy(read_source(master, EXERCISES))
    lab.metadata["minibatcher"] = {"sources": source_digest(lab)}
    path = folder / f"{master.stem}.ipynb"
    path.write_text(dumps(lab), encoding="utf-8")
    return path


FOLDER = tempfile.TemporaryDirectory()
LABS = handed_out(Path(FOLDER.name))
LAB = LABS["lab-7.1"]
PRISTINE = json.loads(LAB.read_text(encoding="utf-8"))
FIRST, SECOND = "7.1-padding", "7.1-fastest-finisher"
RIGHT = {
    FIRST: """def padded_tokens(lengths, size):
    parts = [lengths[i : i + size] for i in range(0, len(lengths), size)]
    return sum(len(p) * max(p) for p in parts), sum(lengths)
""",
    SECOND: """def wasted_row_steps(lengths, size):
    parts = [lengths[i : i + size] for i in range(0, len(lengths), size)]
    return sum(max(p) * len(p) - sum(p) for p in parts)
""",
}


@dataclass
class Case:
    """first, second: the answers' text, None to leave the stub. edit: changes the notebook. points: expected."""

    points: tuple[int, int]
    first: str | None = RIGHT[FIRST]
    second: str | None = RIGHT[SECOND]
    edit: Callable[[dict], None] | None = None
    remark: str = ""


def body(line: str) -> str:
    return "def padded_tokens(lengths, size):\n    " + line.replace("\n", "\n    ") + "\n"


def answers(nb: dict, role: str = "answer") -> list[dict]:
    found = (cell for cell in nb["cells"] if cell["metadata"].get("minibatcher", {}).get("role") == role)
    return [cell for cell in found if cell["metadata"]["minibatcher"]["exercise"] in RIGHT]


def scratch(text: str) -> dict:
    return {"cell_type": "code", "metadata": {}, "source": text, "outputs": [], "execution_count": None}


def add_first(text: str) -> Callable[[dict], None]:
    return lambda nb: nb["cells"].insert(0, scratch(text))


def edit_checks(nb: dict) -> None:
    for cell in answers(nb, "check"):
        cell["source"] = "print('✓ all is well')"


def drop(role: str, number: int | None = None) -> Callable[[dict], None]:
    def edit(nb: dict) -> None:
        for cell in answers(nb, role)[slice(number, None if number is None else number + 1)]:
            nb["cells"].remove(cell)

    return edit


def colab(nb: dict) -> None:
    for cell in nb["cells"]:
        cell.pop("id", None)
        cell["metadata"] = {"id": "a1b2"}
    nb["cells"].insert(2, scratch("!pip install x\n%matplotlib inline\nprint('scratch')"))


def duplicate(nb: dict) -> None:
    extra = copy.deepcopy(answers(nb)[0])
    extra["source"] = RIGHT[FIRST]
    nb["cells"].append(extra)


def old_format(nb: dict) -> None:
    cells = [{**c, "input": c["source"]} if c["cell_type"] == "code" else c for c in nb.pop("cells")]
    for cell in cells:
        cell.pop("source", None) if "input" in cell else None
        cell.pop("id", None)
    nb.update(nbformat=3, worksheets=[{"cells": cells}])


def big_output(nb: dict) -> None:
    answers(nb)[0]["outputs"] = [{"output_type": "stream", "name": "stdout", "text": "x" * 100_000_000}]


FORGED = r"""import os
for fd in range(3, 20):
    try:
        os.write(fd, b'"answer"\n["case", [], null, false]\n"done"\n')
    except OSError:
        pass
os._exit(0)
"""
ALIKE = "class Yes(int):\n    def __eq__(self, other): return True\n    def __index__(self): return 7\n"
ALIKE += body("return Yes(), Yes()")
SWALLOW = "while True:\n    try:\n        while True: pass\n    except BaseException: pass"

BANK = {
    "perfect": Case((2, 2)),
    "untouched": Case((0, 0), None, None),
    "partial": Case((0, 2), body("return len(lengths) * max(lengths), sum(lengths)")),
    "edited checks": Case((0, 2), None, edit=edit_checks, remark="check cell was edited"),
    "deleted checks": Case((2, 2), edit=drop("check")),
    "nbval marker": Case((0, 2), "# NBVAL_SKIP\n" + body("return 1 / 0")),
    "swallowed errors": Case((0, 2), body("try:\n    return 1 / 0\nexcept Exception:\n    pass")),
    "equal to everything": Case((0, 2), ALIKE),
    "patched check": Case(
        (0, 2),
        "import minibatcher.labkit.judging as j\nj.verdict = j.record = lambda *a: None\n" + body("return 1, 1"),
    ),
    "games with modules": Case(
        (0, 2),
        "import sys\nfor name in list(sys.modules):\n    if 'minibatcher' in name or name == 'json':\n"
        "        sys.modules[name] = None\n" + body("return 1, 1"),
    ),
    "imports keys": Case((0, 2), "from minibatcher.labkit.keys.lab_7_1 import PADDING\npadded_tokens = PADDING.answer"),
    "finds keys anyway": Case(
        (0, 2),
        "import sys\nsys.meta_path.pop(0)\nfrom minibatcher.labkit.keys.lab_7_1 import PADDING\n"
        "padded_tokens = PADDING.answer",
    ),
    "endless": Case((0, 2), body("while True: pass")),
    "endless cell": Case((0, 2), "while True: pass\n" + RIGHT[FIRST]),
    "endless, swallowing": Case((0, 2), body(SWALLOW)),
    "ends the process": Case((0, 2), body("import os\nos._exit(0)")),
    "exits": Case((0, 2), body("raise SystemExit(0)")),
    "exits in the cell": Case((0, 2), "import sys\nsys.exit(0)\n" + RIGHT[FIRST]),
    "kills the parent": Case((0, 2), body("import os\nos.kill(os.getppid(), 9)\nreturn 0, 0")),
    "memory hog": Case((0, 2), body("kept = []\nwhile True: kept.append(bytes(10**9))")),
    "print flood": Case((2, 2), RIGHT[FIRST].replace("    parts", "    print('x' * 1_000_000)\n    parts", 1)),
    "fork bomb": Case((0, 2), body("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass")),
    "threads left": Case(
        (2, 2), "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()\n" + RIGHT[FIRST]
    ),
    "writes a file": Case((2, 2), "open('left.txt', 'w').write('here')\n" + RIGHT[FIRST]),
    "syntax error": Case((0, 2), "def padded_tokens(lengths, size:\n    return 1"),
    "colab": Case((2, 2), edit=colab),
    "duplicated": Case((2, 2), body("return 0, 0"), edit=duplicate, remark="the last one counts"),
    "reordered": Case((2, 2), edit=lambda nb: nb["cells"].reverse()),
    "deleted": Case((0, 2), edit=drop("answer", 0), remark="no cell with an answer"),
    "empty cell": Case((0, 2), ""),
    "old format": Case((2, 2), edit=old_format),
    "100 MB of output": Case((2, 2), edit=big_output),
    "José María Ñandú": Case((2, 2)),
    "=1+1": Case((2, 2)),
    "forged result": Case((0, 2), FORGED),
    "other cell hangs": Case((2, 2), edit=add_first("class Hang:\n    while True: pass")),
    "helper in another cell": Case(
        (2, 2),
        RIGHT[FIRST].replace("sum(lengths)\n", "total(lengths)\n"),
        edit=add_first("def total(x): return sum(x)"),
    ),
    "helpers that are computed": Case(
        (2, 2),
        RIGHT[FIRST].replace("sum(lengths)\n", "total(lengths) + ZERO\n"),
        edit=add_first("total = lambda x: sum(x)\nZERO = int('0')\ntry:\n    import numpy\nexcept ImportError: pass"),
    ),
    "checked in its own cell": Case(
        (2, 2), RIGHT[FIRST] + 'check("7.1-padding", padded_tokens)\nassert padded_tokens([1], 1) == 7\n'
    ),
    "deep folders": Case(
        (0, 2), body("import os\nfor i in range(3000):\n    os.mkdir('d'); os.chdir('d')\nreturn 0, 0")
    ),
    "a flood of numbers": Case((0, 2), body("return list(range(10**6)), 1")),
    "escapes": Case((0, 2), body("raise ValueError('\\x1b[2J')")),
    "asks and captures": Case((2, 2), "padded_tokens?\nfiles = !ls\n" + RIGHT[FIRST]),
    "magics": Case((2, 2), "%time 1\n!ls\n" + RIGHT[FIRST]),
    "late exit": Case((2, 2), "import atexit, os\natexit.register(os._exit, 3)\n" + RIGHT[FIRST]),
}


def notebook(case: Case) -> str:
    nb = copy.deepcopy(PRISTINE)
    for cell, text in zip(answers(nb), (case.first, case.second)):
        if text is not None:
            cell["source"] = f"# Exercise {cell['metadata']['minibatcher']['exercise']}\n{text}"
    if case.edit:
        case.edit(nb)
    return json.dumps(nb)


@pytest.fixture(scope="module")
def graded(tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("bank")
    for name, case in BANK.items():
        (folder / f"{name}.ipynb").write_text(notebook(case), encoding="utf-8")
    (folder / "not a notebook.ipynb").write_bytes(b"\x00\xff{[")
    before = sorted(p.name for p in folder.iterdir()), sorted(p.name for p in Path.cwd().iterdir())
    results = grader(jobs=2).grade(students([folder]))
    assert before == (sorted(p.name for p in folder.iterdir()), sorted(p.name for p in Path.cwd().iterdir()))
    return {result.name: result for result in results}


def grader(**options) -> Grader:
    return Grader({"lab-7.1": read_lab(LAB, EXERCISES)}, {e: EXERCISES[e] for e in RIGHT}, 1, longest_s=1, **options)


@pytest.mark.parametrize("name", BANK)
def test_points(graded: dict, name: str) -> None:
    scores = graded[name].scores
    assert tuple(score.points for score in scores) == BANK[name].points, scores
    assert all(score.reason for score in scores)
    assert BANK[name].remark in " ".join(remark for score in scores for remark in score.remarks)


def test_a_file_that_is_no_notebook_is_a_problem(graded: dict) -> None:
    assert graded["not a notebook"].problems == ["not a notebook.ipynb is not a notebook"]
    assert graded["not a notebook"].total == 0


def test_the_reason_is_the_checks_message(graded: dict) -> None:
    assert "padded to its own longest prompt" in graded["partial"].scores[0].reason
    assert "may not import minibatcher" in graded["imports keys"].scores[0].reason
    assert "stopped after 1 seconds" in graded["endless"].scores[0].reason


def test_reports_escape_what_students_write(graded: dict, tmp_path: Path) -> None:
    result = copy.deepcopy(graded["=1+1"])
    result.scores[0].reason = "<script>alert(1)</script>"
    report.write_csv(tmp_path / "a.csv", [result])
    report.write_html(tmp_path / "pages", [result], {"seed": 1, "protections": "none"})
    with open(tmp_path / "a.csv", encoding="utf-8-sig", newline="") as file:
        assert list(csv.reader(file))[1][:4] == ["'=1+1", "2", "2", "4"]
    assert "<script" not in "".join(page.read_text(encoding="utf-8") for page in (tmp_path / "pages").iterdir())


def test_a_run_goes_on_where_it_was(tmp_path: Path) -> None:
    (tmp_path / "ada.ipynb").write_text(notebook(BANK["perfect"]), encoding="utf-8")
    store = tmp_path / "a.graded.jsonl"
    first = grader().grade(students([tmp_path]), store)
    kept = store.read_text(encoding="utf-8")
    store.write_text(kept + '{"key": "cut', encoding="utf-8")
    again = grader()
    again._one = None  # nothing may be graded twice
    assert again.grade(students([tmp_path]), store) == first


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in" / "ada").mkdir(parents=True)
    (tmp_path / "in" / "ada" / "any name.ipynb").write_text(notebook(BANK["perfect"]), encoding="utf-8")
    (tmp_path / "in" / "bob.ipynb").write_text("no", encoding="utf-8")
    out = tmp_path / "new" / "out.json"
    assert main(["grade", str(tmp_path / "in"), "--lab", "7.1", "--labs", str(LAB.parent), "--json", str(out)]) == 1
    assert "2 submissions" in capsys.readouterr().out
    ada, bob = json.loads(out.read_text(encoding="utf-8"))["students"]
    assert [s["points"] for s in ada["scores"]][:2] == [2, 2] and bob["total"] == 0


def test_wrong_use_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grade", "nowhere.ipynb"]) == 2
    assert "there is no 'nowhere.ipynb'" in capsys.readouterr().err


def test_every_lab_scores_full_solved_and_nothing_as_handed_out() -> None:
    labs = {name: read_lab(path, EXERCISES) for name, path in LABS.items()}
    solutions = sorted((ROOT / "solutions").glob("*.ipynb"))
    solved, starter = Grader(labs, EXERCISES, 4).grade([("solved", solutions), ("starter", list(LABS.values()))])
    assert {e.lab for e in EXERCISES.values()} == set(labs) and len(solved.scores) == len(EXERCISES)
    assert [s.exercise for s in solved.scores if s.points != EXERCISES[s.exercise].points] == []
    assert starter.total == 0
    assert {s.reason[:15] for s in starter.scores} == {"not written yet"}


def test_labs_that_somebody_has_worked_in_are_no_measure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lab-7.1.ipynb").write_text(notebook(BANK["perfect"]), encoding="utf-8")
    assert main(["grade", str(LAB), "--labs", str(tmp_path)]) == 2
    assert "is not as it was built; grade against an untouched copy" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_is_told_before_the_work(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(Grader, "grade", lambda *arguments: pytest.fail("it has begun"))
    assert main(["grade", str(LAB), "--labs", str(LAB.parent), "--csv", str(tmp_path)]) == 2
    assert "Is a directory" in capsys.readouterr().err


SHOW = """import subprocess
safe = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}
command = ["git", "-C", ROOT, "show", "HEAD:solutions/lab-7.2.md"]
text = subprocess.run(command, env=safe, capture_output=True, text=True, check=True).stdout
exec(text.split("```{code-cell} ipython3\\n:exercise: 7.2-next-batch")[1].split("```")[0])
"""
STEALS = {
    "the solution": "exec(next(l for l in [open(ROOT + '/solutions/lab-7.2.md').read()]))",
    "the history": SHOW,
    "the keys": "exec(open(ROOT + '/minibatcher/labkit/keys/lab_7_2.py').read())\nnext_batch = _next_batch",
    "the capstone's stand-ins": "exec(open('../minibatcher/labkit/stand_ins.py').read())",
    "answers in the tests": "import sys\nsys.path.insert(0, ROOT + '/tests')\n"
    "from lab_answers.lab_7_2 import RIGHT\nnext_batch = RIGHT['7.2-next-batch'][0]",
}


@pytest.mark.parametrize("name", STEALS)
def test_what_lies_near_is_out_of_an_answers_reach(name: str, tmp_path: Path) -> None:
    nb = json.loads(LABS["lab-7.2"].read_text(encoding="utf-8"))
    cell = next(c for c in nb["cells"] if c["id"] == "7-2-next-batch-answer")
    cell["source"] = f"# Exercise 7.2-next-batch\nROOT = {str(ROOT)!r}\n{STEALS[name]}"
    (tmp_path / "thief.ipynb").write_text(json.dumps(nb), encoding="utf-8")
    one = {"7.2-next-batch": EXERCISES["7.2-next-batch"]}
    trial = Grader({"lab-7.2": read_lab(LABS["lab-7.2"], EXERCISES)}, one, 1)
    (result,) = trial.grade(students([tmp_path]))
    if not trial.protections.get("name spaces"):
        pytest.skip("without name spaces an answer can read what its grader can, as the threat model says")
    assert result.total == 0, result.scores


def test_escapes_do_not_reach_the_terminal(graded: dict) -> None:
    shown = report.table([graded["escapes"]])
    assert "ValueError" in shown and "\x1b" not in shown


def test_two_notebooks_of_a_lab_are_said_and_both_count(tmp_path: Path) -> None:
    (tmp_path / "ada").mkdir()
    (tmp_path / "ada" / "a.ipynb").write_text(notebook(BANK["untouched"]), encoding="utf-8")
    (tmp_path / "ada" / "b.ipynb").write_text(notebook(BANK["perfect"]), encoding="utf-8")
    (tmp_path / "ada" / "__MACOSX").mkdir()
    (tmp_path / "ada" / "__MACOSX" / "._b.ipynb").write_bytes(b"mac")
    (result,) = grader().grade(students([tmp_path]))
    assert result.total == 4
    assert [problem.split(";")[0] for problem in result.problems] == ["b.ipynb is a second notebook of lab-7.1"]


def test_names_stay_apart(tmp_path: Path) -> None:
    for group in ("one", "two"):
        (tmp_path / group).mkdir()
        (tmp_path / group / "ada.ipynb").write_text("{}", encoding="utf-8")
    assert [name for name, _ in students([tmp_path / "one", tmp_path / "two"])] == ["ada", "two/ada"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes in folders here")
def test_what_is_no_file_is_a_problem(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.ipynb")
    assert grader().grade(students([tmp_path]))[0].problems == ["pipe.ipynb is not a file"]
