"""The files that say what to install agree with each other and with what the code imports."""

import ast
import importlib
import os
import re
import subprocess
import sys
from fnmatch import fnmatch
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

try:
    import tomllib
except ModuleNotFoundError:
    pytest.skip("reading pyproject.toml needs tomllib, in Python from 3.11 on", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[1]
CONDA_TO_PYPI = {"pytorch": "torch", "matplotlib-base": "matplotlib"}
IMPORT_TO_PYPI = {
    "yaml": "pyyaml",
    "rattler": "py-rattler",
    "pynvml": "nvidia-ml-py",
    "markdown_it": "markdown-it-py",
}
NOT_FOR_CONDA = {"dev", "book"}  # extras that environment.yml leaves out
TOP_LEVEL = {
    *("README.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "pyproject.toml", "environment.yml", "constraints.txt"),
    *("chapters", "labs", "solutions", "minibatcher", "tests"),
}

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
EXTRAS = PROJECT["optional-dependencies"]


def requirements(*groups: list[str]) -> dict[str, Requirement]:
    parsed = [Requirement(line) for group in groups for line in group]
    return {canonicalize_name(r.name): r for r in parsed}


def conda_lines() -> list[str]:
    lines = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))["dependencies"]
    return [line for line in lines if isinstance(line, str)]


def conda_specifiers() -> dict[str, SpecifierSet]:
    split = [re.fullmatch(r"([\w.-]+)(.*)", line.replace(" ", "")).groups() for line in conda_lines()]
    return {canonicalize_name(CONDA_TO_PYPI.get(name, name)): SpecifierSet(spec) for name, spec in split}


def pins() -> list[Requirement]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if not line.startswith("#")]


def tracked_files() -> list[str]:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    return done.stdout.splitlines()


def test_an_extra_repeats_a_package_with_the_same_bounds():
    seen: dict[str, Requirement] = {}
    for group in [PROJECT["dependencies"], *EXTRAS.values()]:
        for name, requirement in requirements(group).items():
            assert seen.setdefault(name, requirement).specifier == requirement.specifier, name


def test_upper_bounds_have_a_reason_beside_them():
    lines = (ROOT / "pyproject.toml").read_text(encoding="utf-8").splitlines()
    bounded = []
    for before, line in pairwise(lines):
        for requirement in requirements(re.findall(r'"([a-z][\w.-]*[<>=~][^"]*)"', line)).values():
            if any(bound.operator != ">=" for bound in requirement.specifier):
                bounded.append(requirement.name)
                assert "#" in line or before.lstrip().startswith("#"), (
                    f"no reason given for the bound in: {line.strip()}"
                )
    assert bounded == ["pytest", "pytest"]  # grows with care


def test_conda_environment_names_the_same_packages_and_bounds():
    conda = conda_specifiers()
    pypi = requirements(PROJECT["dependencies"], *(EXTRAS[e] for e in EXTRAS if e not in NOT_FOR_CONDA))
    assert conda.pop("python") == SpecifierSet(PROJECT["requires-python"])
    conda.pop("pip")
    everywhere = {name: r.specifier for name, r in pypi.items() if "sys_platform" not in str(r.marker)}
    assert conda == everywhere  # a conda environment knows no markers for one system


def test_conda_environment_leaves_the_package_to_a_command_of_its_own():
    """conda hands a `pip:` list to pip as a file of requirements, and pip takes no `--no-deps` in one."""
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    assert environment["channels"][0] == "conda-forge"
    assert all(isinstance(line, str) for line in environment["dependencies"])
    way = (ROOT / "chapters" / "install.md").read_text(encoding="utf-8").split("\n## conda\n")[1].split("\n## ")[0]
    lines = re.search(r"```console\n(.*?)```", way, re.DOTALL)[1].splitlines()
    assert lines[:3] == [
        "conda env create -f environment.yml",
        "conda activate minibatcher",
        "pip install --no-deps -e .",
    ]


def test_jupyterlab_is_started_where_labs_and_chapters_can_be_opened():
    """Given a file, it serves that file's folder alone, and the links to the labs lead nowhere."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "chapters").glob("*.md")]
    started = [
        line
        for page in pages
        for block in re.findall(r"```console\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
        for line in block.splitlines()
        if re.search(r"\bjupyter[- ]lab\b", line)
    ]
    assert len(started) >= 3  # pip, conda, Windows
    for line in started:
        assert all(word.startswith("-") for word in re.split(r"jupyter[- ]lab", line)[1].split()), line
        assert "/lab/tree/chapters/index.ipynb" in line


def test_a_clone_is_fetched_by_lines_that_every_shell_takes():
    from minibatcher.labkit.front import clone

    assert "&&" not in clone(ROOT)  # Windows' own PowerShell has no such sign


def test_conda_environment_says_which_extras_it_holds():
    head = (ROOT / "environment.yml").read_text(encoding="utf-8").splitlines()[0]
    (said,) = re.findall(r"its extras ([\w, ]+)\)", head)
    assert set(re.split(", | and ", said)) == set(EXTRAS) - NOT_FOR_CONDA


def test_conda_lines_are_valid_match_specs():
    in_ci = bool(os.environ.get("CI"))  # there it is installed, and a skip would go unseen
    rattler = importlib.import_module("rattler") if in_ci else pytest.importorskip("rattler")
    for line in conda_lines():
        assert rattler.MatchSpec(line).name is not None, line
    with pytest.raises(Exception, match="unable to parse version spec"):
        rattler.MatchSpec("numpy>=>1")


def test_lock_satisfies_every_bound_and_pins_every_direct_dependency():
    locked = {canonicalize_name(pin.name): pin for pin in pins()}
    for name, requirement in requirements(PROJECT["dependencies"], *EXTRAS.values()).items():
        if requirement.marker and not requirement.marker.evaluate({"python_version": "3.11"}):
            continue  # the lock is made on Python 3.11
        assert name in locked, f"constraints.txt has no pin for {name}"
        version = str(locked[name].specifier).removeprefix("==")
        assert version in requirement.specifier, (
            f"constraints.txt pins {name} {version}, pyproject.toml says {requirement}"
        )


def test_lock_holds_exact_versions_and_nothing_of_this_machine():
    names = [canonicalize_name(pin.name) for pin in pins()]
    assert len(names) == len(set(names))
    assert names == sorted(names)
    assert "minibatcher" not in names
    for pin in pins():
        assert re.fullmatch(r"==[\w.]+", str(pin.specifier)), f"not one exact version without a local part: {pin}"
        assert pin.url is None, f"a pin names a version, not a place: {pin}"


def test_packages_imported_by_the_code_are_declared():
    declared = set(requirements(PROJECT["dependencies"], *EXTRAS.values()))
    ours = {"minibatcher", *(path.stem for path in (ROOT / "tests").glob("*.py")), *sys.stdlib_module_names}
    for path in [*(ROOT / "minibatcher").rglob("*.py"), *(ROOT / "tests").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                modules = [node.module]
            else:
                continue
            for top in {module.split(".")[0] for module in modules} - ours:
                package = canonicalize_name(IMPORT_TO_PYPI.get(top, top))
                assert package in declared, (
                    f"{path.relative_to(ROOT)} imports {top}, which pyproject.toml does not name"
                )


def test_every_data_file_of_the_package_ships():
    patterns = [pattern.removeprefix("**/") for pattern in SETUPTOOLS["package-data"]["minibatcher"]]
    for name in tracked_files():
        if name.startswith("minibatcher/") and not name.endswith(".py"):
            basename = name.rsplit("/", 1)[1]
            assert any(fnmatch(basename, pattern) for pattern in patterns), f"no package-data pattern takes {name}"


def test_nothing_else_stands_at_the_top_level():
    tops = {name.split("/", 1)[0] for name in tracked_files()}
    assert {top for top in tops if not top.startswith(".")} <= TOP_LEVEL


@pytest.mark.skipif(str(ROOT) in os.environ.get("PYTHONPATH", "").split(os.pathsep), reason="taken from PYTHONPATH")
def test_a_script_beside_a_clone_finds_the_package_and_not_the_folder(tmp_path):
    (tmp_path / "minibatcher").mkdir()  # as a clone: no __init__.py in it
    script = tmp_path / "three_lines.py"
    script.write_text("from minibatcher import SamplingParams\nprint(SamplingParams.__name__)\n", encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=120)
    assert (run.stdout, run.stderr) == ("SamplingParams\n", "")


def test_licence_is_apache_2():
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text and "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert PROJECT["license"] == "Apache-2.0"


def test_ci_runs_the_test_command_of_the_readme():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert script[-1] == "make test"
    assert "make test" in (ROOT / "README.md").read_text(encoding="utf-8")
