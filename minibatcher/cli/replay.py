"""`minibatcher replay`: the requests of `compare`, sent to any OpenAI-compatible server at their recorded times."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from ..errors import InvalidParameter, MissingDependency
from ..request import SamplingParams
from .compare import DEFAULT_NUM_REQUESTS
from .options import natural_int, positive_int, positive_number
from .runs import (
    DEFAULT_MAX_MODEL_LEN,
    DEFAULT_WORKLOAD,
    add_max_tokens,
    add_result_options,
    add_with,
    add_workload_options,
    check_results,
    give_results,
    read_workload,
    warn_of_duration,
)


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "replay",
        help="send a workload to any OpenAI-compatible server (vLLM, SGLang, llama.cpp, ours) and measure its answers",
        description="Send the requests that compare serves to an OpenAI-compatible server, each at its own time,\n"
        "whatever has become of those before it, and measure at the client when each token comes.\n\n"
        "  minibatcher serve --port 8000                               (in another terminal; or vllm serve …)\n"
        "  minibatcher replay azure-conv --base-url http://127.0.0.1:8000/v1 --json served.json\n"
        "  minibatcher compare --workload azure-conv --strategies chunked --with served.json\n\n"
        "The same workload, --num-requests, --request-rate, --max-model-len and --seed give the same prompts\n"
        "as compare: rows that hold lengths alone become random token ids of the server's vocabulary, and\n"
        "answers are forced to the recorded lengths where the server can do that (vLLM, SGLang, TensorRT-LLM,\n"
        "llama.cpp, ours).",
        epilog="What the numbers of the table mean: minibatcher compare --help, or --explain.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("named", nargs="?", metavar="WORKLOAD", help="the same as --workload WORKLOAD")
    server = parser.add_argument_group("server")
    server.add_argument(
        "--base-url", required=True, metavar="URL", help="where it answers, as http://127.0.0.1:8000/v1"
    )
    server.add_argument("--model", help="its name there (default: the only one that it serves)")
    server.add_argument(
        "--api-key", metavar="KEY", help="default: what the environment variable OPENAI_API_KEY holds, if anything"
    )
    server.add_argument(
        "--api-keys",
        metavar="FILE",
        help="a key of its own for each tenant of the workload: TOML as for serve, [keys.TENANT] with key",
    )
    server.add_argument(
        "--chat", action="store_true", help="send each prompt as a user's message to /chat/completions (see --as-text)"
    )
    server.add_argument(
        "--as-text",
        action="store_true",
        help="send random token ids as the text that they stand for, to servers that take no ids (TGI); needs "
        "--tokenizer, and lengths then come out only near the workload's",
    )
    server.add_argument(
        "--timeout-s", type=positive_number, default=600.0, help="longest life of a request (default: 600)"
    )
    server.add_argument(
        "--warm-up",
        type=natural_int,
        default=2,
        metavar="N",
        help="short requests before the clock starts, not recorded (default: 2)",
    )
    server.add_argument("--name", metavar="LABEL", help="of the column (default: what the server calls itself)")
    add_workload_options(
        parser, DEFAULT_NUM_REQUESTS, "what WORKLOAD says, else inf", most_requests=100_000, strategies=False
    )
    add_max_tokens(parser)
    fit = parser.add_argument_group("model")
    fit.add_argument(
        "--max-model-len",
        type=positive_int,
        help=f"fit prompt + output into so many tokens (default: what the server can, at most {DEFAULT_MAX_MODEL_LEN})",
    )
    fit.add_argument(
        "--tokenizer",
        metavar="NAME",
        help="where the vocabulary is read from if the server does not tell it: bard, a folder, a tokenizer.json or a "
        ".gguf file",
    )
    add_with(parser)
    add_result_options(parser, steps=False)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    check_results(args)
    if args.named is not None:
        if args.workload not in (DEFAULT_WORKLOAD, args.named):
            raise InvalidParameter(f"two workloads are named, {args.named!r} and {args.workload!r}; name one")
        args.workload = args.named
    from ..provenance import circumstances
    from ..replay.saved import KEPT, beside

    try:
        from ..replay.run import replay
    except ImportError as error:
        if error.name and error.name.startswith("minibatcher"):
            raise
        raise MissingDependency(f"replay needs {error.name}: pip install 'minibatcher[serve]'") from None
    others = beside((), args.beside)
    keys = None
    if args.api_keys is not None:
        from ..replay.keys import tenant_keys

        keys = tenant_keys(Path(args.api_keys))

    def read(server, vocabulary):
        workload = read_workload(
            args, DEFAULT_NUM_REQUESTS, float("inf"), vocabulary.count_tokens if vocabulary.tokenizer else None
        )
        longest = args.max_model_len or min(DEFAULT_MAX_MODEL_LEN, server.max_model_len or DEFAULT_MAX_MODEL_LEN)
        if all(row.prompt_tokens is not None for row in workload):  # else only the server can tell whether it fits
            workload = workload.fit_to_context(longest)
        warn_of_duration(args, workload, "the replay")
        return workload, longest

    measured = circumstances()
    timeline = replay(
        read,
        args.base_url,
        model=args.model,
        api_key=args.api_key or os.environ.get("OPENAI_API_KEY"),
        tenant_keys=keys,
        tokenizer=args.tokenizer,
        params=SamplingParams(max_tokens=args.max_tokens),
        seed=args.seed,
        chat=args.chat,
        as_text=args.as_text,
        warm_up=args.warm_up,
        timeout_s=args.timeout_s,
        name=args.name,
        progress=sys.stderr.isatty() and not args.quiet,
    )
    label = _free(timeline.header["strategy"], others)
    kept: dict[str, Any] = {KEPT: {label: timeline.to_json()}}
    return give_results(args, {label: timeline}, measured=measured, beside=others, extra=kept)


def _free(label: str, taken: dict[str, Any]) -> str:
    return label if label not in taken else f"{label} (now)"
