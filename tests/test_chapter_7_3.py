"""Chapter 7.3: what its cells printed is computed here again, and what its prose says of that holds."""

import ast
import json
import random
import re
import subprocess
import sys
from collections import Counter

import pytest
from book import ROOT, notebook, output

from minibatcher import Request, SamplingParams, claims
from minibatcher.claims import machine
from minibatcher.metrics import summarize
from minibatcher.simulate import run_simulation, simulated_engine
from minibatcher.utilisation import work_of
from minibatcher.workload import load_workload

CHAPTER = "7.3"
BOOK = machine()


def cells_between(first, last=None):
    """The sources of the code cells from the heading `first` to the heading `last` or the end."""
    found, inside = [], False
    for cell in notebook(CHAPTER)["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            headings = re.findall(r"^#+ (.+)$", source, re.MULTILINE)
            inside = (inside or first in headings) and last not in headings
        elif inside:
            found.append(source)
    assert found
    return found


def defined(*names, **namespace):
    """Functions of the chapter's cells, without running anything else in them."""
    sources = ["".join(cell["source"]) for cell in notebook(CHAPTER)["cells"] if cell["cell_type"] == "code"]
    for source in sources:
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef) and node.name in names:
                exec(compile(ast.Module([node], []), "cell", "exec"), namespace)
    return [namespace[name] for name in names]


def rows_of(text, *beginnings):
    """The numbers in the line that begins with each of these words."""
    lines = text.splitlines()
    found = [next(line for line in lines if line.startswith(words)) for words in beginnings]
    return [
        [float(number.replace(",", "")) for number in re.findall(r"-?\d[\d,]*\.?\d*", line[len(words) :])]
        for line, words in zip(found, beginnings)
    ]


def readers_and_newcomer(strategy, *, readers=8, prompt, steps=40, outputs=120, **knobs):
    """A run in virtual time: readers with short prompts, and after `steps` a newcomer. (timeline, step it came at)"""
    engine = simulated_engine(BOOK, strategy, max_model_len=4_096, max_num_seqs=readers + 1, **knobs)
    for i in range(readers):
        engine.add([1] * 4, SamplingParams(max_tokens=outputs, ignore_eos=True), request_id=f"r{i}")
    for _ in range(steps):
        engine.step()
    came = len(engine.timeline.steps)
    engine.add([1] * prompt, SamplingParams(max_tokens=4, ignore_eos=True), request_id="newcomer")
    while engine.has_work():
        engine.step()
    return engine.timeline, came


@pytest.fixture(scope="module")
def stalls():
    return claims.prefill_stall(BOOK, num_decodes=30, prompt_tokens=4_000)


def test_a_long_prompt_stalls_running_decodes(stalls):
    """3.1: measured, and in virtual time."""
    text = output(CHAPTER, "claim-3.1")
    whole, chunks = rows_of(text, "the whole prompt in one step", "in chunks, 128 tokens in a step")
    assert whole[1] > 10 * whole[0]
    assert chunks[1] < whole[1] / 2
    for words, policy in (("its prompt at once, whole", "whole"), ("when somebody has ended", "late")):
        s = stalls[policy]
        (found,) = rows_of(text, words)
        assert found == [s.stalled, round(1e3 * s.worst_itl_s), round(s.spike, 1), round(1e3 * s.ttft_s)]
    assert stalls["whole"].stalled == 30 and stalls["late"].stalled == 0
    assert stalls["late"].ttft_s > 5 * stalls["whole"].ttft_s  # somebody has to wait


def test_a_chunk_shares_its_step_with_every_decode(stalls):
    """3.2"""
    text = output(CHAPTER, "claim-3.2")
    listed = Counter()
    for strategy, budget in (("continuous", 2_048), ("chunked", 128)):
        timeline, came = readers_and_newcomer(strategy, prompt=1_500, max_num_batched_tokens=budget)
        for step in timeline.steps[came:]:
            states = Counter(row.state.value for row in step.rows)
            prefill = sum(row.num_tokens for row in step.rows if row.state.value == "prefill")
            if prefill:
                listed[f"{states['decode']} decodes, {prefill:,} tokens of prompts, {states['stalled']} stalled"] += 1
    assert [*listed.values()] == [1, 12, 1]
    assert all(f"{count:3} × {what}\n" in text for what, count in listed.items())
    assert "the same, token for token" in text
    for policy in ("whole", "chunk 2048", "chunk 512", "chunk 128"):
        s = stalls[policy]
        found = next(row for row in rows_of(text, f"{policy} ") if row)
        assert found == [s.prefill_steps, s.stalled, round(1e3 * s.worst_itl_s), round(1e3 * s.ttft_s)]
    assert stalls["chunk 512"].prefill_steps == -(-4_000 // (512 - 30)) == 9 > 4_000 / 512  # the guess


@pytest.mark.parametrize("seed", range(8))
def test_the_toy_planner_is_the_scheduler(seed):
    """3.2: the few lines of the notebook plan what the package plans, until the newcomer decodes too."""
    dice = random.Random(seed)
    planners = dict(zip(("continuous", "chunked"), defined("continuous_plan", "chunked_plan")))
    readers, prompt, budget = dice.randint(1, 5), dice.randint(2, 60), dice.randint(2, 12)
    for strategy, planner in planners.items():
        knobs = {"max_num_batched_tokens": budget if strategy == "chunked" else 4_096}
        timeline, came = readers_and_newcomer(strategy, readers=readers, prompt=prompt, steps=20, **knobs)
        behind = {f"r{i}": 1 for i in range(readers)} | {"newcomer": prompt}
        for step in timeline.steps[came : came + 40]:
            plan = planner(behind, budget) if strategy == "chunked" else planner(behind)
            assert plan == {row.request_id: row.num_tokens for row in step.rows if row.num_tokens}
            for name, n in plan.items():
                behind[name] = max(behind[name] - n, 1)
            if behind["newcomer"] == 1:
                break
        assert "newcomer" in plan or budget <= readers


def test_a_budget_of_the_readers_alone_starves_the_newcomer(capsys):
    """3.2: what "Change something" asks for, by the notebook's own functions."""
    behind = {"r0": 1, "r1": 1, "r2": 1, "newcomer": 20}
    plan, play = defined("chunked_plan", "play", behind=behind)

    def played(num_steps, budget):
        play(plan, num_steps, budget=budget)
        lines = capsys.readouterr().out.splitlines()[2:]
        return [(line.split()[4], int(line.split()[5])) for line in lines]

    assert played(21, 4) == [("1", max(20 - i, 1)) for i in range(21)]
    assert set(played(21, 3)) == {("-", 20)}
    play(plan, 6, budget=4)
    table = capsys.readouterr().out
    cells = notebook(CHAPTER)["cells"]
    text = "".join("".join(out.get("text", "")) for cell in cells for out in cell.get("outputs", ()))
    assert table in text


def test_the_budget_trades_ttft_against_itl():
    """3.3"""
    text = output(CHAPTER, "claim-3.3")
    points = claims.budget_sweep(BOOK, budgets=(128, 512, 2_048, 8_192), request_rate=2.0, num_requests=200)
    for p in points:
        line = (
            f"{p.max_num_batched_tokens:6,}{p.output_tokens_per_s:11.0f}{1e3 * p.ttft_p50_s:15.0f}"
            f"{1e3 * p.ttft_p99_s:15.0f}{1e3 * p.itl_p50_s:14.1f}{1e3 * p.longest_step_s:19.0f}"
        )
        assert f"{line}\n" in text
        second = f"{p.max_num_batched_tokens:6,}{1e3 * p.itl_p99_s:14.0f}{1e3 * p.longest_step_s:19.0f}"
        assert f"{second}\n" in text
    *_, large, huge = points
    assert huge.itl_p99_s < large.itl_p99_s and huge.longest_step_s > 2 * large.longest_step_s
    assert large.itl_p99_s > 4 * points[0].itl_p99_s  # "more than fourfold"
    measured = text[text.index("measured here") :].splitlines()[1:4]
    measured = [[float(word.replace(",", "")) for word in line.split()] for line in measured]
    assert [row[0] for row in measured] == [32, 128, 512]
    assert [row[1] for row in measured] == [-(-1_500 // (budget - 8)) for budget in (32, 128, 512)]  # steps
    fitting = [p.max_num_batched_tokens for p in points if p.longest_step_s <= 0.05]
    line = f"No gap above 50 ms: of the budgets in the table, {max(fitting)} is the largest that fits.\n"
    assert line in output(CHAPTER, "nbval-check-output")
    assert measured[0][2] < measured[-1][2]  # the readers' gaps


def test_decodes_go_first():
    """3.3: with prompts first a budget helps nobody."""
    text = output(CHAPTER, "nbval-check-output")
    for words, first, expected in (("prompts first", True, (6, 6)), ("decodes first", False, (0, 7))):
        timeline, came = readers_and_newcomer(
            "chunked", readers=2, prompt=96, steps=4, outputs=16, max_num_batched_tokens=16, prefill_first=first
        )
        states = [{(row.request_id, row.state.value) for row in step.rows} for step in timeline.steps[came:]]
        stalled = sum(any(state == "stalled" for _, state in rows) for rows in states)
        prompt = sum(("newcomer", "prefill") in rows for rows in states)
        assert (stalled, prompt) == expected
        line = f"{words}: {stalled} steps with stalled readers, {prompt} steps for the newcomer's prompt\n"
        assert line in text


def test_a_chunk_lifts_the_intensity_of_a_step():
    """3.5"""
    text, sizes = output(CHAPTER, "claim-3.5"), (0, 64, 98, 128, 256, 512, 1_024)
    shared = {s.chunk_tokens: s for s in claims.shared_stream(BOOK, sizes[1:])}
    steps, saved_ms = claims.mixed_intensity(BOOK, sizes, num_decodes=30, context_tokens=1_000), {}
    assert f"the ridge is at {steps[0].ridge:.0f} FLOPs a byte" in text
    for m in steps:
        c, bound = m.prefill_tokens, "compute" if m.compute_bound else "bandwidth"
        line = (
            f"{c:5,}{m.bytes_read / 1e9:10.1f}{m.flops / 1e12:9.1f}{m.intensity:15.0f}   {bound:10}"
            f"{1e3 * m.seconds:13.1f}"
        )
        if c:
            s = shared[c]
            saved_ms[c] = 1e3 * (s.decodes_alone_s + s.chunk_alone_s - s.together_s)
            line += f"{saved_ms[c]:14.1f} ms{100 * s.saved_share:6.0f} %"
        assert f"{line}\n" in text
    # "nearly a whole reading of the weights, and what a step costs by itself"; the first of these shrinks
    weights = 1e3 * BOOK.model.linear_bytes(BOOK.dtype) / (BOOK.device.bandwidth * 4 * BOOK.efficiency.bandwidth)
    fixed = 1e3 * BOOK.efficiency.step_s + 1e3 * 2 * BOOK.model.num_layers * 10e-6  # and two all-reduces a layer
    assert [saved_ms[c] - fixed for c in (64, 98)] == pytest.approx([weights] * 2, rel=0.1)
    assert all(saved_ms[c] - fixed < 0.7 * weights for c in (256, 512, 1_024))
    # "up to there the ride is nearly free. The next token opens a second tile."
    full, over = claims.mixed_intensity(BOOK, (98, 99), num_decodes=30, context_tokens=1_000)
    assert BOOK.efficiency.tile_tokens == 98 + 30
    assert full.seconds < 1.12 * steps[0].seconds and over.seconds > 1.15 * full.seconds
    assert steps[-1].bytes_read < 1.01 * steps[0].bytes_read and steps[-1].flops > 10 * steps[0].flops
    assert [m.compute_bound for m in steps] == [False] * 5 + [True] * 2
    assert not steps[4].compute_bound and steps[4].seconds > 1.5 * steps[0].seconds  # "real kernels turn earlier"


def test_a_split_wins_until_its_half_is_full():
    """3.6"""
    text = output(CHAPTER, "claim-3.6")
    served = claims.disaggregation(machine(num_gpus=8), request_rates=(4.0, 14.0, 16.0), num_requests=150)
    good = {}
    for s in served:
        if s.system.startswith("two"):
            continue
        good[s.request_rate, s.system] = s.good_share
        line = (
            f"{s.system:26}{s.request_rate:11.0f}{1e3 * s.ttft_p99_s:15.0f}{1e3 * s.itl_p99_s:14.0f}"
            f"{100 * s.good_share:12.0f} %"
        )
        assert line in text
    best = {rate: max((k for k in good if k[0] == rate), key=good.get)[1] for rate in (14.0, 16.0)}
    assert best == {14.0: "split", 16.0: "mixed, budget 512"}
    assert all(share > 0.97 for (rate, _), share in good.items() if rate == 4.0)


def test_one_launch_serves_a_chunk_and_decodes():
    """3.4: each rung was run and is right; a mixed step takes one launch a layer, and answers stay the same."""
    text = output(CHAPTER, "claim-3.4")
    errors = dict(re.findall(r"^(naive|tiled|paged|ragged), .*largest error (\S+)$", text, re.MULTILINE))
    assert list(errors) == ["naive", "tiled", "paged", "ragged"]
    assert all(float(error) < 2e-6 for error in errors.values())
    timeline = simulated_engine(BOOK, "chunked", max_model_len=64, max_num_seqs=3, max_num_batched_tokens=12).run(
        [
            Request(name, [1] * n, SamplingParams(max_tokens=5, ignore_eos=True))
            for name, n in (("r0", 3), ("r1", 6), ("newcomer", 22))
        ]
    )
    assert {row.state.value for row in timeline.steps[1].rows} == {"prefill", "decode"}
    for step in timeline.steps:
        launches = 6 * any(row.num_tokens > 1 for row in step.rows)
        rows = ", ".join(f"{row.request_id} {row.num_tokens} ({row.state.value})" for row in step.rows)
        assert f"  {launches} launches: {rows}\n" in text
    assert "in a model of 6 layers" in text and "the same, token for token" in text


def test_the_reference_of_the_chapter_is_attention():
    """3.4: what the kernels are held against agrees with what the package's own tests use."""
    torch = pytest.importorskip("torch")
    from minibatcher.kernels.cases import Shape, largest_error, random_case
    from minibatcher.kernels.cases import reference as trusted

    attend, gather = defined("reference", "gathered", torch=torch)
    for seed, (queries, contexts) in enumerate((((9, 1, 1, 1), (25, 40, 17, 8)), ((4,), (4,)), ((1, 7), (1, 30)))):
        case = random_case(Shape(queries, contexts, 6, 2, 32, 8), torch.float32, "cpu", seed)
        parts = [
            attend(q, gather(case.k_cache, table, m), gather(case.v_cache, table, m), case.scale)
            for q, table, m in zip(case.q.split(queries), case.block_tables, contexts)
        ]
        assert largest_error(torch.cat(parts), trusted(case)) < 1e-12


def test_without_triton_the_kernels_are_shown_and_not_run():
    """As on macOS: the ladder's cells run, say so, and the engine goes on with PyTorch's attention."""
    pytest.importorskip("torch")
    cells = cells_between("Attention for a mixed step: a ladder", "What remains: two phases, one machine")
    lines = [
        "import sys, json",
        "sys.modules['triton'] = None",
        "import torch",
        "from minibatcher import Engine, SamplingParams, load_model",
        "from minibatcher.here import Here",
        "import matplotlib; matplotlib.use('agg'); import matplotlib.pyplot as plt",
        "from minibatcher.labkit import predict",
        "from minibatcher.viz.palette import OKABE_ITO",
        "show = lambda figure, alt: None",
        "here, loaded = Here('cpu', 'a test'), load_model('bard', device='cpu')",
        "essay = loaded.tokenizer.encode('<|bos|>To be, or not to be: that is the question. ' * 10)",
        "shown = []",
        "show_source = shown.append",
        "show_diff = lambda *both, names: shown.extend(both)",
        "for cell in json.load(sys.stdin): exec(cell, globals())",
        "assert len(shown) > 7 and all('tl.' in text or '_kernel[(' in text for text in shown), shown",
        "assert sum('_kernel[(' in text for text in shown) == 2",
    ]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        input=json.dumps(cells),
        capture_output=True,
        text=True,
        encoding="utf-8",
        cwd=ROOT,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Triton is not installed" in done.stdout
    assert done.stdout.count("not run here; the reference gives") == 4
    assert re.search(r"does not serve the engine's chunks: .*Triton is not installed", done.stdout)


def test_the_tiles_of_the_worked_example():
    """3.4: the rule in Python gives each query of each request to one tile."""
    cell = next(source for source in cells_between("Fourth rung: all requests at once") if "first_tile" in source)
    printed = []
    exec(cell, {"print": printed.append})
    tiles = [re.match(r"tile (\d+): request (\d), (?:its queries \[([\d, ]+)\]|nothing to do)$", x) for x in printed]
    owned = [(int(m[2]), int(q)) for m in tiles for q in (m[3] or "").split(", ") if q]
    assert owned == [(r, q) for r, n in enumerate([3, 1, 9]) for q in range(n)]
    text = "".join("".join(out.get("text", "")) for c in notebook(CHAPTER)["cells"] for out in c.get("outputs", ()))
    assert "\n".join(printed) in text


def test_what_a_load_is_worth():
    """3.4: the counted FLOPs a byte of keys and values loaded, query by query and key by key."""
    from minibatcher.hardware import device

    (loads,) = defined("key_loads")
    n, tile, dim = 1_000, 64, 32
    flops = sum(4 * dim for query in range(n) for _ in range(query + 1))
    tiled_bytes = sum(2 * 2 * dim for first in range(0, n, tile) for _ in range(min(first + tile, n)))
    assert tiled_bytes == 4 * dim * loads(n, tile) and flops == 4 * dim * loads(n, 1)
    text = output(CHAPTER, "nbval-check-output")
    counted = {"naive": 1, "tiles of 64 queries": flops / tiled_bytes, "a decode, 8 heads of queries share": 8}
    for name, worth in counted.items():
        assert f"{name:36}{worth:4.0f} FLOPs a byte of keys and values loaded\n" in text
    assert f"{'ridge of an H100':36}{device('h100').ridge('float16'):4.0f} FLOPs a byte of device memory\n" in text


def test_how_far_the_simulator_was_off():
    """The errors that the chapter prints before its 70B table, and its words on them."""
    from minibatcher.calibrate import shipped_report, shipped_source

    text = output(CHAPTER, "nbval-check-output")
    rows = [{(r.part, r.metric): r for r in rows} for rows in shipped_report().values()]
    words = {
        "first arrival to last token, s": ("whole run", "makespan_s"),
        "output tokens/s": ("whole run", "output_tokens_per_s"),
        "second half: TTFT p50, ms": ("hold-out", "ttft_ms p50"),
        "second half: TTFT p99, ms": ("hold-out", "ttft_ms p99"),
        "second half: TPOT p50, ms": ("hold-out", "tpot_ms p50"),
        "second half: TPOT p99, ms": ("hold-out", "tpot_ms p99"),
    }
    for name, key in words.items():
        off = "".join(f"{100 * found[key].error:+11.1f} %" for found in rows)
        assert f"{name:32}{rows[1][key].measured:9,.0f}{off}\n" in text
    assert shipped_source() in " ".join(text.split())
    unfitted, fitted = ([abs(found[key].error) for key in words.values()] for found in rows)
    assert min(unfitted) > 0.19 and max(unfitted) < 0.35  # "by a fifth to a third"
    assert sorted(fitted)[-2] < 0.05 and fitted[-1] == max(fitted) < 0.15


def test_the_70b_model_gains_as_the_chapter_says():
    from minibatcher.calibrate import shipped_cost
    from minibatcher.labkit import running_comparison

    text = output(CHAPTER, "nbval-check-output")
    cost = machine(efficiency=shipped_cost().efficiency)
    runs = running_comparison(CHAPTER, cost=cost, variants={n: _variant(n) for n in ("continuous", "chunked")})
    old, new = (summarize(run) for run in runs.values())
    for key, words in (("itl_ms", "ITL"), ("ttft_ms", "TTFT")):
        a, b = old[key]["p99"], new[key]["p99"]
        assert a > 2 * b
        assert f"{words} p99: continuous {a:,.0f} ms, chunked {b:,.0f} ms, {a / b:.1f} × less" in text


def _variant(name):
    return {"strategy": name} | ({} if name == "chunked" else {"max_num_batched_tokens": 8_192})


def test_where_it_loses():
    """A prompt alone takes longer in chunks, and with short prompts a cut changes nothing."""
    text = output(CHAPTER, "nbval-check-output")
    times = []
    for budget in (8_192, 2_048, 512, 128, 32):
        engine = simulated_engine(BOOK, "chunked", max_model_len=8_192, max_num_seqs=1, max_num_batched_tokens=budget)
        alone = engine.run([Request("newcomer", [1] * 4_000, SamplingParams(max_tokens=1, ignore_eos=True))])
        weights = len(alone.steps) * BOOK.model.linear_bytes(BOOK.dtype)
        read = sum(work_of(step, alone.requests).kv_tokens_read for step in alone.steps)
        read *= BOOK.model.kv_bytes_per_token(BOOK.dtype)
        line = f"{budget:32,}{len(alone.steps):8}{weights / 1e12:19.2f}{read / 1e12:20.3f}{1e3 * alone.duration:11.0f}"
        assert f"{line}\n" in text
        assert read < 0.01 * weights  # "hardly count"
        times.append(alone.duration)
    assert times == sorted(times) and times[-1] > 8 * times[0]
    assert 1.2 < times[2] / times[0] < 1.3  # "a quarter longer"

    chats = load_workload("uniform:prompt_min=16,prompt_max=64,output_min=64,output_max=256", num_requests=100, seed=1)
    chats, rows = chats.at_rate(4.0, seed=1), []
    for name, budget in (("continuous", 8_192), ("chunked", 512), ("chunked", 8_192)):
        s = summarize(
            run_simulation(chats, BOOK, strategies=[name], max_num_seqs=64, max_num_batched_tokens=budget)[name]
        )
        rows.append(
            f"{s['output_tokens_per_s']:11.0f}{s['ttft_ms']['p99']:15.0f}{s['itl_ms']['p99']:14.0f}",
        )
        assert f"{name:27}{budget:6,}{rows[-1]}" in text
    assert rows[1] == rows[2]
