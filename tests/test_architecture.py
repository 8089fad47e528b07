"""Imports run one way through the rooms of the package, and the rooms that need no PyTorch never ask for it."""

import ast
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "minibatcher"

# From the ground up: a room imports from its own layer and from those earlier in this list. A new room takes its place
# here.
LAYERS = [
    {"errors", "numeric", "tomlfile"},
    {"clock", "request", "workload", "prompts", "timeline", "metrics", "hardware", "host_memory"},
    {"kv", "interrupt", "limits"},
    {"scheduling"},
    {"transfer", "attention", "model", "compiled", "cpu_path"},
    {"runners", "provenance", "measure", "memory", "monitor", "here"},
    {"engine", "stepping", "ahead", "background", "intake", "recorder", "tally", "build", "llm"},
    {
        "compare",
        "simulate",
        "capacity",
        "variants",
        "utilisation",
        "claims",
        "calibrate",
        "report",
        "report_answers",
        "report_notes",
        "report_rows",
        "report_capacity",
        "viz",
        "labkit",
        "kernels",
        "serve",
        "replay",
    },
    {"bench"},
    {"cli", "__main__"},
]
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
TORCH_FREE = set().union(*LAYERS[: LEVEL["scheduling"] + 1])
STRATEGY_LINES = 130
# Rooms that load modules whose names they put together, which this test can't follow: each loads its own files alone.
BY_NAME = {"", "scheduling", "kernels", "labkit", "bench"}


@dataclass(frozen=True)
class Import:
    target: str  # a dotted module name
    line: int
    at_load: bool  # runs when the module is loaded, not when a function is called


def module_name(path: Path, package: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """minibatcher.kv.blocks → kv; the package itself → "" (its front door, which may name every room)."""
    return module.split(".")[1] if "." in module else ""


def statements(tree: ast.Module) -> Iterator[tuple[ast.AST, bool]]:
    """Every node but those under `if TYPE_CHECKING:`, and whether it runs as the module is loaded."""
    pending: list[tuple[ast.AST, bool]] = [(tree, True)]
    while pending:
        node, at_load = pending.pop()
        yield node, at_load
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            at_load = False
        children = ast.iter_child_nodes(node)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            children = iter(node.orelse)
        elif isinstance(node, ast.If) and "__name__" in ast.unparse(node.test):
            at_load = False
        pending.extend((child, at_load) for child in children)


def imports_of(path: Path, package: Path, modules: set[str]) -> Iterator[Import]:
    name = module_name(path, package)
    parent = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node, at_load in statements(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, at_load)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                ancestor = ".".join(parent.split(".")[: len(parent.split(".")) - node.level + 1])
                base = f"{ancestor}.{base}" if base else ancestor
            for alias in node.names:  # `from . import kv` means the module, `from .kv import BlockKV` the name in it
                deeper = f"{base}.{alias.name}"
                yield Import(deeper if deeper in modules else base, node.lineno, at_load)


def violations(package: Path) -> list[str]:
    """One sentence for each import that breaks a rule."""
    paths = {module_name(path, package): path for path in sorted(package.rglob("*.py"))}
    imports = {name: list(imports_of(path, package, set(paths))) for name, path in paths.items()}
    found = []
    for name, path in paths.items():
        room, where = room_of(name), path.relative_to(package.parent).as_posix()
        if room and room not in LEVEL:
            found.append(f"{where}: the room {room!r} has no layer yet; give it one in LAYERS")
            continue
        for imported in imports[name]:
            target, line = imported.target, f"{where}:{imported.line}"
            if target.split(".")[0] == "torch" and room in TORCH_FREE:
                found.append(f"{line}: {room} imports torch")
            if target.split(".")[0] == package.name and room:
                other = room_of(target)
                if LEVEL.get(other, -1) > LEVEL[room]:
                    found.append(f"{line}: {room} imports {other}, which stands above it")
        if room not in BY_NAME:
            found += [f"{where}:{line}: loads a module by its name; write an import" for line in named_loads(path)]
        if (room in TORCH_FREE or not room) and (chain := torch_chain(name, imports)):
            found.append(f"{where}: loading it loads torch: {' → '.join(chain)}")
    return found


def named_loads(path: Path) -> list[int]:
    """Lines that import what an import statement does not show."""
    calls = [n for n, _ in statements(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.Call)]
    return [n.lineno for n in calls if ast.unparse(n.func).split(".")[-1] in ("import_module", "__import__")]


def cycles(package: Path) -> list[str]:
    """Modules that load each other as they load: whichever is asked for first finds the other half made."""
    paths = {module_name(path, package): path for path in package.rglob("*.py")}
    loads = {
        name: {i.target for i in imports_of(path, package, set(paths)) if i.at_load and i.target in paths} - {name}
        for name, path in paths.items()
    }
    while leaves := [name for name, targets in loads.items() if not targets & loads.keys()]:
        for name in leaves:
            del loads[name]
    return sorted(loads)


def torch_chain(name: str, imports: dict[str, list[Import]]) -> list[str]:
    """The shortest chain of imports, run as modules load, from `name` to torch; empty if there is none."""
    chains, seen = [[name]], {name}
    while chains:
        chain = chains.pop(0)
        for imported in imports.get(chain[-1], []):
            if not imported.at_load:
                continue
            if imported.target.split(".")[0] == "torch":
                return [*chain, "torch"]
            parts = imported.target.split(".")
            for loaded in (".".join(parts[:n]) for n in range(1, len(parts) + 1)):  # a.b.c loads a and a.b too
                if loaded in imports and loaded not in seen:
                    seen.add(loaded)
                    chains.append([*chain, loaded])
    return []


def prints_at_load(path: Path) -> list[int]:
    calls = [n for n, at_load in statements(ast.parse(path.read_text(encoding="utf-8"))) if at_load]
    return [n.lineno for n in calls if isinstance(n, ast.Call) and ast.unparse(n.func) == "print"]


def test_imports_keep_the_rules():
    assert violations(PACKAGE) == []


def test_a_room_stands_in_one_layer():
    assert sum(map(len, LAYERS)) == len(LEVEL)


def test_no_modules_load_each_other():
    assert cycles(PACKAGE) == []


def test_modules_that_load_each_other_are_found(tmp_path: Path):
    package = tmp_path / "minibatcher"
    package.mkdir()
    for name, line in (("a", "from .b import x"), ("b", "import minibatcher.c"), ("c", "from . import a"), ("d", "")):
        (package / f"{name}.py").write_text(line)
    assert cycles(package) == ["minibatcher.a", "minibatcher.b", "minibatcher.c"]
    (package / "c.py").write_text("def late():\n    from . import a")
    assert cycles(package) == []


def test_every_strategy_fits_on_a_screen():
    strategies = [path for path in PACKAGE.glob("scheduling/*.py") if path.stem not in {"__init__", "base"}]
    lengths = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in strategies}
    assert {"static.py", "dynamic.py", "continuous.py", "chunked.py"} <= set(lengths)
    assert {name: lines for name, lines in lengths.items() if lines > STRATEGY_LINES} == {}


def test_no_module_prints_when_it_is_loaded():
    assert {
        str(path.relative_to(PACKAGE)): prints_at_load(path) for path in PACKAGE.rglob("*.py") if prints_at_load(path)
    } == {}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The package's sources, to be spoilt."""
    return Path(
        shutil.copytree(
            PACKAGE,
            tmp_path / "minibatcher",
            ignore=lambda _, names: {n for n in names if "." in n and not n.endswith(".py")},
        )
    )


@pytest.mark.parametrize(
    ("file", "line", "complaint"),
    [
        ("scheduling/static.py", "import torch", "scheduling imports torch"),
        ("scheduling/static.py", "def late():\n    import torch.nn", "scheduling imports torch"),
        ("kv/blocks.py", "from ..scheduling import base", "kv imports scheduling, which stands above it"),
        ("request.py", "from . import engine", "request imports engine, which stands above it"),
        ("timeline.py", "from minibatcher.viz import plots", "timeline imports viz, which stands above it"),
        (
            "scheduling/base.py",
            "import minibatcher.runners.padded",
            "scheduling imports runners, which stands above it",
        ),
        (
            "runners/base.py",
            "def late():\n    from ..engine import Engine",
            "runners imports engine, which stands above it",
        ),
        ("errors.py", "class Late:\n    import torch", "loading it loads torch: minibatcher.errors → torch"),
        ("kv/blocks.py", "import importlib\nx = importlib.import_module('torch')", "loads a module by its name"),
        ("request.py", "def late():\n    return __import__('minibatcher.engine')", "loads a module by its name"),
        ("attic.py", "x = 1", "the room 'attic' has no layer yet"),
    ],
)
def test_a_forbidden_import_is_found(copy: Path, file: str, line: str, complaint: str):
    path = copy / file
    path.parent.mkdir(exist_ok=True)
    path.touch()
    (copy / "engine.py").touch()
    path.write_text(path.read_text(encoding="utf-8") + f"\n{line}\n", encoding="utf-8")
    found = [sentence for sentence in violations(copy) if sentence.startswith(f"minibatcher/{file}")]
    assert any(complaint in sentence for sentence in found), found


def test_torch_is_found_through_a_chain_of_modules(tmp_path: Path):
    package = tmp_path / "minibatcher"
    (package / "kv").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "kv" / "__init__.py").write_text("import torch\n")
    (package / "kv" / "blocks.py").write_text("")
    (package / "request.py").write_text("from .kv import blocks\n")
    (package / "timeline.py").write_text("def late():\n    from .request import Request\n")
    assert "minibatcher/request.py: loading it loads torch: minibatcher.request → minibatcher.kv → torch" in violations(
        package
    )
    assert not any(sentence.startswith("minibatcher/timeline.py: loading") for sentence in violations(package))


def test_type_checking_imports_are_free(tmp_path: Path):
    package = tmp_path / "minibatcher"
    package.mkdir()
    (package / "request.py").write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n")
    assert violations(package) == []


def test_prints_are_found(tmp_path: Path):
    path = tmp_path / "loud.py"
    path.write_text(
        "def f():\n    print(1)\nif __name__ == '__main__':\n    print(2)\nfor i in range(2):\n    print(3)\n"
    )
    assert prints_at_load(path) == [6]


WITHOUT_TORCH = """
import importlib, sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")

sys.meta_path.insert(0, NoTorch())
"""


def run_without_torch(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH + code], cwd=PACKAGE.parent, capture_output=True, text=True
    )


def test_torch_free_rooms_load_without_torch():
    paths = [p for p in PACKAGE.rglob("*.py") if room_of(module_name(p, PACKAGE)) in {"", *TORCH_FREE}]
    modules = sorted(module_name(path, PACKAGE) for path in paths)
    done = run_without_torch(f"for name in {modules}: importlib.import_module(name)\nprint(len(sys.modules))")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().isdigit(), f"a module prints when it is loaded: {done.stdout}"


@pytest.mark.parametrize("use", ["load_model", "EngineOptions", "LLM('bard')", "Engine.from_model('bard')"])
def test_the_front_door_says_what_is_missing_without_torch(use: str):
    done = run_without_torch(f"import minibatcher\nminibatcher.{use}")
    assert done.returncode == 1
    error = done.stderr.strip().splitlines()[-1]
    assert error.startswith("minibatcher.errors.MissingDependency") and "pip install torch" in error, done.stderr
