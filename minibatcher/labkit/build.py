"""Build the book: Markdown sources in chapters/ and solutions/ become notebooks, and labs/ the students' copies.

    chapters/X.md   ->  chapters/X.ipynb   executed
    solutions/X.md  ->  solutions/X.ipynb  executed, and labs/X.ipynb: stubs for solutions, no outputs

and the computed parts of the pages (blocks.py) are renewed first.

`minibatcher labs build` writes them all, or the named ones; `--check` writes nothing and says what is stale or wrong.
A reader's own work is safe: a notebook in which somebody has written is overwritten only with `--force`.
"""

from __future__ import annotations

import argparse
import copy
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ..errors import MinibatcherError
from . import audit, blocks
from .checks import SEED_VARIABLE
from .manifest import Exercise, load_manifest
from .notebooks import (
    SET_UP,
    UNSAVED,
    BuildError,
    dumps,
    read_page,
    read_source,
    require,
    student_copy,
    without_outputs,
)

CELL_TIMEOUT_S = 120
_MEND = "minibatcher labs build"


def sources(root: Path, folder: str) -> list[Path]:
    """The Markdown sources of a folder's notebooks, in order; a page without jupytext's header stays a page."""
    paths = sorted((root / folder).glob("*.md"))
    return [path for path in paths if read_page(path).startswith("---\njupytext:")]


def build(
    root: Path,
    *,
    check: bool = False,
    force: bool = False,
    keep_outputs: bool = False,
    only: Iterable[str] = (),
    exercises: dict[str, Exercise] | None = None,
    say: Callable[[str], None] = lambda sentence: None,
) -> list[str]:
    """Write the notebooks under `root`, or with `check` compare them with their sources.

    only: file names (without ending) to build; all if empty. force: overwrite also what was edited by hand.
    keep_outputs: run nothing, for changes of the prose alone. say: called with one sentence of progress a notebook.
    With `check`, a notebook that differs because of changes that are not committed is mentioned, and is no problem.
    Returns what is wrong, one sentence each; empty means all is well. Raises MinibatcherError for a source that
    can't become a notebook.
    """
    root, exercises = Path(root), load_manifest() if exercises is None else exercises
    only = () if check else tuple(only)
    if not check:
        blocks.write(root)
    chapters, masters = (
        {path: read_source(path, exercises) for path in sources(root, folder) if not only or path.stem in only}
        for folder in ("chapters", "solutions")
    )
    if not chapters and not masters:
        raise BuildError(f"no sources under {root}: there should be chapters/*.md and solutions/*.md")
    if only:  # the others may be half written
        exercises = {key: exercise for key, exercise in exercises.items() if exercise.lab in only}
    problems = audit.exercise_problems(masters, exercises)
    if problems:
        return problems
    if check:
        return [*_stale(root, chapters | masters, masters, say), *_strays(root), *blocks.stale(root)]

    for path, nb in (chapters | masters).items():
        say(f"{'writing' if keep_outputs else 'running'} {path.relative_to(root)}")
        if path in masters:
            lab = student_copy(nb)
            leaks = audit.leaks(lab, masters.values(), f"labs/{path.stem}.ipynb")
            if leaks:
                problems += leaks
                continue
            target = root / "labs" / f"{path.stem}.ipynb"
            if not _kept(target, lab, root, force, say):
                lab.metadata["minibatcher"] = {"sources": audit.source_digest(lab)}
                _write(target, dumps(lab))
        target = path.with_name(f"{path.stem}.ipynb")
        if _kept(target, nb, root, force, say):
            continue
        wrong = take_outputs(nb, _read(target)) if keep_outputs else execute(nb, path.parent)
        problems += [f"{path.relative_to(root)}: {sentence}" for sentence in wrong]
        if not wrong:
            _write(target, dumps(nb))
    return problems


def changed_locally(path: Path) -> bool:
    """Whether Git knows the file and it differs from the last commit; False without Git or a repository."""
    command = ["git", "--no-optional-locks", "status", "--porcelain", "--", path.name]
    try:
        status = subprocess.run(command, cwd=path.parent, capture_output=True).stdout
    except OSError:
        return False
    return bool(status) and not status.startswith((b"??", b"!!"))


def execute(nb: Any, folder: Path) -> list[str]:
    """Run the notebook's cells in a fresh kernel of this Python, in `folder`, and keep the outputs in `nb`.

    Returns what is wrong with the run or its outputs.
    """
    nbclient = require("nbclient")
    metadata = copy.deepcopy(nb.metadata)
    with tempfile.TemporaryDirectory() as home:
        client = nbclient.NotebookClient(
            nb,
            kernel_name="python3",
            timeout=CELL_TIMEOUT_S,
            record_timing=False,
            store_widget_state=False,
            extra_arguments=["--IPKernelApp.log_level=ERROR"],
            resources={"metadata": {"path": str(folder)}},
        )
        try:
            client.execute(env=kernel_environment(home) | {SEED_VARIABLE: "7"})
        except nbclient.exceptions.CellExecutionError as error:
            return [f"a cell failed: {error.ename}: {error.evalue}"]
        except (nbclient.exceptions.CellTimeoutError, nbclient.exceptions.DeadKernelError) as error:
            return [f"a cell did not end: {error}"]
    nb.metadata = metadata  # without what this machine's kernel says about itself
    for cell in nb.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = _tidy(cell.outputs)
    problems = audit.output_problems(nb)
    for cell in nb.cells:
        if UNSAVED in cell.metadata.get("tags", []):
            cell.outputs = []
    nb.metadata["minibatcher"] = {"outputs": audit.output_digest(nb), "sources": audit.source_digest(nb)}
    return problems


def take_outputs(nb: Any, saved: Any) -> list[str]:
    """Give `nb` the outputs of the notebook that an earlier build saved, if only prose or the set-up changed since.

    Returns what is in the way. What a cell prints may depend on the package too: this keeps it as it was.
    """
    new = [cell for cell in nb.cells if cell.cell_type == "code"]
    old = [cell for cell in saved.cells if cell.cell_type == "code"] if saved else []
    if saved is None or saved.metadata.get("minibatcher", {}).get("outputs") != audit.output_digest(saved):
        return [f"it has no outputs that the build saved, so it must be run: {_MEND}, without --keep-outputs"]
    if list(map(_runs, new)) != list(map(_runs, old)):
        return [f"its code or a tag has changed, so it must be run: {_MEND}, without --keep-outputs"]
    for cell, before in zip(new, old):
        cell.outputs, cell.execution_count = before.outputs, before.execution_count
    nb.metadata["minibatcher"] = {"outputs": audit.output_digest(nb), "sources": audit.source_digest(nb)}
    return []


def _runs(cell: Any) -> tuple[str, list[str]]:
    """What decides which outputs a cell has: its code, save that of a set-up, and its tags."""
    tags = sorted(cell.metadata.get("tags", []))
    return SET_UP if SET_UP in tags else cell.source, tags


def kernel_environment(home: str) -> dict[str, str]:
    """The environment in which the book's kernels run: this package, two patient threads, nobody's own settings."""
    package_parent = str(Path(__file__).resolve().parents[2])
    python_path = os.pathsep.join(filter(None, [package_parent, os.environ.get("PYTHONPATH")]))
    environment = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
    return environment | {
        "PYTHONPATH": python_path,
        "IPYTHONDIR": home,
        "OMP_NUM_THREADS": "2",
        "OMP_WAIT_POLICY": "passive",
    }


def run(options: argparse.Namespace) -> int:
    """Build as told. Returns 0, 1 if something is stale or wrong, 2 for a user's mistake."""
    if options.pages and (options.names or options.check):
        print(f"{_MEND}: --pages takes neither names nor --check", file=sys.stderr)
        return 2
    try:
        root = options.root or _find_root()
        if options.pages:
            blocks.write(root)
            return 0
        known = [path.stem for folder in ("chapters", "solutions") for path in sources(root, folder)]
        unknown = [name for name in options.names if name not in known]
        if unknown:
            raise BuildError(f"no source named {unknown[0]!r} under {root}; known: {', '.join(known)}")
        say = lambda sentence: print(sentence, file=sys.stderr)  # noqa: E731
        problems = build(
            root,
            check=options.check,
            force=options.force,
            keep_outputs=options.keep_outputs,
            only=options.names,
            say=say,
        )
    except MinibatcherError as error:
        print(f"{_MEND}: {error}", file=sys.stderr)
        return 2
    for problem in problems:
        print(problem, file=sys.stderr)
    if options.check and not problems:
        print("all notebooks that were compared match their sources, and computed parts are current")
    return 1 if problems else 0


def _find_root(option: str = "--root FOLDER") -> Path:
    """The book's folder: where the command runs, or where the package was installed from. option: to name another."""
    candidates = [Path.cwd(), Path(__file__).resolve().parents[2]]
    for folder in candidates:
        if (folder / "chapters").is_dir() and (folder / "solutions").is_dir():
            return folder
    raise BuildError(
        f"no chapters/ and solutions/ in {candidates[0]}; run it in a clone of the book, or name its place by {option}"
    )


def _kept(target: Path, fresh: Any, root: Path, force: bool, say: Callable[[str], None]) -> bool:
    """Whether the notebook is left as it is, because cells of it are neither those that the build wrote nor `fresh`."""
    if force or not target.exists():
        return False
    present = _read(target)
    if present is not None:
        written = present.metadata.get("minibatcher", {}).get("sources")
        if audit.source_digest(present) in (written, audit.source_digest(fresh)):
            return False
    say(
        f"{target.relative_to(root).as_posix()} was edited and stays as it is; to overwrite what was written in it, "
        f"run: {_MEND} --force {target.stem}"
    )
    return True


def _stale(
    root: Path, executed: dict[Path, Any], masters: dict[Path, Any], say: Callable[[str], None] = lambda sentence: None
) -> list[str]:
    """Notebooks that are missing, differ from their source, or hold wrong outputs."""
    found: dict[Path, list[str]] = {}
    for path, nb in executed.items():
        target = path.with_name(f"{path.stem}.ipynb")
        found[target] = _compare(target, nb, path, root) or _audited(target, root)
    for path, nb in masters.items():
        target = root / "labs" / f"{path.stem}.ipynb"
        name = target.relative_to(root).as_posix()
        found[target] = _compare(target, student_copy(nb), path, root, outputs=False)
        if target.exists():
            found[target] += audit.leaks(_read(target), masters.values(), name)
    problems = []
    for target, sentences in found.items():
        if sentences and target.exists() and changed_locally(target):
            say(f"{target.relative_to(root).as_posix()} has local changes; not compared")
        else:
            problems += sentences
    return problems


def _compare(target: Path, expected: Any, source: Path, root: Path, *, outputs: bool = True) -> list[str]:
    """Byte for byte; with `outputs`, outside the outputs and execution counts."""
    name, origin = target.relative_to(root).as_posix(), source.relative_to(root).as_posix()
    mend = f"run: {_MEND} {source.stem}"
    if not outputs:
        expected = copy.deepcopy(expected)
        expected.metadata["minibatcher"] = {"sources": audit.source_digest(expected)}
    if not target.exists():
        return [f"{name} is missing; {mend}"]
    actual = _read(target)
    if actual is None:
        return [f"{name} is not a notebook; run: {_MEND} --force {source.stem}"]
    try:
        bare = dumps(without_outputs(actual) if outputs else actual)
        canonical = dumps(actual).encode("utf-8") == target.read_bytes()
    except require("nbformat").ValidationError as error:
        return [f"{name} is not a valid notebook ({str(error).splitlines()[0]}); {mend}"]
    if bare != dumps(without_outputs(expected) if outputs else expected):
        return [f"{name} is stale: it differs from {origin}; {mend}"]
    return [] if canonical else [f"{name} was written by another program; {mend}"]


def _audited(target: Path, root: Path) -> list[str]:
    nb = _read(target)
    problems = audit.output_problems(nb)
    if nb.metadata.get("minibatcher", {}).get("outputs") != audit.output_digest(nb):
        problems.append("its outputs are not those that the build saved")
    name, mend = target.relative_to(root).as_posix(), f"run: {_MEND} {target.stem}"
    return [f"{name}: {sentence}; {mend}" for sentence in problems]


def _strays(root: Path) -> list[str]:
    problems = []
    for folder, origin in (("chapters", "chapters"), ("solutions", "solutions"), ("labs", "solutions")):
        names = {path.stem for path in sources(root, origin)}
        for path in sorted((root / folder).glob("*.ipynb")):
            if path.stem not in names:
                problems.append(
                    f"{folder}/{path.name} has no source {origin}/{path.stem}.md; delete it or write its source"
                )
    return problems


def _read(path: Path) -> Any:
    try:
        return require("nbformat").reads(path.read_bytes().decode("utf-8"), as_version=4)
    except (OSError, ValueError):  # nbformat's own errors are ValueErrors too
        return None


def _write(path: Path, text: str) -> None:
    """By way of a temporary file, so that an interrupted build leaves the old notebook whole."""
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_name(path.name + ".partial")
    temporary.write_bytes(text.encode("utf-8"))
    temporary.replace(path)


def _tidy(outputs: list[Any]) -> list[Any]:
    """Join what a kernel printed in pieces."""
    kept: list[Any] = []
    for output in outputs:
        if output.output_type == "stream" and kept and kept[-1].get("name") == output.name:
            kept[-1].text += output.text
        else:
            kept.append(output)
    return kept
