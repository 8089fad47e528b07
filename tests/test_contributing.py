"""What CONTRIBUTING.md says is carried out: recipes on a copy of the package, files and rooms on the real one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_architecture import LAYERS

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PLACEHOLDER = re.compile(r"LAB|NAME|MODULE|\*")


def section(heading: str) -> str:
    """What stands between a heading and the next."""
    return re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^## |^### |\Z)", TEXT, re.MULTILINE | re.DOTALL)[1]


def saved_as(text: str) -> tuple[str, str]:
    """The file of a recipe, and its source: «Save this as `path`:», then a block."""
    return re.search(r"Save this as `([^`]+)`:\n\n```python\n(.*?)```\n", text, re.DOTALL).groups()


def apply_diff(folder: Path, diff: str) -> None:
    """Carry out a diff without line numbers; each hunk must fit in one place."""
    for file, hunks in re.findall(r"^\+\+\+ b/(\S+)\n(.*?)(?=^--- |\Z)", diff, re.MULTILINE | re.DOTALL):
        source = (folder / file).read_text(encoding="utf-8")
        for hunk in filter(None, hunks.split("@@\n")):
            lines = hunk.splitlines(keepends=True)
            old, new = ("".join(line[1:] for line in lines if line[0] in " " + sign) for sign in "-+")
            assert source.count(old) == 1, f"{file} no longer holds what the recipe changes:\n{old}"
            source = source.replace(old, new)
        (folder / file).write_text(source, encoding="utf-8")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A folder with a copy of the package, to be added to."""
    shutil.copytree(ROOT / "minibatcher", tmp_path / "minibatcher", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def run(copy: Path, *arguments: str) -> str:
    """What `python ARGUMENTS` prints where the copy is imported; fails where it does."""
    env = os.environ | {"PYTHONPATH": str(copy), "CI": "1"}
    done = subprocess.run([sys.executable, *arguments], cwd=copy, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pytest_in(copy: Path, command: str) -> str:
    """A recipe's line `python -m pytest …`, on the copy."""
    tests = [str(ROOT / word) if word.startswith("tests/") else word for word in command.split()[3:]]
    printed = run(copy, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--rootdir={ROOT}", *tests)
    assert re.search(r"\d+ passed", printed), printed
    return printed


def commands(text: str, start: str) -> list[str]:
    """A recipe's console lines that begin so, without their comments."""
    lines = [line.split("#")[0].strip() for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL)
             for line in block.splitlines()]  # fmt: skip
    found = [line for line in lines if line.startswith(start)]
    assert found, f"the recipe has no line {start!r}"
    return found


SMALL = ("--num-requests", "6", "--max-num-seqs", "3", "--quiet")


@pytest.mark.slow
def test_a_strategy_is_one_file(copy: Path):
    text = section("A strategy, in one file")
    path, source = saved_as(text)
    (copy / path).write_text(source, encoding="utf-8")
    for command in commands(text, "minibatcher "):
        printed = run(copy, "-m", *command.split(), *SMALL)
        assert "halfway" in printed
        assert "simulate" in command or "identical" in printed
    (tests,) = commands(text, "python -m pytest")
    pytest_in(copy, tests)
    pytest_in(copy, "python -m pytest tests/test_scheduling.py")
    (copy / path.replace("halfway", "again")).write_text(source, encoding="utf-8")
    with pytest.raises(AssertionError, match="two strategies are called 'halfway'"):
        run(copy, "-c", "import minibatcher.scheduling")


@pytest.mark.slow
def test_a_strategy_that_breaks_the_contract_fails_the_tests_of_its_recipe(copy: Path):
    text = section("A strategy, in one file")
    path, source = saved_as(text)
    spoilt = source.replace("2 * len(self.running) <= self.config.max_num_seqs", "not self.running")
    spoilt = spoilt.replace("plan.num_tokens[request] = 1", "plan.num_tokens[request] = 2")
    assert spoilt != source
    (copy / path).write_text(spoilt, encoding="utf-8")
    (tests,) = commands(text, "python -m pytest")
    with pytest.raises(AssertionError, match="planned 2 tokens"):
        pytest_in(copy, tests)


@pytest.mark.slow
def test_a_policy_is_one_file_and_its_name(copy: Path):
    text = section("A policy: who is served next")
    path, source = saved_as(text)
    (copy / path).write_text(source, encoding="utf-8")
    apply_diff(copy, re.search(r"```diff\n(.*?)```", text, re.DOTALL)[1])
    (command,) = commands(text, "minibatcher ")
    assert "fewest-tokens" in run(copy, "-m", *command.split(), "--strategies", "chunked", *SMALL)
    (tests,) = commands(text, "python -m pytest")
    assert "failed" not in pytest_in(copy, tests)


def test_a_class_of_ones_own_is_taken_wherever_a_name_is():
    pytest.importorskip("torch")
    from minibatcher import Engine, load_workload, run_comparison
    from minibatcher.claims.common import machine
    from minibatcher.errors import InvalidParameter
    from minibatcher.simulate import run_simulation

    names: dict = {"__name__": "mine", "__package__": "minibatcher.scheduling"}  # which its relative imports need
    exec(saved_as(section("A strategy, in one file"))[1], names)
    mine = names["HalfwayScheduler"]
    assert isinstance(Engine.from_model("bard", strategy=mine, max_model_len=64).scheduler, mine)
    workload = load_workload("uniform:prompt_min=8,prompt_max=8,output_min=4,output_max=4", num_requests=6)
    runs = run_comparison(workload, strategies=["solo", mine], max_num_seqs=3, max_model_len=64)
    assert list(runs) == ["solo", "halfway"]
    hashes = [[r.output_hash for r in run.requests.values()] for run in runs.values()]
    assert hashes[0] == hashes[1] and None not in hashes[0]
    assert list(run_simulation(workload, machine(), strategies=[mine, "static"])) == ["halfway", "static"]
    with pytest.raises(InvalidParameter, match="Nameless needs a name"):
        Engine.from_model("bard", strategy=type("Nameless", (mine.__base__.__base__,), {}))


@pytest.mark.parametrize(
    "body, words",
    [
        ({"name": "half done"}, "Mine needs a name for tables and files, without blanks"),
        ({"name": ""}, "Mine needs a name"),
        ({"name": 7}, "Mine needs a name"),
        ({"name": "mine"}, "Mine is no strategy yet: it has no method schedule"),
    ],
)
def test_a_class_that_can_be_no_strategy_is_told_so(body: dict, words: str):
    from minibatcher.errors import InvalidParameter
    from minibatcher.scheduling import Scheduler, strategy

    with pytest.raises(InvalidParameter, match=words):
        strategy(type("Mine", (Scheduler,), body))


def test_the_rooms_of_the_table_are_those_of_the_house():
    table = re.findall(r"^\| ((?:`\w+` ?)+) \|", section("What is where"), re.MULTILINE)
    assert [set(re.findall(r"`(\w+)`", row)) for row in table] == LAYERS
    package = ROOT / "minibatcher"
    rooms = {p.stem for p in package.iterdir() if (p / "__init__.py").exists() or p.suffix == ".py"} - {"__init__"}
    assert rooms == set().union(*LAYERS)


def test_every_file_that_is_named_exists():
    named = set(re.findall(r"`((?:minibatcher|tests|chapters|labs|solutions)/[\w./*-]*)`", TEXT))
    assert len(named) > 25
    missing = [path for path in sorted(named) if not PLACEHOLDER.search(path) and not (ROOT / path).exists()]
    made = {saved_as(section(name))[0] for name in ("A strategy, in one file", "A policy: who is served next")}
    assert set(missing) == made
    for word in re.findall(r"\btests/test_\w+\.py", TEXT):
        assert (ROOT / word).exists(), word


def test_every_target_of_make_that_is_named_exists():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"\bmake (\w+)", TEXT))
    assert {"check", "test"} <= named <= targets


def test_every_slow_file_exists_and_the_heart_is_not_slow():
    slow = {line for line in (ROOT / "tests" / "slow.txt").read_text().splitlines() if not line.startswith("#")}
    assert {name for name in slow if not (ROOT / "tests" / name).exists()} == set()
    heart = {"architecture", "engine_properties", "engine_faults", "kv", "labs", "metrics", "prose", "scheduling"}
    assert slow.isdisjoint(f"test_{name}.py" for name in heart)
