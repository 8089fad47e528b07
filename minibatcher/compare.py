"""One workload through several strategies on one model, each on an engine of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from .build import EngineOptions, assemble_engine, model_runner, resolve_device
from .engine import Engine
from .model.loader import LoadedModel, load_model
from .prompts import special_token_ids, to_requests
from .request import Request, SamplingParams
from .scheduling import DEFAULT_STRATEGIES, Scheduler
from .timeline import Timeline
from .variants import Variants, make_variants, varied
from .workload import Workload, prefix_bound


def run_comparison(
    workload: Workload,
    *,
    model: str | LoadedModel = "bard",
    strategies: Sequence[str | type[Scheduler]] = DEFAULT_STRATEGIES,
    variants: Variants | None = None,
    params: SamplingParams | None = None,
    declared_max_tokens: int | None = None,
    keep_going: bool = False,
    progress: bool = False,
    **options,
) -> dict[str, Timeline]:
    """Serve the same requests under each strategy; returns name → timeline, in the order given.

    The workload must fit the context (Workload.fit_to_context). strategies: names, or Scheduler classes of one's own.
    variants: in place of strategies, label → strategy and what else this run sets (variants.make_variants). params:
    sampling for all; rows that name an output length are forced to it, and declare declared_max_tokens if given
    (prompts.forced). keep_going: as Engine's. options: those of Engine.from_model. A short warm-up precedes each run
    and is not recorded. After an interrupt the strategies that have not begun are left out.
    """
    variants = variants or make_variants(strategies)
    stand = _Stand(workload, model, variants, params or SamplingParams(), declared_max_tokens, keep_going, options)
    timelines = {}
    for name in variants:
        try:
            engine = stand.start(name)
        except KeyboardInterrupt:
            break
        timelines[name] = timeline = stand.serve(engine, stand.requests(workload, engine), progress)
        del engine  # so that its pool makes room for the next one's
        if timeline.header.get("interrupted"):
            break
    return timelines


def rate_servers(
    workload: Workload,
    *,
    variants: Variants,
    model: str | LoadedModel = "bard",
    params: SamplingParams | None = None,
    declared_max_tokens: int | None = None,
    keep_going: bool = False,
    **options,
) -> Iterator[tuple[str, Callable[[float], Timeline]]]:
    """For each variant, a function that serves the workload at a request rate, as capacity.find_capacity takes it.

    Parameters: those of run_comparison. A server is good until the next one is asked for.
    """
    stand = _Stand(workload, model, variants, params or SamplingParams(), declared_max_tokens, keep_going, options)
    for name in variants:
        engine = stand.start(name)

        def serve(request_rate: float, engine: Engine = engine) -> Timeline:
            faster = workload.at_rate(request_rate, seed=stand.seed)
            return stand.serve(engine, stand.requests(faster, engine))

        yield name, serve
        del engine, serve


class _Stand:
    """Engines for all variants, none of which holds memory before it is started.

    Every request is checked against every engine first: a refusal must not cost what has been served.
    """

    def __init__(
        self,
        workload: Workload,
        model: str | LoadedModel,
        variants: Variants,
        params: SamplingParams,
        declared_max_tokens: int | None,
        keep_going: bool,
        options: dict[str, Any],
    ) -> None:
        defaults = EngineOptions()
        if isinstance(model, str):
            device = resolve_device(options.get("device", defaults.device))
            model = load_model(model, device=device, dtype=options.get("dtype", defaults.dtype))
        self.workload, self.model, self.params, self.declared = workload, model, params, declared_max_tokens
        self.varied = varied(variants)
        self.seed = options.get("seed", defaults.seed)
        self.engines = {name: assemble_engine(model, **{**options, **own}) for name, own in variants.items()}
        for engine in self.engines.values():
            engine.keep_going = keep_going
            for request in self.requests(workload, engine):
                engine.check(request)

    def requests(self, workload: Workload, engine: Engine) -> list[Request]:
        return to_requests(
            workload,
            vocab_size=self.model.config.vocab_size,
            tokenizer=self.model.tokenizer,
            special=special_token_ids(self.model.config, self.model.tokenizer),
            params=self.params,
            seed=self.seed,
            max_model_len=engine.max_model_len,
            declared_max_tokens=self.declared,
        )

    def start(self, name: str) -> Engine:
        engine = self.engines.pop(name)  # the only reference: whoever drops the engine frees its pool
        runner = model_runner(engine)
        runner.allocate()
        if not runner.attention.interpreted:  # whose times mean nothing anyway
            warm_up(engine, self.model)
        return engine

    def serve(self, engine: Engine, requests: list[Request], progress: bool = False) -> Timeline:
        """Run, and note what the engine does not know: where the requests come from."""
        timeline = engine.run(requests, progress=progress)
        header = timeline.header
        header |= {"workload": self.workload.facts(), "varied": self.varied}
        header["sampling"] = {
            key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self.params).items()
        }
        if self.declared is not None:
            header["declared_max_tokens"] = self.declared
        if header["enable_prefix_caching"]:
            bound = prefix_bound([request.prompt_token_ids for request in requests], header["block_size"])
            header |= {"prefix_bound": bound} if bound["tokens"] else {}
        return timeline


def warm_up(engine: Engine, model: LoadedModel) -> None:
    """A few short requests, so that first-use costs (thread pools, kernel choice, page faults) fall outside the run.

    On a GPU, where a kernel is compiled when a step first needs it: steps from a full batch down to a single row, and
    one more request whose context is long enough to be split among programs. Not with slots: there a lone request waits
    for company, and contexts count as long from the start.
    """
    limits, engine.limits = engine.limits, None  # nobody is turned away from a warm-up
    engine.reset()
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
    while engine.has_work():
        engine.step()
    engine.limits = limits
    engine.reset()
