"""`minibatcher labs`: build the notebooks from their sources."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("labs", help="build the chapters' and labs' notebooks from their Markdown sources")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    build = actions.add_parser(
        "build",
        help="write chapters/*.ipynb, solutions/*.ipynb and labs/*.ipynb",
        description="Write the notebooks from chapters/*.md and solutions/*.md: chapters and solutions executed, labs "
        "with stubs in place of the solutions; and the computed parts of the pages.",
    )
    build.add_argument("names", nargs="*", help="sources to build, without ending, such as lab-7.1 (default: all)")
    build.add_argument("--check", action="store_true", help="change nothing; exit with 1 if anything is out of date")
    build.add_argument("--force", action="store_true", help="overwrite also notebooks that were edited by hand")
    build.add_argument("--pages", action="store_true", help="renew only the computed parts of pages and their pictures")
    build.add_argument("--keep-outputs", action="store_true", help="run nothing: only prose or the set-up has changed")
    build.add_argument(
        "--root", metavar="FOLDER", type=Path, help="the book's folder (default: the one where this runs)"
    )
    build.set_defaults(run=run_build)


def run_build(args: argparse.Namespace) -> int:
    from ..labkit.build import run

    return run(args)
