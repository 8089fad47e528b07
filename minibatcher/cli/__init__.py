"""The command line: `minibatcher COMMAND --help` teaches each command."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

from .. import __version__
from ..errors import MinibatcherError
from . import compare, generate, info, labs, simulate

COMMANDS = (generate, compare, simulate, info, labs)


class Parser(argparse.ArgumentParser):
    """Answers a bad option with the sentence, not with two screens of usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(argv: list[str] | None = None) -> int:
    """Run one command. Returns the exit code: 0; 2 for a user's mistake, told in a sentence; 130 after an interrupt."""
    parser = Parser(
        prog="minibatcher",
        description="How an LLM server batches requests: a small engine to run, measure and read.",
        epilog="Start with: minibatcher compare",
    )
    parser.add_argument("--version", action="version", version=f"minibatcher {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in COMMANDS:
        module.add_parser(commands)
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except MinibatcherError as error:
        print(f"minibatcher {args.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of a pipe has left, as `| head` does
        sys.stderr.close()
        return 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
