"""Chapter 7.2: what its cells printed, computed again. Of measured figures, what holds on any machine."""

import difflib
import re
from itertools import pairwise
from types import SimpleNamespace

import pytest
from book import notebook, output, printed

from minibatcher import Engine, Limits, Request, SamplingParams, TenantLimit, claims, load_model, load_workload
from minibatcher.metrics import goodput, itl, summarize
from minibatcher.prompts import to_requests
from minibatcher.runners.graphs import graph_sizes
from minibatcher.simulate import run_simulation, simulated_engine
from minibatcher.variants import make_variants
from minibatcher.workload import Workload, WorkloadRequest, profile

BOOK = claims.machine()  # Llama-3.1-70B on four H100
SPEAKERS = ["ROMEO", "BRUTUS", "HAMLET", "OPHELIA", "FALSTAFF", "MACBETH", "PUCK", "LEAR"]
SPEAKERS += ["IAGO", "PORTIA", "MIRANDA", "OTHELLO", "VIOLA", "NURSE", "ROSALIND", "SHYLOCK"]


@pytest.fixture(scope="module")
def bard():
    return load_model("bard")


@pytest.fixture(scope="module")
def prompts(bard):
    return [bard.tokenizer.encode(f"<|bos|>{name}:") for name in SPEAKERS]


@pytest.fixture(scope="module")
def loops():
    """What the notebook itself defines, run from its source, without what its cells show."""
    names = {"here": SimpleNamespace(device="cpu"), "show_diff": lambda old, new: None}
    exec("import torch", names)
    for cell in notebook("7.2")["cells"]:
        source = "".join(cell["source"])
        if re.search(r"^def (slots_of|static_batch|continuous_batch)\(", source, re.MULTILINE):
            exec(source, names)
            names.setdefault("sources", []).append(source)
    return SimpleNamespace(**names)


def requests(prompts, max_tokens=80):
    return [Request(name, p, SamplingParams(max_tokens=max_tokens)) for name, p in zip(SPEAKERS, prompts)]


def numbers(line):
    return [float(number.replace(",", "")) for number in re.findall(r"-?\d[\d,]*\.?\d*", line)]


def flat(text):
    return " ".join(text.split())


def line_of(text, *words):
    """The one line that holds all of these words."""
    (line,) = [line for line in text.splitlines() if all(word in line for word in words)]
    return line


def test_two_new_lines_turn_the_static_loop_into_a_continuous_one(loops):
    """2.1: the change is as small as the heading says."""
    before, after = (s.split("show_diff(")[0].strip().splitlines() for s in loops.sources[1:])
    changed = [line for line in difflib.ndiff(before, after) if line[0] in "+-" and " def " not in line[1:]]
    came, went = ([line for line in changed if line[0] == sign and "def " not in line] for sign in "+-")
    assert (len(came), len(went)) == (2, 4)


def test_the_loops_and_the_engine_take_the_same_steps(bard, prompts, loops):
    """2.1: fewer steps, the same answers, from the notebook's loops and from the engine's schedulers."""
    (eos,) = bard.config.eos_token_ids
    steps, answers = [], []
    for strategy, loop in (("static", loops.static_batch), ("continuous", loops.continuous_batch)):
        run = Engine.from_model(bard, strategy=strategy, max_num_seqs=4).run(requests(prompts))
        answers.append([record.output_token_ids for record in run.requests.values()])
        assert loop(bard.model, prompts, 80, eos, 4) == (answers[-1], len(run.steps))
        steps.append(len(run.steps))
    assert answers[0] == answers[1]
    before, after = steps
    assert after < 0.6 * before
    text = output("7.2", "claim-2.1")
    tokens = sum(map(len, answers[0]))
    assert f"{tokens} tokens: {before} steps before, {after} after: {before / after:.2f} × as many." in text
    for line in text.splitlines()[-4:]:
        num_slots, *told = map(int, line.split())
        for steps, strategy in zip(told, ("static", "continuous")):
            run = Engine.from_model(bard, strategy=strategy, max_num_seqs=num_slots).run(requests(prompts))
            assert steps == len(run.steps)
    _, four, eight, sixteen = (list(map(int, line.split())) for line in text.splitlines()[-4:])
    assert eight[2] > 0.7 * four[2] and sixteen[1] == sixteen[2]  # twice the slots are far from half the steps


def test_a_permutation_of_slots_changes_no_answer(bard, prompts, loops):
    """2.2: rows in another order, and a queue in another order: the same tokens."""
    forward = loops.slots_of(bard.model, 4, 64)
    first = forward([0, 1, 2, 3], prompts[:4], [0] * 4)
    starts = [len(prompt) for prompt in prompts[:4]]
    second = forward([0, 1, 2, 3], [[token] for token in first], starts)
    for order in ([3, 1, 0, 2], [2, 3, 1, 0]):
        again = forward(order, [[first[i]] for i in order], [starts[i] for i in order])
        assert again == [second[i] for i in order]
    text = output("7.2", "claim-2.2")
    words = [bard.tokenizer.decode([token]) for token in second]
    assert f"24 orders of rows; second words in all of them: {words}; others: 0" in text
    assert "5 different seatings; answers that differ: 0" in text

    turned = Engine.from_model(bard, strategy="continuous", max_num_seqs=3).run(requests(prompts)[::-1])
    plain = Engine.from_model(bard, strategy="static", max_num_seqs=4).run(requests(prompts))
    assert {n: r.output_hash for n, r in turned.requests.items()} == {
        n: r.output_hash for n, r in plain.requests.items()
    }


def test_with_the_other_cache_each_goes_on_in_the_other_speech():
    """2.2: after the exchange FALSTAFF says what OTHELLO would have said, and the other way round."""
    own, exchanged = output("7.2", "claim-2.2").split("exchanged\n")
    for name, other in (("FALSTAFF", "OTHELLO"), ("OTHELLO", "FALSTAFF")):
        theirs = line_of(own, f"   {other} ").split(maxsplit=1)[1]
        mine, mixed = (line_of(text, f"   {name} ").split(maxsplit=1)[1] for text in (own, exchanged))
        kept = next(i for i, (a, b) in enumerate(zip(mine, mixed)) if a != b)
        assert kept > 15 and f"{other}:" in mixed[kept:] and f"{other}:" not in mine
        if name == "FALSTAFF":
            assert mixed[kept : kept + 50] in theirs


def test_seven_run_three_leave_and_three_come_in():
    """2.3: the conveyor belt of the picture, step for step."""
    seven = {"ROMEO": 26, "BANQUO": 6, "HAMLET": 20, "OPHELIA": 6, "FALSTAFF": 16, "MIRANDA": 6, "MACBETH": 23}
    three = {"PORTIA": 15, "IAGO": 11, "DUNCAN": 17}
    guests = [
        Request(name, range(20), SamplingParams(max_tokens=n, ignore_eos=True)) for name, n in (seven | three).items()
    ]
    options = {"max_model_len": 64, "max_num_seqs": 7, "kv_cache_tokens": 448}
    run = simulated_engine(BOOK, "continuous", **options).run(guests)
    out = next(step for step in run.steps if step.finished)
    following = run.steps[out.index + 1]
    assert len(out.rows) == len(following.rows) == 7
    assert out.kv_used_blocks == following.kv_used_blocks > run.steps[-1].kv_used_blocks
    assert sorted(out.finished) == ["BANQUO", "MIRANDA", "OPHELIA"] and following.admitted == list(three)
    assert {row.slot for row in out.rows if row.request_id in out.finished} == {
        row.slot for row in following.rows if row.request_id in three
    }
    told = []
    for step in run.steps:
        came, left = ", ".join(step.admitted), ", ".join(step.finished)
        moved = (f"   in: {came}" if came else "") + (f"   out: {left}" if left else "")
        if moved:
            told.append(f"step {step.index:2}: {len(step.rows)} in the batch, {step.num_waiting} waiting{moved}")
    assert output("7.2", "claim-2.3").splitlines() == told


def test_twenty_tokens_take_twenty_steps_whoever_is_beside():
    """2.4"""
    text = output("7.2", "claim-2.4")
    for share in claims.fair_share(BOOK, newcomers_per_s=(0.0,)):
        told = numbers(line_of(text, f"{share.neighbour_tokens:,} tokens each"))
        column = {"static": 1, "continuous": 3}.get(share.strategy)
        if column:
            assert told[column : column + 2] == [share.waiting, share.running]
        if share.strategy == "continuous":
            assert (share.running, share.stalled) == (20, 0) and share.waiting <= 1
    options = {"neighbour_tokens": [2_000], "newcomers_per_s": [0.0], "strategies": ["continuous"], "max_num_seqs": 30}
    (full,) = claims.fair_share(BOOK, **options)
    assert f"waits {full.waiting:,} steps, runs {full.running}" in text and full.running == 20
    assert full.waiting > 0.9 * 2_000  # without a free slot it waits for the neighbours, as everywhere


def test_a_ragged_batch_has_no_padding_in_the_linear_layers(bard, loops):
    """2.5: the hook's counts are what the timeline tells; a rectangle pads, whoever schedules it."""
    text = output("7.2", "claim-2.5")
    lengths = "uniform:prompt_min=8,prompt_max=96,output_min=4,output_max=64"
    mixed = load_workload(lengths, num_requests=16, seed=1)
    needed = sum(row.prompt_tokens + row.output_tokens - 1 for row in mixed)
    runs = run_simulation(mixed, BOOK, strategies=["static", "continuous"], max_num_seqs=8, max_num_batched_tokens=1024)
    for strategy, name in (("static", "static, rectangles"), ("continuous", "continuous, ragged")):
        computed, useful, share = numbers(line_of(text, name).removeprefix(name))
        assert useful == needed
        assert computed == sum(step.num_computed_tokens for step in runs[strategy].steps)
        assert share == round(100 * (computed - useful) / computed)
    computed, useful, share = numbers(line_of(text, "our loop").removeprefix("our loop: continuous, rectangles"))
    counts, own = [], to_requests(mixed, vocab_size=bard.config.vocab_size)
    hook = bard.model.layers[0].mlp.register_forward_hook(lambda module, inputs, out: counts.append(len(inputs[0])))
    loops.continuous_batch(bard.model, [r.prompt_token_ids for r in own], 64, None, 8)
    hook.remove()
    assert computed == sum(counts) and useful == sum(row.prompt_tokens + 64 - 1 for row in mixed)
    assert share == round(100 * (computed - useful) / computed)
    assert 0 < share < numbers(line_of(text, "static, rectangles"))[-1]
    assert numbers(line_of(text, "continuous, ragged"))[-1] == 0

    decodes = [len(step.rows) for step in runs["continuous"].steps if all(r.num_tokens == 1 for r in step.rows)]
    padding = sum(min(size for size in graph_sizes(8) if size >= n) - n for n in decodes)
    assert f"recorded sizes: {graph_sizes(8)}\n" in text
    assert f"{len(decodes)} decode steps, {sum(decodes)} tokens, and {padding} of padding" in text


@pytest.fixture(scope="module")
def sweep():
    workloads = ["equal", "azure-conv", "azure-code", "longtail"]
    return claims.utilisation_sweep(BOOK, workloads=workloads, batch_limits=[32], strategies=("static", "continuous"))


def test_utilisation_by_every_definition(sweep):
    """2.6: each verdict as printed; the range holds in one place, and one definition points the wrong way."""
    text = flat(output("7.2", "claim-2.6"))
    verdicts = claims.utilisation_verdicts(sweep)
    for v in verdicts:
        ranges = " ".join(f"{100 * low:.1f}–{100 * high:.1f} %" for low, high in (v.static, v.other))
        where = ", ".join(place.split(",")[0] for place in v.holds_in) or "–"
        assert f"{claims.continuous.SWEEP_DEFINITIONS[v.definition]} {ranges} {where}" in text
    assert {v.definition: v.holds_in for v in verdicts if v.holds_in} == {"useful_slot_share": ("longtail, 32 slots",)}
    (by_steps,) = [v for v in verdicts if v.definition == "slot_occupancy"]
    assert 0.095 < by_steps.static[0] < 0.1 and "longtail, 32 slots" in by_steps.other_in_range  # missed by a hair
    rows = {(row.workload, row.strategy): row for row in sweep if row.window == "backlog"}
    static, continuous = rows["azure-code", "static"], rows["azure-code", "continuous"]
    for name, share in (("useful slots, by time", "useful_slot_share"), ("model FLOPs utilisation", "mfu")):
        cells = [100 * row.shares[share] for row in (static, continuous)]
        assert f"{name} static {cells[0]:.0f} % continuous {cells[1]:.0f} %" in text
    rates = static.output_tokens_per_s, continuous.output_tokens_per_s
    assert f"output tokens per second static {rates[0]:.0f} continuous {rates[1]:.0f}" in text
    assert continuous.shares["useful_slot_share"] < static.shares["useful_slot_share"] and rates[1] > 2 * rates[0]


def test_the_reader_s_own_machine_is_faster_with_continuous_batching():
    """2.6, measured: fewer steps, more tokens a second, and the quotient that is printed."""
    text = output("7.2", "claim-2.6")
    rates = {name: numbers(line_of(text, f"  {name} ", "output tokens/s in")) for name in ("static", "continuous")}
    assert rates["continuous"][0] > rates["static"][0] and rates["continuous"][1] < 0.8 * rates["static"][1]
    (ratio,) = numbers(line_of(text, "continuous makes"))
    assert ratio == pytest.approx(rates["continuous"][0] / rates["static"][0], abs=0.06)


def test_a_busy_share_tells_static_and_continuous_not_apart(sweep):
    """M.3"""
    text = output("7.2", "claim-M.3")
    rows = {(row.workload, row.strategy): row for row in sweep if row.window == "backlog"}
    static, continuous = rows["longtail", "static"], rows["longtail", "continuous"]
    for name, words in claims.continuous.SWEEP_DEFINITIONS.items():
        wanted = [round(100 * row.shares[name], 1) for row in (static, continuous)]
        assert numbers(line_of(text, words).removeprefix(words)) == wanted
    assert numbers(line_of(text, "time inside steps")) == [100, 100]
    rates = [round(row.output_tokens_per_s) for row in (static, continuous)]
    assert numbers(line_of(text, "output tokens per second")) == rates and rates[1] > 5 * rates[0]


def test_p99_shrinks_and_p50_by_more():
    """2.7"""
    text = output("7.2", "claim-2.7")
    tails = claims.tail_latency(BOOK, request_rate=0.5)
    for name, t in tails.items():
        wanted = [t.output_tokens_per_s, t.p50_s, t.p99_s, t.spread, 1000 * t.per_token_p99_s]
        digits = (0, 1, 1, 1, 0)
        assert numbers(line_of(text, f"{name} ")) == [round(value, n) for value, n in zip(wanted, digits)]
    static, continuous = tails["static"], tails["continuous"]
    assert f"p50 is {static.p50_s / continuous.p50_s:.1f} × shorter.\n" in text
    assert f"p99 is {static.p99_s / continuous.p99_s:.1f} × shorter.\n" in text
    assert static.p50_s / continuous.p50_s > 1.5 * static.p99_s / continuous.p99_s
    assert continuous.p99_s < 2 / 3 * static.p99_s  # by more than a third
    assert continuous.output_tokens_per_s == pytest.approx(static.output_tokens_per_s, rel=0.02)
    assert continuous.spread > static.spread and continuous.per_token_p99_s < 0.1 * static.per_token_p99_s


def test_goodput_has_its_peak_before_throughput():
    """M.1"""
    text = output("7.2", "claim-M.1")
    kept = {}
    for rate in (1.0, 4.0, 8.0):
        chats = profile("azure-conv", 120, request_rate=rate, seed=0).fit_to_context(8_192)
        options = {"max_num_seqs": 32, "max_num_batched_tokens": 2_048}
        for name, timeline in run_simulation(chats, BOOK, strategies=["static", "continuous"], **options).items():
            s, good = summarize(timeline), goodput(timeline, ttft_ms=1000, tpot_ms=60)
            cells = f"{s['output_tokens_per_s']:.0f} {s['requests_per_s']:.2f} {good['goodput_per_s']:.2f}"
            line = flat(line_of(text, f"{rate:2.0f} come a second {name} "))
            assert line == f"{rate:.0f} come a second {name} {cells} {100 * good['good_share']:.0f} %"
            assert s["requests_per_s"] < rate  # counted to the end of the last answer
            kept[rate, name] = s["output_tokens_per_s"], good["goodput_per_s"]
    speed, goods = zip(*(kept[rate, "continuous"] for rate in (1.0, 4.0, 8.0)))
    assert list(speed) == sorted(speed) and goods[1] == max(goods)
    assert kept[1.0, "static"][0] > 0.85 * speed[0] and kept[1.0, "static"][1] < 0.1 * goods[0]


def test_what_the_server_keeps_of_a_request(bard):
    """2.9: the table of the running engine, step by step."""
    lines = output("7.2", "claim-2.9").splitlines()
    options = {"max_num_seqs": 2, "max_model_len": 64, "block_size": 4}
    engine = Engine.from_model(bard, strategy="continuous", **options)
    trio = {"ROMEO": 5, "BRUTUS": 3, "PUCK": 4}
    known = [engine.add(f"{name}:", SamplingParams(max_tokens=n), request_id=name) for name, n in trio.items()]
    count = 0
    while engine.has_work():
        engine.step()
        count += 1
        at = lines.index(f"step {count}") + 1
        for line, r in zip(lines[at : at + 3], known):
            blocks = len(engine.scheduler.kv.table(r.request_id)) if r.slot is not None else 0
            slot = [] if r.slot is None else [r.slot]
            counts = [*slot, r.num_prompt_tokens, r.num_computed_tokens, r.num_output_tokens, blocks]
            name, status, *_ = line.split()
            assert (name, status) == (r.request_id, r.status.value)
            assert numbers(line.split("'")[0].split('"')[0]) == counts
            assert f"   {r.finish_reason.value if r.finish_reason else '–':8}" in line
    assert f"step {count + 1}" not in lines
    assert [r.num_tokens - r.num_computed_tokens for r in known] == [1, 1, 1]  # always one behind
    assert [numbers(line)[0] for line in lines if line.startswith("num_output_tokens")] == [trio["PUCK"]]


def test_a_request_ends_in_four_ways(bard):
    """2.10: each of them run, and all memory comes back."""
    text = output("7.2", "claim-2.10")
    engine = Engine.from_model(bard, strategy="continuous", max_num_seqs=4, max_model_len=256)
    asked = {
        "end of sequence": ("OPHELIA:", SamplingParams(max_tokens=100), "stop"),
        "token limit": ("BRUTUS:", SamplingParams(max_tokens=12), "length"),
        "stop string": ("FALSTAFF:", SamplingParams(max_tokens=100, stop=("pound",)), "stop ('pound')"),
        "client is gone": ("ROMEO:", SamplingParams(max_tokens=100), "abort"),
    }
    for way, (prompt, params, reason) in asked.items():
        request = engine.add(prompt, params, request_id=way)
        while not request.finished:
            engine.step()
            if way == "client is gone" and request.num_output_tokens == 6:
                assert engine.abort(way)
        line = line_of(text, f"{way} ")
        assert f"{reason} " in line and f"{request.num_output_tokens:3} tokens" in line
        assert line.rstrip().endswith(" ".join(request.output_text.split())[-30:])
        assert "pound" not in request.output_text
    assert engine.scheduler.kv.num_free_blocks == engine.scheduler.kv.num_blocks
    assert "All KV blocks are free again: True" in text


def test_admission_can_be_too_timid_and_too_eager(bard, prompts):
    """2.8: idle slots and promised memory on one side, preemptions and work done twice on the other."""
    text = output("7.2", "claim-2.8")
    traffic = {
        "chat": ("uniform:prompt_min=100,prompt_max=300,output_min=20,output_max=400", 1_000, 16_000),
        "documents": ("uniform:prompt_min=1500,prompt_max=2500,output_min=300,output_max=400", 400, 32_000),
    }
    policies = make_variants(["continuous"], {"admission": ["worst-case", "optimistic", "preempt"]})
    found = {}
    for kind, (spec, max_tokens, room) in traffic.items():
        crowd = load_workload(spec, num_requests=96, seed=1)
        options = {"kv_cache_tokens": room, "max_num_seqs": 64, "max_num_batched_tokens": 4_096}
        runs = run_simulation(crowd, BOOK, variants=policies, declared_max_tokens=max_tokens, **options)
        for policy, timeline in runs.items():
            s = summarize(timeline)
            pause = max(max(itl(record)) for record in timeline.requests.values())
            found[kind, policy] = s["output_tokens_per_s"], pause, s["num_preemptions"], s["lost_share"]
            cells = f"{s['output_tokens_per_s']:.0f} {100 * s['slot_occupancy']:.0f} % {s['num_preemptions']}"
            cells += f" {100 * s['lost_share']:.0f} % {pause:.1f}"
            assert flat(line_of(text, f"{kind} ", f"{policy} ")) == f"{kind} {policy} {cells}"
    speed = {key: row[0] for key, row in found.items()}
    assert speed["chat", "worst-case"] < speed["chat", "optimistic"] < speed["chat", "preempt"]  # too timid
    assert speed["chat", "preempt"] > 1.3 * speed["chat", "optimistic"] and found["chat", "preempt"][3] > 0.2  # pays
    documents = [found["documents", policy] for policy in ("worst-case", "optimistic", "preempt")]
    assert max(row[0] for row in documents) < 1.1 * documents[0][0]  # next to nothing
    assert documents[2][1] > 3 * documents[0][1] > 3 and documents[0][2] == 0 < documents[2][2]  # and pauses of seconds
    assert all(row[2] == 0 for (_, policy), row in found.items() if policy == "worst-case")

    engine = Engine.from_model(bard, strategy="continuous", max_num_seqs=8, max_model_len=128, kv_cache_tokens=160)
    run = engine.run(requests(prompts))
    s = summarize(run)
    assert s["num_preemptions"] > 0
    assert f"{s['num_preemptions']} preemptions, {s['num_lost_tokens']} tokens computed again" in text
    roomy = Engine.from_model(bard, strategy="continuous", max_num_seqs=8).run(requests(prompts))
    assert [r.output_hash for r in run.requests.values()] == [r.output_hash for r in roomy.requests.values()]
    assert "the same answers as ever: True" in text


def test_priorities_serve_the_urgent_first_and_cost_something():
    """2.11"""
    text = output("7.2", "claim-2.11")
    classes = load_workload("classes", num_requests=200, request_rate=12.0, seed=1)
    orders = make_variants(["continuous"], {"ordering": ["fcfs", "priority"]})
    runs = run_simulation(classes, BOOK, variants=orders, max_num_seqs=16)
    metrics = {name: summarize(timeline) for name, timeline in runs.items()}
    for name, s in metrics.items():
        cells = [
            f"{group} {g['ttft_ms']['p50'] / 1000:.2f} {g['ttft_ms']['p99'] / 1000:.2f}"
            for group, g in s["classes"].items()
        ]
        line = flat(line_of(text, f"{name} ", " paid "))
        assert line == f"{name} {' '.join(cells)} {s['output_tokens_per_s']:.0f} tokens/s"
    waits = [g["ttft_ms"]["p50"] for g in metrics["priority"]["classes"].values()]
    assert waits == sorted(waits) and waits[1] < 0.1 * metrics["fcfs"]["classes"]["interactive"]["ttft_ms"]["p50"]
    assert metrics["priority"]["output_tokens_per_s"] < metrics["fcfs"]["output_tokens_per_s"]


def test_a_flood_drowns_its_sender_alone():
    """2.11: fair share among tenants, and a rate limit at the door."""
    text = output("7.2", "claim-2.11")
    flood = load_workload("tenants:flood=10,num_tenants=4", num_requests=200, request_rate=16.0, seed=1)
    orders = make_variants(["continuous"], {"ordering": ["fcfs", "fair-share"]})
    runs = run_simulation(flood, BOOK, variants=orders, max_num_seqs=16)
    limits = Limits(tenants={"tenant-0": TenantLimit(requests_per_s=4.0, burst_requests=8)})
    guarded = run_simulation(flood, BOOK, strategies=["continuous"], max_num_seqs=16, limits=limits)
    runs["rate limit"] = guarded["continuous"]
    waits = {}
    for name, timeline in runs.items():
        tenants = summarize(timeline)["tenants"]
        first, others = tenants.pop("tenant-0"), list(tenants.values())
        n = sum(g["n"] for g in others)
        typical = sum(g["n"] * g["ttft_ms"]["p50"] for g in others) / n
        cells = f"{first['n']} {first['num_refused']} {first['ttft_ms']['p50']:.0f} ms {n} {typical:.0f} ms"
        assert flat(line_of(text, f"{name} ", " ms")) == f"{name} {cells}"
        waits[name] = first["ttft_ms"]["p50"], typical
    assert waits["fair-share"][1] < 0.1 * waits["fcfs"][1] and waits["fair-share"][0] > waits["fcfs"][0]
    refused = [r.error for r in runs["rate limit"].requests.values() if r.finish_reason == "refused"]
    assert refused and f"What a refused client reads: {refused[0]}" in text


def test_nobody_starves_with_ageing():
    """2.11: without, the wait is as long as the stream; with ageing it is bounded, whatever comes."""
    text = output("7.2", "claim-2.11")
    ends = {}
    for seconds in (30, 60):
        rows = [WorkloadRequest(f"paid-{i}", 0.15 * i, 200, 50, priority=0) for i in range(int(seconds / 0.15))]
        rows.append(WorkloadRequest("background", 1.0, 200, 50, priority=3))
        stream = Workload("a stream", tuple(sorted(rows, key=lambda row: row.arrival_time)), "Made up.")
        for ageing in (1e9, 5.0):
            options = {"ordering": "priority", "max_num_seqs": 4, "ageing_s": ageing}
            run = run_simulation(stream, BOOK, strategies=["continuous"], **options)["continuous"]
            ends[seconds, ageing] = run.requests["background"].finish_time
        wanted = f"{seconds} s {ends[seconds, 1e9]:.1f} s {ends[seconds, 5.0]:.1f} s"
        assert wanted in map(flat, text.splitlines())
    assert ends[60, 1e9] > 1.9 * ends[30, 1e9] > 57
    assert ends[60, 5.0] == ends[30, 5.0] < 30

    at_once = Workload("all", tuple(WorkloadRequest(f"p{i}", 0.0, 200, 50) for i in range(400)), "Made up.")
    rate = summarize(run_simulation(at_once, BOOK, strategies=["continuous"], max_num_seqs=4)["continuous"])
    asked = f"{1 / 0.15:.1f} paid requests come a second, and four slots serve {rate['requests_per_s']:.1f} a second."
    assert asked in printed("7.2", "Nobody starves")
    (until,) = numbers(line_of(text, "To serve all that come before"))
    assert until == round(16 / 0.15 / rate["requests_per_s"], 1)
    assert 0 < ends[30, 5.0] - until < 3 and rate["requests_per_s"] < 1 / 0.15  # then it runs; and a backlog grows


def test_at_low_traffic_nobody_fills_the_slot():
    """2.12"""
    text = output("7.2", "claim-2.12")
    points = claims.low_traffic(BOOK, request_rates=(0.005, 0.5, 2.0, 8.0))
    for p in points:
        wanted = f"{p.request_rate:.3f} {p.requests_in_step['continuous']:.1f}"
        for ratio in (p.throughput_ratio, p.latency_ratio):
            wanted += f" {ratio('static'):.2f} {ratio('dynamic'):.2f}"
        assert wanted in map(flat, text.splitlines())
    ratios = [p.throughput_ratio("dynamic") for p in points]
    assert ratios[0] == pytest.approx(1, abs=0.01) and all(b > a - 0.01 for a, b in pairwise(ratios)) and ratios[-1] > 2


def test_two_models_take_two_engines(bard):
    """2.13: the router's answers are those of each engine alone; one model's four requests would share their steps."""
    text = output("7.2", "claim-2.13")
    engine = Engine.from_model(bard, strategy="continuous", max_num_seqs=4, max_model_len=64)
    for prompt in ("ROMEO:", "PUCK:") * 2:
        engine.add(prompt, SamplingParams(max_tokens=12))
    shared = list(engine.requests.values())
    while engine.has_work():
        engine.step()
    for request, prompt in zip(shared, ("ROMEO:", "PUCK:")):
        assert repr(" ".join(request.output_text.split())[:70]) in line_of(text, "bard ", prompt)
    monkeys = [line_of(text, "monkeys ", prompt).split("'", 1)[1] for prompt in ("ROMEO:", "PUCK:")]
    assert not set(monkeys) & {line_of(text, "bard ", prompt).split("'", 1)[1] for prompt in ("ROMEO:", "PUCK:")}
    assert numbers(line_of(text, "steps of each engine")) == [len(engine.timeline.steps)] * 2
