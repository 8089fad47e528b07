"""An environment with the versions that Colab has: `python tests/colab_environment.py .venv-colab` makes it.

Only what differs is installed there. PyTorch and all else is borrowed, by links, from the environment that runs this;
all but minibatcher, which is not installed on a fresh Colab either.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PINS = Path(__file__).with_name("colab-requirements.txt")
BORROWED = "borrowed"
TOO_NEW = (3, 13)
NOT_ON_COLAB = ("comm",)  # which ipywidgets 8 brings, and code written with it takes for granted


def folder() -> Path:
    """Where the environment is: COLAB_VENV, or .venv-colab in the repository."""
    return Path(os.environ.get("COLAB_VENV", ROOT / ".venv-colab"))


def python(environment: Path) -> Path:
    return environment / "bin" / "python"


def packages(environment: Path) -> Path:
    """Its folder of installed packages."""
    return Path(sysconfig.get_path("purelib", "posix_prefix", {"base": str(environment)}))


def all_packages(environment: Path) -> list[Path]:
    """What can be imported there: its own packages, then those that it borrows and does not have itself."""
    own = {path.name: path for path in packages(environment).iterdir() if path.suffix != ".pth"}
    return list(({path.name: path for path in (environment / BORROWED).iterdir()} | own).values())


def obstacle(environment: Path) -> str | None:
    """Why no test can run in it; None if they can."""
    if sys.version_info >= TOO_NEW:
        return f"Colab's versions have no builds for Python {TOO_NEW[0]}.{TOO_NEW[1]} and later"
    if not (environment / BORROWED).is_dir():
        return f"no environment with Colab's versions in {environment}; make one: make colab"
    return None


def pins(*, compared: bool = False) -> dict[str, str]:
    """Project → version on Colab of what is installed here, or of what is only compared."""
    lines = PINS.read_text(encoding="utf-8").splitlines()
    chosen = [line.removeprefix("#: ") for line in lines if line.startswith("#: ") == compared]
    return dict(line.split("==") for line in chosen if not line.startswith("#"))


def make(environment: Path) -> None:
    """Install the pinned versions, and link what else the running environment has."""
    shutil.rmtree(environment, ignore_errors=True)
    venv.create(environment, symlinks=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*command, "--target", str(packages(environment)), "-r", str(PINS)], check=True)
    # Read after the environment's own packages, so what is installed there comes first.
    (packages(environment) / "borrowed.pth").write_text(f"{environment / BORROWED}\n", encoding="utf-8")
    borrow(environment / BORROWED, besides={"minibatcher", *NOT_ON_COLAB, *pins()})


def borrow(target: Path, besides: set[str]) -> None:
    """Link the packages of the running environment into a folder, save those projects."""
    target.mkdir()
    home, left_out = Path(sysconfig.get_path("purelib")), {project_name(name) for name in besides}
    not_linked = {"__pycache__"}
    for distribution in importlib.metadata.distributions(path=[str(home)]):
        if project_name(distribution.metadata["Name"]) in left_out:
            not_linked |= {path.parts[0] for path in distribution.files or ()}
    for source in home.iterdir():
        if source.name not in not_linked:
            (target / source.name).symlink_to(source)


def project_name(name: str) -> str:
    return name.lower().replace("_", "-")


def main() -> int:
    environment = Path(sys.argv[1]).resolve()
    if sys.version_info >= TOO_NEW:
        print(f"{obstacle(environment)}; its tests are skipped")
        environment.mkdir(exist_ok=True)
    else:
        make(environment)
    return 0


if __name__ == "__main__":
    sys.exit(main())
