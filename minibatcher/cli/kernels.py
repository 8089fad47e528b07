"""`minibatcher kernels`: are the Triton kernels right, do they compile, how fast are they?"""

from __future__ import annotations

import argparse
import os
import re
import sys
from typing import Any

from ..errors import DeviceError, InvalidParameter, MinibatcherError, MissingDependency
from .options import check_file, complain, seed, whole_number, write_json

TARGETS = (75, 80, 89, 90)
INTERRUPTED = "interrupted: the rows are those of what was done so far"

WHAT = """\
--check        every kernel against a float64 reference: on a GPU, or on a CPU in Triton's interpreter (seconds)
--compile      every kernel compiled for GPUs that are not here: registers, spills, shared memory, tensor cores
--bench        speed on this GPU, as shares of what it was measured to copy and to multiply, beside SDPA
--report FILE  check, bench and a comparison of engines in under 6 minutes, as one JSON file (needs a GPU)"""


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "kernels",
        help="the Triton attention kernels: are they right, do they compile, how fast are they",
        description="Look after the Triton kernels, with a GPU or without one.\n\n" + WHAT + "\n\n"
        "With none of these: the goals, and what has been measured on which GPU.",
        epilog="Registers and stack are a thread's; bytes of stack are registers that did not fit (spills). Shared\n"
        "memory is a program's, next to the most that the chip grants. GB/s count each key and value once; TFLOP/s\n"
        "count what a causal query sees and nothing else. Copy bandwidth counts bytes read and bytes written.\n\n"
        "Exit code: 0 if all is well, 1 if a check failed, 2 for a mistake in the command, 130 after Ctrl-C.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="every kernel against the float64 reference")
    what.add_argument("--compile", action="store_true", help="every kernel for other GPUs")
    what.add_argument("--bench", action="store_true", help="speed on this GPU")
    what.add_argument("--report", metavar="FILE", help="all that needs a GPU, as one JSON file")
    parser.add_argument("--device", help="auto, cpu, cuda or cuda:N; --report on a cpu is a trial (default: auto)")
    parser.add_argument(
        "--seed", type=seed, help="--check: of the random inputs (default: a fresh one, which is printed)"
    )
    parser.add_argument(
        "--targets",
        nargs="+",
        type=capability,
        metavar="N.N",
        help="--compile: compute capabilities among 7.5, 8.0, 8.6, 8.9 and 9.0, with or without the point "
        f"(default: {' '.join(f'{target / 10:.1f}' for target in TARGETS)})",
    )
    parser.add_argument(
        "--jobs", type=whole_number(1, 64), help="--compile: targets at the same time (default: the CPUs)"
    )
    parser.add_argument("--json", metavar="FILE", help="write all rows as JSON (- for stdout)")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.set_defaults(run=run)


def capability(text: str) -> int:
    """An option's type: 9.0 or 90 is 90."""
    if not re.fullmatch(r"[0-9]{1,3}(\.[0-9])?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no compute capability, such as 9.0 or 90")
    return int(text.replace(".", ""))


def run(args: argparse.Namespace) -> int:
    if not args.compile and (args.targets or args.jobs):
        raise InvalidParameter("--targets and --jobs go with --compile")
    if args.seed is not None and not args.check:
        raise InvalidParameter("--seed goes with --check")
    if args.device and not (args.check or args.bench or args.report):
        raise InvalidParameter("--device goes with --check, --bench or --report")
    if args.report == "-":
        raise InvalidParameter("--report wants a file; for standard output use --json -")
    check_file(args.json)
    check_file(args.report)
    if args.compile:
        return _compile(args)
    if args.check or args.bench or args.report is not None:
        return _report(args)
    from ..kernels.goals import RESULTS, judge, measured_reports
    from ..kernels.goals import goals_table as table

    reports = measured_reports()
    where = f"Shown are the reports in {'/'.join(RESULTS.parts[-3:])}/ (as --report writes them)."
    _give(
        args,
        [{**report, "goals": judge(report)} for report in reports or [{"sections": {}}]],
        f"{WHAT}\n\nGoals on an H200\n{table(reports)}\n{where}",
    )
    return 0


def _report(args: argparse.Namespace) -> int:
    from ..build import resolve_device
    from ..kernels import report as reports
    from ..kernels.tables import report_text

    _need_triton()
    device = resolve_device(args.device or "auto")
    if device.type == "cpu" and (args.bench or (args.report and args.device is None)):
        raise DeviceError(
            "PyTorch finds no CUDA GPU here, and times without one say nothing of kernels; "
            "--check and --compile need none"
        )
    sections: tuple[reports.Section, ...]
    if args.check:
        sections = (reports.Section("check", settings={"seed": args.seed}),)
    else:
        sections = reports.BENCH if args.bench else reports.REPORT
    trial = bool(args.report) and device.type == "cpu"
    bar = Bar(args.quiet)
    report = reports.make_report(sections, device, trial=trial, progress=bar)
    bar.close()
    if args.report:
        write_json(report, args.report)
    _give(args, report, report_text(report))
    mistakes = [section["error"] for section in report["sections"].values() if section["mistake"]]
    if mistakes and not args.report:
        raise MinibatcherError(mistakes[0])
    if report["interrupted"]:
        print(INTERRUPTED, file=sys.stderr)
        return 130
    return _verdict(reports.failures(report))


def _compile(args: argparse.Namespace) -> int:
    from ..kernels.tables import compile_table
    from ..kernels.targets import TARGETS as known
    from ..kernels.targets import compile_targets

    _need_triton()
    from ..attention.triton_support import is_interpreted

    targets = list(dict.fromkeys(args.targets or TARGETS))
    if unknown := [target for target in targets if target not in known]:
        raise InvalidParameter(f"--targets: {unknown[0]} is not among {', '.join(map(str, known))}")
    if is_interpreted():
        print("TRITON_INTERPRET is set, and interpreted kernels do not compile: unset for this run", file=sys.stderr)
    bar = Bar(args.quiet)
    jobs = args.jobs or min(len(targets), os.cpu_count() or 1)
    rows, errors, interrupted = compile_targets(targets, jobs=jobs, progress=bar)
    bar.close()
    count = sum(bool(row["faults"]) for row in rows)
    num_targets = len({row["target"] for row in rows})
    verdict = f"{_count(len(rows), 'kernel')} for {_count(num_targets, 'GPU')}, {count or 'none'} at fault"
    data = {"rows": rows, "errors": errors, "interrupted": interrupted}
    _give(args, data, f"{compile_table(rows)}\n{verdict}" if rows else "")
    if interrupted:
        print(INTERRUPTED, file=sys.stderr)
        return 130
    faults = [
        f"{row['kernel']} in {row['dtype']} for {row['target'] / 10:.1f} ({row['shape']}): {fault}"
        for row in rows
        for fault in row["faults"]
    ]
    return _verdict([*faults, *errors])


def _need_triton() -> None:
    try:
        from ..attention.triton_support import version
    except ImportError as error:
        raise MissingDependency(f"the kernels need PyTorch ({error}); pip install torch") from None
    if version() is None:
        raise MissingDependency("Triton is not installed; it exists for Linux: pip install triton")


def _give(args: argparse.Namespace, data, text: str) -> None:
    if args.json:
        write_json(data, args.json)
    if args.json != "-" and text:
        print(text)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _verdict(sentences: list[str]) -> int:
    for sentence in sentences:
        complain("minibatcher kernels", sentence)
    return 1 if sentences else 0


class Bar:
    """A progress bar on a terminal: called with a section's name, the rows so far, and the total (None: unknown)."""

    def __init__(self, quiet: bool) -> None:
        self.off = quiet or not sys.stderr.isatty()
        self.name: str | None = None
        self.bar: Any = None  # a tqdm

    def __call__(self, name: str, done: int, total: int | None) -> None:
        if self.off:
            return
        from tqdm import tqdm

        if name != self.name:
            self.close()
            self.name, self.bar = name, tqdm(desc=name, total=total, file=sys.stderr)
        self.bar.total = total
        self.bar.n = done
        self.bar.refresh()

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
