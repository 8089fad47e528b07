"""TOML on every Python from 3.10 on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .errors import MissingDependency

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    try:
        import tomli as tomllib
    except ModuleNotFoundError:
        tomllib = None


def read_toml(path: Path) -> dict[str, Any]:
    """The file's content. Raises ValueError (with line and column) if it is not TOML."""
    if tomllib is None:
        raise MissingDependency("reading TOML on Python 3.10 needs the package tomli: pip install tomli")
    return tomllib.loads(path.read_text(encoding="utf-8"))
