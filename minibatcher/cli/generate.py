"""`minibatcher generate`: a prompt in, text out, as it comes."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from ..errors import InvalidParameter
from ..request import SamplingParams
from ..scheduling import strategy
from .options import (
    add_engine_options,
    add_model_options,
    add_speed_options,
    characters,
    check_file,
    engine_options,
    load_for,
    natural_int,
    number,
    positive_int,
    seed,
    write_json,
)


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "generate",
        help="continue a prompt, or several in one batch",
        description="Continue a prompt. One prompt streams to the terminal; several are served as one batch.\n"
        'The model in the package writes plays: try  minibatcher generate "ROMEO:"',
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("prompt", nargs="+", help="text to continue; - reads it from standard input")
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=positive_int, default=200, help="most tokens to generate (default: 200)")
    group.add_argument("--min-tokens", type=natural_int, default=0, help="fewest tokens to generate (default: 0)")
    group.add_argument("--temperature", type=number, default=0.8, help="0 is greedy (default: 0.8)")
    group.add_argument("--top-k", type=natural_int, default=0, help="keep the k most probable tokens; 0 keeps all")
    group.add_argument(
        "--top-p", type=number, default=1.0, help="keep the most probable tokens up to this sum (default: 1)"
    )
    group.add_argument("--seed", type=seed, default=0, help="same seed, same text (default: 0)")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="stop before this text; repeatable")
    group.add_argument("--ignore-eos", action="store_true", help="go on after the end-of-sequence token")
    parser.add_argument(
        "--json", metavar="FILE", help="write texts, token ids and finish reasons as JSON (- for stdout)"
    )
    add_model_options(parser)
    add_engine_options(parser, several=False)
    add_speed_options(parser)
    parser.add_argument("--strategy", default="continuous", help="batching strategy for several prompts")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    params = SamplingParams(
        max_tokens=args.max_tokens,
        min_tokens=args.min_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        stop=tuple(map(characters, args.stop)),
        ignore_eos=args.ignore_eos,
    )
    strategy(args.strategy)
    check_file(args.json)
    prompts = [_read_input() if prompt == "-" else characters(prompt) for prompt in args.prompt]
    # A stream of random numbers for each place, so that a prompt's text does not depend on how it is served.
    each = [replace(params, seed=args.seed + i) for i in range(len(prompts))]
    from ..llm import LLM

    llm = LLM(load_for(args), strategy=args.strategy, **engine_options(args))
    if len(prompts) == 1 and not args.json:
        pieces = llm.engine.stream(prompts[0], each[0])  # refused, if at all, before anything is printed
        sys.stdout.write(prompts[0])
        for text in pieces:
            sys.stdout.write(text)
            sys.stdout.flush()
        print()
        return 0
    completions = llm.generate(prompts, each, progress=sys.stderr.isatty())
    if args.json:
        rows = [
            {
                "prompt": prompt,
                "text": done.text,
                "token_ids": done.token_ids,
                "prompt_tokens": done.num_prompt_tokens,
                "finish_reason": done.finish_reason.value if done.finish_reason else "abort",
            }
            for prompt, done in zip(prompts, completions)
        ]
        write_json(rows, args.json)
    if args.json != "-":
        print("\n\n".join(prompt + done.text for prompt, done in zip(prompts, completions)))
    if llm.engine.timeline.header.get("interrupted"):
        print("interrupted: the texts are what was done so far", file=sys.stderr)
        return 130
    return 0


def _read_input() -> str:
    if sys.stdin is None:
        raise InvalidParameter("- reads the prompt from standard input, and that is closed")
    return characters(sys.stdin.read())
