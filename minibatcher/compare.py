"""One workload through several strategies on one model, each on an engine of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from .build import EngineOptions, assemble_engine, resolve_device
from .engine import Engine
from .model.loader import LoadedModel, load_model
from .prompts import to_requests
from .request import Request, SamplingParams
from .scheduling import DEFAULT_STRATEGIES
from .timeline import Timeline
from .variants import Variants, make_variants, varied
from .workload import Workload


def run_comparison(
    workload: Workload,
    *,
    model: str | LoadedModel = "bard",
    strategies: Sequence[str] = DEFAULT_STRATEGIES,
    variants: Variants | None = None,
    params: SamplingParams | None = None,
    progress: bool = False,
    **options,
) -> dict[str, Timeline]:
    """Serve the same requests under each strategy; returns name → timeline, in the order given.

    The workload must fit the context (Workload.fit_to_context). variants: in place of strategies, label → strategy and
    what else this run sets (variants.make_variants). params: sampling for all; rows that name an output length are
    forced to it. options: those of Engine.from_model. A short warm-up precedes each run and is not recorded.
    After an interrupt the strategies that have not begun are left out.
    """
    params = params or SamplingParams()
    defaults = EngineOptions()
    seed = options.get("seed", defaults.seed)
    if isinstance(model, str):
        device = resolve_device(options.get("device", defaults.device))
        model = load_model(model, device=device, dtype=options.get("dtype", defaults.dtype))
    variants = variants or make_variants(strategies)
    engines = {name: assemble_engine(model, **(options | own)) for name, own in variants.items()}
    todo = {name: _requests(workload, model, params, seed, e.max_model_len) for name, e in engines.items()}
    for name, engine in engines.items():  # all before the first run: a refusal must not cost what has been served
        for request in todo[name]:
            engine.check(request)
    timelines = {}
    for name in list(engines):
        engine = engines.pop(name)  # the only reference, so that its pool makes room for the next one's
        try:
            engine.runner.allocate()
            if not engine.runner.attention.interpreted:  # whose times mean nothing anyway
                _warm_up(engine, model)
        except KeyboardInterrupt:
            break
        timelines[name] = timeline = engine.run(todo[name], progress=progress)
        timeline.header |= {"workload": workload.facts(), "varied": varied(variants)}
        timeline.header["sampling"] = {
            key: list(value) if isinstance(value, tuple) else value for key, value in asdict(params).items()
        }
        if timeline.header.get("interrupted"):
            break
    return timelines


def _requests(
    workload: Workload, model: LoadedModel, params: SamplingParams, seed: int, max_model_len: int
) -> list[Request]:
    return to_requests(
        workload,
        vocab_size=model.config.vocab_size,
        tokenizer=model.tokenizer,
        special=_special_ids(model),
        params=params,
        seed=seed,
        max_model_len=max_model_len,
    )


def _special_ids(model: LoadedModel) -> tuple[int, ...]:
    """Tokens that a synthetic prompt must not hold."""
    config = model.config
    ids = {*config.eos_token_ids, config.bos_token_id, config.pad_token_id}
    if model.tokenizer is not None:
        ids |= model.tokenizer.special_ids
    return tuple(sorted(i for i in ids if i is not None))


def _warm_up(engine: Engine, model: LoadedModel) -> None:
    """A few short requests, so that first-use costs (thread pools, kernel choice, page faults) fall outside the run.

    On a GPU, where a kernel is compiled when a step first needs it: steps from a full batch down to a single row, and
    one more request whose context is long enough to be split among programs. Not with slots: there a lone request waits
    for company, and contexts count as long from the start.
    """
    scheduler = engine.scheduler
    room = min(engine.max_model_len, scheduler.kv.num_blocks * scheduler.kv.block_size)
    length = max(1, min(32, room - 4))
    most = min(4, room - length)
    lengths = [length] * (scheduler.config.max_num_seqs if model.device.type == "cuda" else 2)
    if model.device.type == "cuda" and scheduler.kv_layout == "paged":
        lengths.append(max(1, min(256, room - most)))
    for i, length in enumerate(lengths):
        prompt = [(7 * i + j) % model.config.vocab_size for j in range(length)]
        params = SamplingParams(max_tokens=most if i == 0 else max(1, most - 1), ignore_eos=True)
        engine.add(prompt, params, request_id=f"warm-up-{i}")
    while engine.scheduler.has_work():
        engine.step()
    engine.reset()
