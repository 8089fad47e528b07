"""`minibatcher profile`: where this engine's time goes, what each optimisation brings, how soon it is there."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from ..errors import InvalidParameter
from .options import check_file, complain, whole_number, write_json

STEP, WAITING, LEDGER, START_UP = "step", "waiting", "ledger", "start_up"
DEFAULTS: dict[str, dict[str, Any]] = {  # the options that each kind knows
    STEP: {
        "model": "bard",
        "dtype": "float32",
        "threads": None,
        "num_seqs": 32,
        "context": 128,
        "cpu_path": None,
        "steps": 100,
        "runs": 3,
    },
    WAITING: {"steps": 100, "runs": 3},
    LEDGER: {"model": "110M", "dtype": "float32", "threads": None, "pairs": 7},
    START_UP: {"runs": 5},
}
SHAPES = ("15M", "110M", "360M")  # of bench.models, which would load PyTorch

DESCRIPTION = """\
Measure this engine alone, on this machine's CPU.

With none of --waiting, --ledger and --start-up: where the time of a decode step goes. The real engine
serves requests that all decode at once, and its functions are watched one by one; the parts add up to
the step. Runs without that are taken in between, and tell what the watching costs.

--waiting    what a step costs beside the model while up to 10,000 requests wait, for two orderings
--ledger     each optimisation on and off, in turn in one process: ratios near 1 say where it does not help
--start-up   `import minibatcher`, `minibatcher --help` and a first token, each in a fresh process

  minibatcher profile
  minibatcher profile --model 110M --dtype bfloat16 --cpu-path compiled --json step.json
  minibatcher profile --ledger --model 15M --dtype bfloat16 --threads 2 --json ledger.json"""


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "profile",
        help="where the time of a step goes, what each optimisation brings, how long the start takes",
        description=DESCRIPTION,
        epilog="Exit code: 0; 1 if a process of --start-up failed; 2 for a mistake in the command; 130 after Ctrl-C.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kind = parser.add_mutually_exclusive_group()
    for name, what in (
        (WAITING, "the cost of a long queue"),
        (LEDGER, "each optimisation on and off"),
        (START_UP, "import, help and first token"),
    ):
        kind.add_argument(_option(name), action="store_const", const=name, dest="kind", help=what)
    what = parser.add_argument_group("what is run")
    what.add_argument(
        "--model",
        help=f"bard, a folder with a Hugging Face checkpoint, or a shape with random weights: {', '.join(SHAPES)}; "
        "--ledger takes shapes alone (default: bard; --ledger: 110M)",
    )
    what.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32")
    what.add_argument("--threads", type=whole_number(1, 1024), help="CPU threads (default: all)")
    what.add_argument("--num-seqs", type=whole_number(1, 4096), help="requests that decode together (default: 32)")
    what.add_argument("--context", type=whole_number(2, 1_000_000), help="tokens of each, on average (default: 128)")
    what.add_argument(
        "--cpu-path", choices=("plain", "prepacked", "compiled", "auto"), help="default: that of the engine"
    )
    how = parser.add_argument_group("how often")
    how.add_argument("--steps", type=whole_number(1, 100_000), help="decode steps of a run (default: 100)")
    how.add_argument("--runs", type=whole_number(1, 1000), help="default: 3; --start-up: 5")
    how.add_argument("--pairs", type=whole_number(7, 1000), help="--ledger: pairs of measurements (default: 7)")
    parser.add_argument(
        "--json", metavar="FILE", help="write the figures and their circumstances as JSON (- for stdout)"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.set_defaults(run=run, kind=STEP)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def options(args: argparse.Namespace) -> dict[str, Any]:
    """What the kind is called with. Raises InvalidParameter for an option that does not go with it."""
    known = DEFAULTS[args.kind]
    for name in sorted({name for each in DEFAULTS.values() for name in each} - set(known)):
        if getattr(args, name) is not None:
            alone = f"with {_option(args.kind)}" if args.kind != STEP else "without --ledger"
            raise InvalidParameter(f"{_option(name)} means nothing {alone}")
    if args.kind == LEDGER and args.model not in (None, *SHAPES):
        raise InvalidParameter(f"--ledger takes one of the shapes {', '.join(SHAPES)}, not {args.model!r}")
    return {name: default if (given := getattr(args, name)) is None else given for name, default in known.items()}


def run(args: argparse.Namespace) -> int:
    given = options(args)
    check_file(args.json)
    from ..bench.process import ProcessFailed

    try:
        data = _measure(args, given)
    except ProcessFailed as problem:
        complain("minibatcher profile", str(problem))
        return 1
    from ..bench.profile_table import text

    print(text(data), file=sys.stderr if args.json == "-" else sys.stdout)
    if args.json:
        write_json(data, args.json)
    return 0


def _measure(args: argparse.Namespace, given: dict[str, Any]) -> dict[str, Any]:
    from tqdm import tqdm

    off = args.quiet or not sys.stderr.isatty()
    with tqdm(desc=args.kind.replace("_", "-"), disable=off, file=sys.stderr, leave=False) as bar:
        if args.kind == WAITING:
            from ..bench import waiting

            bar.total = given["runs"] * len(waiting.ORDERINGS) * len(waiting.LENGTHS)
            return waiting.growth(**given, progress=bar.update)
        if args.kind == LEDGER:
            from ..bench import ledger

            bar.total = len(ledger.INVARIANTS)
            return ledger.ledger(given.pop("model"), **given, progress=bar.update)
        if args.kind == START_UP:
            from ..bench import start_up

            bar.total = given["runs"] * len(start_up.COMMANDS)
            return start_up.start_up(**given, progress=bar.update)
        from ..bench import profile

        bar.total = 2 * given["runs"]
        return profile.profile(**given, progress=bar.update)
