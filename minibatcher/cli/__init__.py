"""The command line: `minibatcher COMMAND --help` teaches each command."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import suppress
from typing import NoReturn

from .. import __version__
from ..errors import MinibatcherError
from . import bench, compare, generate, grade, info, kernels, labs, profile, replay, serve, simulate
from .options import complain

COMMANDS = (generate, compare, simulate, serve, replay, bench, profile, kernels, info, labs, grade)


class Parser(argparse.ArgumentParser):
    """Answers a bad option with the sentence, not with two screens of usage."""

    def error(self, message: str) -> NoReturn:
        sys.exit(complain(self.prog, f"{message} (see {self.prog} --help)"))


def main(argv: list[str] | None = None) -> int:
    """Run one command. Returns the exit code: 0; 2 for a user's mistake, told in a sentence; 130 after an interrupt."""
    _open_streams()
    who = "minibatcher"
    try:
        try:
            args = _parser().parse_args(argv)
            who = f"minibatcher {args.command}"
            return args.run(args)
        finally:
            sys.stdout.flush()  # a full disk shows here, while there is still someone to say so
    except MinibatcherError as error:
        return complain(who, str(error))
    except BrokenPipeError:  # the reader of a pipe has left, as `| head` does
        _silence()
        return 0
    except OSError as error:
        _silence()
        return complain(who, f"{error.strerror or error}" + (f": {error.filename!r}" if error.filename else ""))
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        return complain(
            who, "not enough memory; lower what takes it: --kv-cache-tokens, --max-num-seqs, --num-requests"
        )
    except KeyboardInterrupt:
        with suppress(OSError):
            print("interrupted", file=sys.stderr)
        return 130


def _parser() -> Parser:
    parser = Parser(
        prog="minibatcher",
        description="How an LLM server batches requests: a small engine to run, measure and read.",
        epilog="Start with: minibatcher compare",
    )
    parser.add_argument("--version", action="version", version=f"minibatcher {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in COMMANDS:
        module.add_parser(commands)
    return parser


def _open_streams() -> None:
    """No character and no closed stream may end a run: what can't be encoded becomes "?"."""
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None and name != "stdin":
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - for as long as Python runs
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def _silence() -> None:
    """Send what a broken stream still holds to nowhere, or Python would complain of it at its end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with suppress(OSError):  # io.UnsupportedOperation is one, of streams that are no files
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _is_out_of_memory(error: Exception) -> bool:
    """PyTorch raises a RuntimeError of its own on a GPU, and a plain one on a CPU."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or "out of memory" in text or "allocate memory" in text or "allocator" in text
