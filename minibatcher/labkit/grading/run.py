"""The parent: sends answers to children, judges what comes back, and keeps results so that a run can go on later."""

from __future__ import annotations

import hashlib
import json
import os
import random
import select
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from ... import __version__
from ..checks import key_of, task_of
from ..judging import Outcome, Seen, verdict
from ..manifest import Exercise
from ..time_limit import TimeLimitReached
from .submissions import Answers, Lab, Unreadable, find_answers, lab_of, read_cells
from .worker import remove

_PACKAGE = Path(__file__).resolve().parents[2]
_ENTRY = "import sys; sys.path.insert(0, sys.argv[1]); from minibatcher.labkit.grading import worker; worker.{}()"
_GRACE_S = 1.0  # for a child to start


@dataclass
class Score:
    exercise: str
    points: int
    of: int
    reason: str
    remarks: list[str] = field(default_factory=list)


@dataclass
class Result:
    """A student's scores; problems: files that could not be read or say nothing to any lab."""

    name: str
    scores: list[Score]
    problems: list[str]

    @property
    def total(self) -> int:
        return sum(score.points for score in self.scores)


class Worker:
    """A warm process on a copy of the package without the right answers. Not for two threads at once."""

    def __init__(self, stage: Path, labs: list[str], hide: list[str]) -> None:
        self.stage, self.labs, self.hide = stage, labs, hide
        self.protections: dict[str, bool] = {}
        self._process: subprocess.Popen | None = None
        self._ended = False

    def ask(self, request: dict[str, Any]) -> tuple[str, str]:
        """What the child sent, and how it ended: "end", "time", "size" or "lost"."""
        request = {**request, "stage": str(self.stage)}
        if not hasattr(os, "fork"):
            return self._ask_once(request)
        try:
            process = self._started()
            self._tell(process, request)
            answer = self._line(process, request["seconds"] + 30)
            return answer["sent"], answer["ended"]
        except (OSError, ValueError, KeyError, TypeError):
            self.close()
            return "", "lost"

    def _started(self) -> subprocess.Popen:
        if self._ended:
            raise OSError("the grader is ending")
        if self._process is None or self._process.poll() is not None:
            self._process = self._open("serve")
            hello = {"labs": self.labs, "hide": self.hide}
            self._tell(self._process, hello)
            self.protections = {"limits": True} | self._line(self._process, 120)
        return self._process

    def _open(self, function: str) -> subprocess.Popen:
        folder = self.stage / "empty"
        environment = {
            key: value for key, value in os.environ.items() if key in ("PATH", "SYSTEMROOT", "LANG", "LD_LIBRARY_PATH")
        }
        return subprocess.Popen(
            [sys.executable, "-I", "-c", _ENTRY.format(function), str(self.stage)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env=environment | {"HOME": str(folder), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"},
            start_new_session=True,
        )

    @staticmethod
    def _tell(process: subprocess.Popen, what: dict[str, Any]) -> None:
        assert process.stdin is not None  # a pipe was asked for
        process.stdin.write(json.dumps(what).encode() + b"\n")
        process.stdin.flush()

    @staticmethod
    def _line(process: subprocess.Popen, seconds: float) -> Any:
        """The worker's next line of JSON. Raises ValueError if none comes in time."""
        assert process.stdout is not None  # a pipe was asked for
        parts, deadline = b"", time.monotonic() + seconds
        pieces = [parts]
        while not pieces[-1].endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
                raise ValueError("no answer")
            piece = os.read(process.stdout.fileno(), 1 << 20)
            if not piece:
                raise ValueError("the worker has gone")
            pieces.append(piece)
        return json.loads(b"".join(pieces))

    def _ask_once(self, request: dict[str, Any]) -> tuple[str, str]:
        self.protections = {"a limit on time": True} | dict.fromkeys(
            ("limits on memory and processes", "own user"), False
        )
        process = self._open("once")
        try:
            sent, _ = process.communicate(json.dumps(request).encode() + b"\n", timeout=request["seconds"] + 20)
            return sent.decode(errors="replace"), "end"
        except subprocess.TimeoutExpired:
            process.kill()
            return process.communicate()[0].decode(errors="replace"), "time"

    def end(self) -> None:
        self._ended = True
        self.close()

    def close(self) -> None:
        if self._process is not None:
            with suppress(OSError):
                self._process.kill()
            self._process.wait()
            for stream in filter(None, (self._process.stdin, self._process.stdout)):
                with suppress(OSError):
                    stream.close()
            self._process = None


@dataclass
class Grader:
    """Grades submissions against pristine labs.

    exercises: those that count. longest_s: no exercise gets more time than this, whatever the manifest says.
    """

    labs: dict[str, Lab]
    exercises: dict[str, Exercise]
    seed: int
    jobs: int = 1
    hide: tuple[Path, ...] = ()
    longest_s: float = 300
    protections: dict[str, bool] = field(default_factory=dict)

    def grade(
        self, submissions: list[tuple[str, list[Path]]], store: Path | None = None, done: Callable = lambda result: None
    ) -> list[Result]:
        """A result each, in their order; done(result) is called as they come. store: results to go on from."""
        kept = dict(_kept(store)) if store else {}
        results: dict[int, Result] = {}
        with _temporary_folder() as temporary:
            stage = _staged(temporary)
            modules = sorted({exercise.module for exercise in self.exercises.values()})
            hidden = [str(path) for path in hidden_folders([_PACKAGE, *self.hide], temporary)]
            workers = [Worker(stage, modules, hidden) for _ in range(self.jobs)]
            free: SimpleQueue[Worker] = SimpleQueue()
            for worker in workers:
                free.put(worker)

            def one(number: int) -> tuple[int, str, Result]:
                name, files = submissions[number]
                digest = self._digest(name, files)
                if digest in kept:
                    return number, "", kept[digest]
                worker = free.get()
                try:
                    return number, digest, self._one(name, files, worker)
                finally:
                    free.put(worker)

            pool = ThreadPoolExecutor(self.jobs)
            try:
                for future in as_completed([pool.submit(one, number) for number in range(len(submissions))]):
                    number, digest, result = future.result()
                    results[number] = result
                    if store and digest:
                        with open(store, "a", encoding="utf-8") as file:
                            line = {"key": digest, "result": asdict(result)}
                            file.write(json.dumps(line) + "\n")
                    done(result)
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
                self.protections = next((w.protections for w in workers if w.protections), {})
                for worker in workers:
                    worker.end()
        return [results[number] for number in sorted(results)]

    def _digest(self, name: str, files: list[Path]) -> str:
        whole = hashlib.sha256()
        marks = [__version__, str(self.seed), name, *self.exercises, *(lab.digest for lab in self.labs.values())]
        whole.update("\0".join(marks).encode(errors="replace"))
        for path in filter(Path.is_file, files):  # a pipe would keep us waiting
            with suppress(OSError), open(path, "rb") as file:
                while part := file.read(1 << 20):
                    whole.update(part)
            whole.update(b"\0")
        return whole.hexdigest()

    def _one(self, name: str, files: list[Path], worker: Worker) -> Result:
        problems, found = [], {}
        for path in files:
            try:
                cells = read_cells(path, self.exercises)
            except Unreadable as error:
                problems.append(str(error))
                continue
            lab = lab_of(cells, self.labs, self.exercises)
            if lab is None:
                problems.append(f"{path.name} has no exercise of these labs")
            elif lab in found:
                problems.append(f"{path.name} is a second notebook of {lab}; the first answer that is written counts")
                found[lab].take(find_answers(cells, self.labs[lab], self._of(lab)), self.labs[lab])
            else:
                found[lab] = find_answers(cells, self.labs[lab], self._of(lab))
        scores = [score for lab in self.labs for score in self._lab(self.labs[lab], found.get(lab), worker)]
        return Result(name, scores, problems)

    def _of(self, lab: str) -> list[Exercise]:
        return [exercise for exercise in self.exercises.values() if exercise.lab == lab]

    def _lab(self, lab: Lab, answers: Answers | None, worker: Worker) -> Iterator[Score]:
        earlier: list[str] = []
        for exercise in self._of(lab.name):
            if answers is None:
                yield Score(exercise.id, 0, exercise.points, "not handed in")
                continue
            remarks = answers.remarks.get(exercise.id, [])
            if exercise.id not in answers.answers:
                yield Score(exercise.id, 0, exercise.points, "not handed in", remarks)
                continue
            source = answers.answers[exercise.id]
            ok, reason = self._exercise(exercise, source, lab.given, answers.others, earlier, worker)
            earlier = [*earlier, source]
            yield Score(exercise.id, exercise.points if ok else 0, exercise.points, reason, remarks)

    def _exercise(
        self, exercise: Exercise, source: str, given: list[str], others: list[str], earlier: list[str], worker: Worker
    ) -> tuple[bool, str]:
        request = {
            "exercise": exercise.id,
            "name": exercise.name,
            "module": exercise.module,
            "package": exercise.lab == "capstone",
            "seed": self.seed,
            "seconds": min(exercise.time_limit_s, self.longest_s) + _GRACE_S,
            "given": given,
            "others": others,
            "earlier": earlier,
            "answer": source,
        }
        sent, ended = worker.ask(request)
        judged = self._judged(exercise, sent, ended)
        begun = sent.startswith('"answer"\n')
        if not judged[0] and (others or earlier) and not (begun and ended == "time"):
            # Other cells may have been in its way: it counts also if it is right alone.
            alone = self._judged(exercise, *worker.ask({**request, "others": [], "earlier": []}))
            return alone if alone[0] or not begun else judged
        return judged

    def _judged(self, exercise: Exercise, sent: str, ended: str) -> tuple[bool, str]:
        task = task_of(exercise)
        cases = task.cases(random.Random(self.seed))
        messages = [read for line in sent.split("\n")[: len(cases) + 3] if (read := _message(line)) is not None]
        broken = next((m for m in messages if isinstance(m, str)), None)
        outcomes = [m for m in messages if isinstance(m, Outcome)]
        if broken is not None:
            return False, broken
        if not outcomes and ended == "time":
            return False, f"stopped after {min(exercise.time_limit_s, self.longest_s):g} seconds, before it was called"

        def given() -> Iterator[Outcome]:
            yield from outcomes
            if ended == "time":
                raise TimeLimitReached
            why = " sent more than may be sent" if ended == "size" else " ended the process, or took all its memory"
            while True:
                yield Outcome([], why)

        try:
            result = verdict(exercise, task, key_of(exercise), cases, given(), self.seed)
        except Exception as error:  # what is compared comes from a stranger
            return False, f"what it gave can't be compared ({type(error).__name__})"
        return result.ok, result.message


def _message(line: str) -> Outcome | str | None:
    """A line from a child, checked: an outcome, the sentence on a broken cell, or None."""
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        return None
    match data:
        case ["broken", str(sentence)]:
            return " ".join(sentence[:600].split())
        case ["case", list(seen), str() | None as trouble, bool(unwritten)]:
            if all(isinstance(s, list) and len(s) == 3 and isinstance(s[0], str) for s in seen):
                return Outcome([Seen(what[:400], value) for what, value, _ in seen], trouble, unwritten)
    return None


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    """As tempfile.TemporaryDirectory, whatever was left in it."""
    folder = Path(tempfile.mkdtemp())
    try:
        yield folder
    finally:
        remove(str(folder))


def hidden_folders(wanted: list[Path], stage: Path) -> list[Path]:
    """The folders, or where one holds what Python needs, the folders in it that do not.

    A checkout counts as a whole: its history holds the right answers too.
    """
    kept: list[str | Path] = [sys.prefix, sys.base_prefix, *sysconfig.get_paths().values(), stage]
    needed = {Path(path).resolve() for path in kept}
    needed |= {Path("/usr"), Path("/lib"), Path("/etc"), Path("/dev"), Path("/proc")}
    hidden: set[Path] = set()

    def free(folder: Path) -> bool:
        return folder not in needed and not any(folder in path.parents for path in needed)

    def hide(folder: Path) -> None:
        if folder.is_dir() and free(folder):
            hidden.add(folder)
        elif folder.is_dir() and folder not in needed:
            hidden.update(c for c in folder.iterdir() if c.is_dir() and not c.is_symlink() and free(c))

    for folder in map(Path.resolve, wanted):
        hide(folder)
        for above in (folder, *folder.parents):
            if (above / ".git").exists():
                for child in (*above.iterdir(), *_history(above / ".git")):
                    hide(child)
    return sorted(hidden)


def _history(git: Path) -> list[Path]:
    """Where Git keeps the history of a further working tree, whose .git is a file that names a folder in it."""
    if git.is_dir():
        return []
    named = Path(git.read_text(encoding="utf-8").removeprefix("gitdir:").strip())
    return [path for path in named.parents if path.name == ".git"]


def _staged(folder: Path) -> Path:
    """A copy of the package without right answers and without what labs do not need."""
    stage = folder / "stage"
    skip = shutil.ignore_patterns("keys", "__pycache__", "*.safetensors", "*.ipynb")
    shutil.copytree(_PACKAGE, stage / "minibatcher", ignore=skip)
    for part in ("labkit", "labkit/grading"):  # they would import what an answer's child has no use for
        (stage / "minibatcher" / part / "__init__.py").write_bytes(b"")
    for name in ("empty", "nothing"):  # where a worker stands, and what is shown in place of hidden folders
        (stage / name).mkdir()
    for path in (folder, stage, stage / "empty", stage / "nothing"):
        path.chmod(0o755)
    return stage


def _kept(store: Path) -> Iterator[tuple[str, Result]]:
    """Results of an earlier run; lines that were cut off are left out."""
    for data in _lines(store):
        with suppress(KeyError, TypeError):
            result = data["result"]
            yield data["key"], Result(result["name"], [Score(**s) for s in result["scores"]], result["problems"])


def _lines(store: Path) -> Iterator[dict]:
    if store.exists():
        for line in store.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError):
                data = json.loads(line)
                if isinstance(data, dict):
                    yield data
