"""The guided tour: its files exist and stand in an order in which they can be read; its changes break what it says."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("markdown_it")
pytest.importorskip("mdit_py_plugins")

from prose import Page
from test_architecture import LEVEL, PACKAGE, imports_of, module_name

from minibatcher.errors import InvalidParameter
from minibatcher.labkit.tour import change, changed, imported
from minibatcher.viz.rooms import ROOMS

ROOT = PACKAGE.parent
PAGE = Page.read(ROOT / "chapters" / "tour.md", ROOT)
NOTEBOOK = json.loads((ROOT / "chapters" / "tour.ipynb").read_text(encoding="utf-8"))
LENGTH = re.compile(r"^(\S+\.py) +(\d+) lines, imports", re.MULTILINE)


def calls(code: str, function: str) -> list[list]:
    """The arguments of each call of a function in a cell. What `stop` is given by a comprehension is worked out."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == function:
            found.append(eval(ast.unparse(ast.List(node.args, ast.Load()))))
    return found


def stops() -> dict[int, list[str]]:
    """The number of each stop, and its files in the order of reading."""
    found = {}
    for section in PAGE.sections:
        if number := re.match(r"Stop (\d+):", section[0].text):
            code = "\n".join(block.text for block in section if block.kind == "code")
            (found[int(number[1])],) = calls(code, "stop")
    return found


STOPS = stops()
CHANGES = [tuple(args) for block in PAGE.blocks if block.kind == "code" for args in calls(block.text, "change")]
READ = [name for names in STOPS.values() for name in names]


def room(name: str) -> str:
    return name.split("/")[0].removesuffix(".py")


def test_there_are_ten_to_fourteen_stops_each_with_a_change():
    assert list(STOPS) == list(range(1, len(STOPS) + 1)) and 10 <= len(STOPS) <= 14
    assert len(CHANGES) == len(STOPS)
    assert all(args[0] in STOPS[number] for number, args in enumerate(CHANGES, start=1))
    assert len(READ) == len(set(READ))


def test_every_stop_links_to_its_files():
    for section in PAGE.sections:
        if number := re.match(r"Stop (\d+):", section[0].text):
            linked = {link.removeprefix("../minibatcher/") for block in section for link in block.links}
            assert set(STOPS[int(number[1])]) <= linked, section[0].text


def out_of_order(stops: dict[int, list[str]]) -> list[str]:
    """A sentence for each file that imports, as it is loaded, a file of a later stop."""
    paths = {module_name(path, PACKAGE): path for path in PACKAGE.rglob("*.py")}
    at = {name: number for number, names in stops.items() for name in names}
    found = []
    for name, number in at.items():
        for needed in imports_of(PACKAGE / name, PACKAGE, set(paths)):
            target = paths.get(needed.target)
            other = target.relative_to(PACKAGE).as_posix() if target else ""
            if at.get(other, 0) > number:
                found.append(f"{name} (stop {number}) imports {other} (stop {at[other]})")
    return found


def test_a_stop_imports_no_file_of_a_later_one():
    assert out_of_order(STOPS) == []
    backwards = dict(enumerate(reversed(STOPS.values()), start=1))
    assert "llm.py (stop 1) imports engine.py (stop 2)" in out_of_order(backwards)


def test_imports_are_told_as_they_are():
    modules = {module_name(path, PACKAGE): path for path in PACKAGE.rglob("*.py")}
    for name in READ:
        needed = {i.target for i in imports_of(PACKAGE / name, PACKAGE, set(modules)) if i.at_load}
        needed = {modules[target].relative_to(PACKAGE).as_posix() for target in needed if target in modules}
        assert set(imported(name)) == needed, name


def test_every_room_is_a_stop_or_left_out_for_a_reason():
    rows = next(section for section in PAGE.sections if section[0].text == "Left out, and why")
    left_out = re.findall(r"^\| (`.+?`) \| \S.+\|$", PAGE.text, re.MULTILINE)
    assert len(left_out) == len([block for block in rows if block.kind == "row"]) - 1
    left_out = [name for cell in left_out for name in re.findall(r"`(\w+)`", cell)]
    visited = {room(name) for name in READ}
    assert len(left_out) == len(set(left_out)) and not visited & set(left_out)
    assert visited | set(left_out) == set(LEVEL) - {"__main__"}


def test_the_map_shows_the_stops_where_they_are():
    for number, names in STOPS.items():
        if number == len(STOPS):  # the front door, through which nothing but the request comes
            continue
        there = {box.name for box in ROOMS.values() if number in box.stops}
        assert there and all(any(room(name) in box for box in there) for name in names if name != "recorder.py")
    assert {number for box in ROOMS.values() for number in box.stops} == set(STOPS) - {len(STOPS)}


def saved(mime: str) -> list[str]:
    outputs = [output for cell in NOTEBOOK["cells"] for output in cell.get("outputs", [])]
    if mime == "stream":
        return ["".join(output["text"]) for output in outputs if output["output_type"] == "stream"]
    return ["".join(output["data"].get(mime, "")) for output in outputs if "data" in output]


STALE = "the tour shows an older state of the package; run: minibatcher labs build tour"


def test_printed_lengths_are_those_of_the_files():
    printed = {name: int(lines) for text in saved("stream") for name, lines in LENGTH.findall(text)}
    lengths = {name: len((PACKAGE / name).read_text(encoding="utf-8").splitlines()) for name in READ}
    assert printed == lengths, STALE


def test_what_is_shown_is_what_is_installed():
    files = "\n".join((PACKAGE / name).read_text(encoding="utf-8") for name in READ)
    sources = [text for text in saved("text/plain") if re.match(r"\s*(?:@|class |def )", text)]
    assert len(sources) > 20 and all(text in files for text in sources), STALE


def test_a_change_is_shown_with_its_command(capsys, monkeypatch):
    pytest.importorskip("IPython")
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda data, raw: shown.append(data["text/plain"]))
    change("kv/slots.py", "block_size=slot_size", "block_size=1", "test_kv.py::test_x")
    assert "\n-        super()" in shown[0] and shown[0].count("\n+ ") == 1
    assert capsys.readouterr().out == 'python -m pytest "tests/test_kv.py::test_x"\n'
    with pytest.raises(InvalidParameter, match=r"stands in kv/slots\.py 0 times"):
        changed(
            "kv/slots.py",
            "slots for everybody",
            "",
        )
    with pytest.raises(InvalidParameter, match=r"no file 'kv/nothing\.py'"):
        changed("kv/nothing.py", "a", "b")


# Runs tests on a copy of the package, again and again in one process, for loading PyTorch takes longer than they do.
DRIVER = """
import contextlib, io, json, sys
from pathlib import Path
import pytest

copy, tests = map(Path, sys.argv[1:])
sys.path[:0] = [str(copy), str(tests)]

def run(*names):
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "minibatcher" or str(getattr(module, "__file__", "")).startswith(str(tests)):
            del sys.modules[name]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = pytest.main(["-q", "-p", "no:cacheprovider", "-c", str(copy / "pytest.ini"), "--rootdir", str(tests),
                            *(str(tests / name) for name in names)])
    import minibatcher
    assert Path(minibatcher.__file__).is_relative_to(copy), minibatcher.__file__
    return int(code), said.getvalue()[-3000:]

changes = json.load(sys.stdin)
found = [run(*dict.fromkeys(test for *_, test in changes))]
for name, before, after, _ in changes:
    path = copy / "minibatcher" / name
    path.write_text(after, encoding="utf-8")
    found.append(run(changes[len(found) - 1][3]))
    path.write_text(before, encoding="utf-8")
json.dump(found, sys.stdout)
"""


def outcomes(changes: list[tuple[str, str, str, str]], folder: Path) -> list[tuple[int, str]]:
    """pytest's exit code and words: for all tests on an untouched copy, then for each change, of its own test."""
    shutil.copytree(PACKAGE, folder / "minibatcher", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    texts = [(name, *changed(name, old, new), test) for name, old, new, test in changes]
    done = subprocess.run(
        [sys.executable, "-B", "-c", DRIVER, str(folder), str(ROOT / "tests")],
        input=json.dumps(texts), capture_output=True, text=True, encoding="utf-8", cwd=folder, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.slow
def test_each_change_fails_the_test_that_it_names(tmp_path):
    pytest.importorskip("torch")
    harmless = ("kv/slots.py", "as servers had it", "as servers had  it", CHANGES[2][3])
    (untouched, words), *broken, unnoticed = outcomes([*CHANGES, harmless], tmp_path)
    assert untouched == 0, words
    wrong = [(*args[::3], said) for args, (code, said) in zip(CHANGES, broken) if code != 1 or " failed" not in said]
    assert wrong == []
    assert unnoticed[0] == 0  # a change that breaks nothing would be found here
