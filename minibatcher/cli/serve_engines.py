"""What `minibatcher serve` runs on: the models and keys that its options name, as engines that are ready."""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InvalidParameter
from ..scheduling import strategy
from .options import check_file, engine_options, file_stems, load_for, writing

if TYPE_CHECKING:
    from ..engine import Engine
    from ..serve.keys import ApiKeys
    from ..serve.metrics import ServerMetrics

KEY_VARIABLE = "MINIBATCHER_API_KEY"
SHARE = 0.9  # of a GPU's memory, for all models together


def model_names(args: argparse.Namespace) -> dict[str, str]:
    """What clients call each model → the model. Raises InvalidParameter."""
    models = args.model or ["bard"]
    names = args.served_model_name or models
    if len(names) != len(models):
        raise InvalidParameter(f"{len(models)} --model need as many --served-model-name, not {len(names)}")
    twice = [name for name, n in Counter(names).items() if n > 1]
    if twice or not all(name.strip() for name in names):
        raise InvalidParameter(
            f"two models are called {twice[0]!r}; give each a --served-model-name" if twice else "a model needs a name"
        )
    return dict(zip(names, models))


def timeline_files(given: str | None, names: Sequence[str]) -> dict[str, str]:
    """One for each model: run.json, or run-NAME.json where there are several. Raises InvalidParameter."""
    if given is None:
        return {}
    if len(names) == 1:
        check_file(given)
        return {names[0]: given}
    path = Path(given)
    if not path.name:
        raise InvalidParameter(f"--timeline must name a file, not {given!r}")
    files = {
        name: str(path.with_name(f"{path.stem}-{stem}{path.suffix}")) for name, stem in zip(names, file_stems(names))
    }
    for file in files.values():
        check_file(file)
    return files


def api_keys(args: argparse.Namespace) -> ApiKeys | None:
    from ..serve.keys import ApiKeys

    if args.api_keys is not None:
        return ApiKeys.from_file(args.api_keys)
    secret = args.api_key if args.api_key is not None else os.environ.get(KEY_VARIABLE)
    return None if secret is None else ApiKeys.single(secret)


def served_engine_options(args: argparse.Namespace, keys: ApiKeys | None) -> dict[str, Any]:
    """What all engines are told. Raises InvalidParameter."""
    paged = strategy(args.strategy).kv_layout == "paged"
    caching = paged if args.enable_prefix_caching is None else args.enable_prefix_caching == ("on",)
    if caching and not paged:
        raise InvalidParameter(
            f"the strategy {args.strategy} has no KV blocks to share; leave --enable-prefix-caching out, or take "
            "--strategy continuous or chunked"
        )
    options = engine_options(args) | {"strategy": args.strategy, "enable_prefix_caching": caching, "keep_going": True}
    if keys is not None:
        options["limits"] = keys.limits(args.max_waiting_requests, args.max_waiting_tokens)
        if len(keys) > 1:
            options.setdefault("ordering", "fair-share")
        if keys.has_priorities and options.get("ordering") != "priority":
            say("warning: priorities of keys are heeded with --ordering priority only")
    return options


def warm_engine(args: argparse.Namespace, model: str, options: dict[str, Any], share: float) -> Engine:
    """Loaded and warm. share: of the GPU's memory that models may fill, up to this one and those before it."""
    from ..build import build_engine
    from ..compare import warm_up

    say(f"loading {model} …")
    loaded = load_for(argparse.Namespace(**(vars(args) | {"model": model})))
    if loaded.device.type == "cuda":
        options = options | {"gpu_memory_utilization": options.get("gpu_memory_utilization", SHARE) * share}
    engine = build_engine(loaded, **options)
    engine.monitor = None  # its samples would fill memory for as long as the server runs
    warm_up(engine, loaded)
    scheduler = engine.scheduler
    kv, config = scheduler.kv, scheduler.config
    say(
        f"{model} on {loaded.device} in {str(loaded.dtype).removeprefix('torch.')}: {scheduler.name}, "
        f"{config.max_num_seqs} slots, KV for {kv.num_blocks * kv.block_size:,} tokens, prefix caching "
        f"{'on' if kv.shares_prefixes else 'off'}, ordering {config.ordering}, context {engine.max_model_len:,} tokens"
    )
    return engine


def special_ids(engine: Engine) -> tuple[int, ...]:
    """Tokens that `compare` keeps out of synthetic prompts, so that a replay can make the same ones."""
    from ..build import model_runner
    from ..prompts import special_token_ids

    return special_token_ids(model_runner(engine).config, engine.tokenizer)


def record(engine: Engine, metrics: ServerMetrics, name: str, keep: bool) -> None:
    """Count what the engine does; keep: all of it."""
    from ..recorder import TimelineRecorder
    from ..serve.recorder import ServeRecorder

    engine.recorder = ServeRecorder(metrics, name, engine.scheduler, TimelineRecorder() if keep else None)
    engine.reset()


def save_timeline(engine: Engine, name: str, file: str) -> bool:
    """Whether it could be written; if not, it has been told, and costs no other model's."""
    try:
        with writing(file):
            engine.timeline.save(file)
    except InvalidParameter as error:
        say(str(error))
        return False
    say(f"the timeline of {name} is in {file}")
    return True


def say(sentence: str) -> None:
    with suppress(OSError):  # nobody listens any more
        print(f"minibatcher serve: {sentence}", file=sys.stderr, flush=True)
