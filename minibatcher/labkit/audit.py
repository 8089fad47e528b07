"""What must hold for the notebooks: every exercise complete, every output sound, no solution in a student's copy."""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .manifest import Exercise
from .notebooks import BEGIN, GIVEN, role_of, solution_lines, stub
from .syllabus import load_syllabus

_MARKERS = re.compile(r"###\s*(BEGIN|END) (SOLUTION|HIDDEN TESTS)")
_ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]{6,}")
_WIDGET = "application/vnd.jupyter.widget-view+json"
_NBVAL = re.compile(r"#\s*(NBVAL_\w+|PYTEST_VALIDATE_IGNORE_OUTPUT)")


def exercise_problems(masters: dict[Path, Any], exercises: dict[str, Exercise]) -> list[str]:
    """What the exercises lack: each needs a heading, one answer cell with a solution region, and one check after it."""
    rows = {row.id for row in load_syllabus()}
    problems = [
        f"exercise {exercise.id!r} practises row {row!r}, which is not in syllabus.toml; correct `rows`"
        for exercise in exercises.values()
        for row in exercise.rows
        if row not in rows
    ]
    used: dict[str, str] = {}
    for path, nb in masters.items():
        cells: dict[str, list[str]] = {}
        for cell in nb.cells:
            problems += _cell_problems(cell, path.name, exercises)
            if role := role_of(cell):
                cells.setdefault(cell.metadata["minibatcher"]["exercise"], []).append(role)
        text = "\n".join(cell.source for cell in nb.cells if cell.cell_type == "markdown")
        for exercise_id, roles in cells.items():
            where = f"{path.name}: exercise {exercise_id!r}"
            if roles != ["answer", "check"]:
                problems.append(f"{where} needs one answer cell and one check cell after it, has {', '.join(roles)}")
            if text.count(exercises[exercise_id].heading) != 1:
                problems.append(f"{where} needs its heading once: a line {{{{exercise {exercise_id}}}}}")
            if exercises[exercise_id].lab != path.stem:
                problems.append(
                    f"{where} belongs to {exercises[exercise_id].lab!r} in exercises.toml; correct one of them"
                )
            if exercise_id in used:
                problems.append(f"{where} stands in {used[exercise_id]} too; take one of them out")
            used[exercise_id] = path.name
    problems += [
        f"exercise {exercise_id!r} is in exercises.toml but in no master under solutions/; write it or take it out"
        for exercise_id in exercises
        if exercise_id not in used
    ]
    return problems


def output_problems(nb: Any) -> list[str]:
    """What is wrong with an executed notebook: cells that did not run in order, errors, warnings, unstable outputs."""
    problems = []
    code = [cell for cell in nb.cells if cell.cell_type == "code"]
    for position, cell in enumerate(code, start=1):
        if cell.execution_count != position:
            problems.append(f"cell {cell.id} has execution count {cell.execution_count}, should have {position}")
        for output in cell.outputs:
            if output.output_type == "error":
                problems.append(f"cell {cell.id} holds the error {output.ename}: {output.evalue}")
            if output.output_type == "stream" and output.name == "stderr":
                first = cell.source.split("\n")[0]
                problems.append(f"cell {cell.id} ({first}) writes to stderr: {output.text.strip()[:300]!r}")
            if _ADDRESS.search(_text(output)):
                problems.append(f"cell {cell.id} shows a memory address, which differs from run to run")
            if _WIDGET in output.get("data", {}):
                problems.append(
                    f"cell {cell.id} shows a widget, which is not there when the notebook is read; draw a picture"
                )
    return problems


def output_digest(nb: Any) -> str:
    """Sixteen hex digits that stand for all outputs. The build notes them, so that a lost or edited output shows."""
    outputs = [cell.outputs for cell in nb.cells if cell.cell_type == "code"]
    return hashlib.sha256(json.dumps(outputs, sort_keys=True).encode()).hexdigest()[:16]


def source_digest(nb: Any) -> str:
    """Sixteen hex digits that stand for what all cells hold. The build notes them, so that it sees a reader's edits."""
    return digest_of([(cell.cell_type, cell.source) for cell in nb.cells])


def digest_of(sources: list[tuple[str, str]]) -> str:
    """The same from the cells' types and texts alone."""
    return hashlib.sha256(json.dumps(sources).encode()).hexdigest()[:16]


def leaks(lab: Any, masters: Iterable[Any], name: str) -> list[str]:
    """Traces of a solution in a student's notebook: markers, outputs, or a line of a solution anywhere in it."""
    if lab is None:
        return []
    problems = []
    given = "\n".join(cell.source for cell in lab.cells)
    compact = _compact(given)
    if marker := _MARKERS.search(given):
        problems.append(f"{name} holds a solution marker ({marker[0]}); run: minibatcher labs build")
    for cell in lab.cells:
        if cell.cell_type == "code" and (cell.outputs or cell.execution_count is not None):
            problems.append(f"{name}: cell {cell.id} was executed; a student's copy has no outputs")
    for master in masters:
        for cell in master.cells:
            if role_of(cell) != "answer":
                continue
            for line in solution_lines(cell.source):
                # Short lines such as `total = 0` or `return total` give nothing away and may stand in the prose.
                if len(_compact(line)) >= 16 and _compact(line) in compact:
                    exercise_id = cell.metadata["minibatcher"]["exercise"]
                    problems.append(f"{name} leaks the solution of {exercise_id!r}: {line!r} stands in it")
    return problems


def _cell_problems(cell: Any, name: str, exercises: dict[str, Exercise]) -> list[str]:
    problems = []
    for line in cell.source.split("\n"):
        # A marker with anything after it is silently ignored by nbval.
        if cell.cell_type == "code" and (match := _NBVAL.search(line)) and line.strip() != match[0]:
            problems.append(f"{name}: {match[1]} must stand alone on its line, not in {line.strip()!r}")
    role = role_of(cell)
    if role is None:
        if _MARKERS.search(cell.source):
            problems.append(
                f"{name}: a solution region outside an answer cell, in cell {cell.id}; mark it with :exercise:"
            )
        if GIVEN in cell.metadata.get("tags", []) and "minibatcher" in _imports(cell.source):
            problems.append(f"{name}: the {GIVEN} cell {cell.id} imports minibatcher; answers are run without it")
        return problems
    exercise_id = cell.metadata["minibatcher"]["exercise"]
    if role == "answer" and (BEGIN not in cell.source or not solution_lines(cell.source)):
        problems.append(
            f"{name}: the answer cell of {exercise_id!r} has no solution region ({BEGIN} … ), or an empty one"
        )
    elif role == "answer":
        stub(cell.source, exercise_id)  # raises if the markers don't match
        wanted = exercises[exercise_id].name
        if wanted not in _definitions(cell.source):
            problems.append(
                f"{name}: the answer cell of {exercise_id!r} defines no function or class {wanted}; see exercises.toml"
            )
    elif (line := f'check("{exercise_id}", {exercises[exercise_id].name})') not in cell.source.split("\n"):
        problems.append(f"{name}: the check cell of {exercise_id!r} has no line {line}")
    return problems


def _tree(source: str) -> list[ast.stmt]:
    """The statements of a cell; none of one that is not plain Python, which fails when it is run."""
    try:
        return ast.parse(source).body
    except SyntaxError:
        return []


def _definitions(source: str) -> set[str]:
    return {node.name for node in _tree(source) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


def _imports(source: str) -> set[str]:
    """The packages that a cell imports, anywhere in it."""
    found = set()
    for node in (inner for statement in _tree(source) for inner in ast.walk(statement)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").split(".")[0])
    return found


def _text(output: Any) -> str:
    data = output.get("data", {})
    return "".join([output.get("text", ""), data.get("text/plain", ""), data.get("text/html", "")])


def _compact(text: str) -> str:
    return re.sub(r"\s+", "", text)
