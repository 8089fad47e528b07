"""Chapter 7.4: what it prints is computed here again, from the package."""

import random
import re
from dataclasses import fields

import pytest
from book import ROOT, notebook, output

from minibatcher import claims, run_comparison
from minibatcher.build import EngineOptions
from minibatcher.capacity import find_capacity
from minibatcher.cli import main
from minibatcher.errors import InvalidParameter
from minibatcher.hardware import device, model_spec
from minibatcher.kv import BlockKV, PrefixKV
from minibatcher.labkit import book_workload
from minibatcher.labkit.notebooks import read_source
from minibatcher.metrics import cost, summarize
from minibatcher.report import comparison
from minibatcher.request import Request, SamplingParams
from minibatcher.runners.roofline import CostModel
from minibatcher.scheduling import SchedulerConfig
from minibatcher.simulate import rate_servers, run_simulation, simulated_engine
from minibatcher.variants import make_variants
from minibatcher.workload import load_workload, profile

BOOK = claims.machine()  # Llama-3.1-70B on four H100
SMALL = CostModel(device("l4"), model_spec("bard"))
LENGTHS = [(row.prompt_tokens, row.output_tokens) for row in book_workload()]
SAME_POOL = {"kv_cache_tokens": 4_096, "max_model_len": 1_024, "max_num_seqs": 32, "max_num_batched_tokens": 2_048}
BILL = {"max_num_seqs": 64, "max_num_batched_tokens": 2_048, "max_model_len": 8_192}


def flat(text):
    return " ".join(text.split())


def line_of(tag, *beginnings):
    """The one printed line that begins with these words, with single spaces."""
    lines = [flat(line) for line in output("7.4", tag).splitlines()]
    (found,) = {line for line in lines if line.startswith(" ".join(beginnings))}
    return found


def page():
    return "\n\n".join("".join(c["source"]) for c in notebook("7.4")["cells"] if c["cell_type"] == "markdown")


def section(heading):
    (found,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", page(), re.MULTILINE | re.DOTALL)
    return found


def table_rows(text):
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return rows[2:]


def code_cell(beginning):
    """A code cell of the chapter's source, by how it begins."""
    path = ROOT / "chapters" / "7.4-what-it-leads-to.md"
    (found,) = [c.source for c in read_source(path, {}).cells if c.source.startswith(beginning)]
    return found


@pytest.fixture(scope="module")
def talks():
    return profile("azure-conv", 200, request_rate=float("inf"), seed=0).fit_to_context(8_192)


# 4.1: reserved and unused


def test_reservations_of_one_request_counted_by_hand():
    """A prompt of 3 and an answer of 2: it holds 3 tokens, then 4; the second token of the answer is never stored."""
    found = claims.reservations([(3, 2)], max_model_len=8, block_size=2)
    shares = {rule: (r.used, r.for_later, r.never) for rule, r in found.items()}
    assert shares["longest"] == pytest.approx((7 / 16, 1 / 16, 8 / 16))
    assert shares["power of two"] == pytest.approx((7 / 16, 1 / 16, 8 / 16))
    assert shares["known"] == pytest.approx((7 / 10, 1 / 10, 2 / 10))
    assert shares["blocks"] == pytest.approx((7 / 8, 1 / 8, 0))
    assert found["known"].unused == pytest.approx(3 / 10)
    eight = claims.reservations([(3, 5)], max_model_len=64)["power of two"]  # 3 + 5 is one already
    assert eight.used == pytest.approx((3 + 4 + 5 + 6 + 7) / (5 * 8))


def test_reservations_add_up_and_blocks_waste_less_than_one_block_a_request():
    rng = random.Random(1)
    lengths = [(rng.randint(1, 300), rng.randint(1, 100)) for _ in range(50)]
    for block_size in (1, 16, 64):
        found = claims.reservations(lengths, max_model_len=512, block_size=block_size)
        assert all(r.used + r.for_later + r.never == pytest.approx(1) for r in found.values())
        assert min(r.never for r in found.values()) >= -1e-12
        steps = sum(answer for _, answer in lengths)
        held = sum(prompt + made for prompt, answer in lengths for made in range(answer))
        assert held / found["blocks"].used - held < block_size * steps
        assert held / found["longest"].used == pytest.approx(512 * steps)
    with pytest.raises(InvalidParameter, match="fit max_model_len 399"):
        claims.reservations([(300, 100)], max_model_len=399)


def test_reservations_are_those_of_the_engine():
    """Where everybody is let in at once, so that nobody waits with its memory for a neighbour's prefill."""
    equal = load_workload("uniform:prompt_min=20,prompt_max=20,output_min=44,output_max=44", num_requests=8)
    options = {"kv_cache_tokens": 1_024, "max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 512}
    found = claims.reservations([(20, 44)] * 8, max_model_len=128, block_size=16)
    for rule, block_size in (("longest", 128), ("blocks", 16)):
        run = run_simulation(equal, SMALL, strategies=["continuous"], block_size=block_size, **options)["continuous"]
        occupancy = summarize(run)["kv_occupancy"]
        assert occupancy["tokens_of_reserved"] == pytest.approx(found[rule].used)


def test_what_is_reserved_and_unused_stands_in_the_chapter():
    found = claims.reservations(LENGTHS, max_model_len=1_024, block_size=16)
    names = ["a slice of max_model_len", "a slice of the true length", "blocks of 16 tokens"]
    for rule, name in zip(["longest", "known", "blocks"], names):
        r = found[rule]
        shares = " ".join(f"{100 * share:.0f} %" for share in (r.used, r.for_later, r.never))
        assert line_of("claim-4.1", name) == f"{name} {shares}"
    assert found["longest"].used < 0.1 < 0.6 < found["known"].used < 0.75 < 0.85 < found["blocks"].used
    assert found["known"].for_later > 20 * found["known"].never  # an oracle does not help against waiting


def test_the_engine_serves_eight_times_as_many_at_once_from_blocks():
    sizes = {"slices": 1_024, "blocks": 16}
    variants = {name: {"strategy": "continuous", "block_size": size} for name, size in sizes.items()}
    runs = run_simulation(book_workload(), SMALL, variants=variants, **SAME_POOL)
    for name, run in runs.items():
        most = max(len(step.rows) for step in run.steps)
        used = 100 * summarize(run)["kv_occupancy"]["tokens_of_reserved"]
        assert f"{name} {most} {used:.0f} % {len(run.steps)}" in flat(output("7.4", "claim-4.1"))
        assert most == {"slices": 4, "blocks": 32}[name]
    assert "Answers: the same, token for token." in output("7.4", "claim-4.1")


@pytest.fixture(scope="module")
def pools():
    return {(u.workload, u.block_size): u for u in claims.pool_use(BOOK, workloads=["azure-conv", "azure-code"])}


def test_how_many_more_fit_stands_in_the_chapter(pools):
    printed = flat(output("7.4", "claim-4.1"))
    for name, size in (("slices", 8_192), ("blocks", 16)):
        use = pools["azure-conv", size]
        assert f"{name} {use.num_running:.0f} {100 * use.reserved_share:.0f} % {100 * use.used_share:.0f} %" in printed
        code = pools["azure-code", size]
        speed = f"{name}: {code.output_tokens_per_s:,.0f} output tokens/s, {code.num_running:.0f} requests at once"
        assert f"{speed}, {100 * code.used_share:.0f} % in use of reserved" in printed
    gain = pools["azure-conv", 16].num_running / pools["azure-conv", 8_192].num_running
    assert f"With blocks {gain:.1f} × as many requests run at once." in printed


def test_paging_lifts_a_limit_and_no_other(pools):
    slices, blocks = pools["azure-conv", 8_192], pools["azure-conv", 16]
    assert slices.most_running == slices.pool_tokens // 8_192 == BOOK.kv_capacity_tokens // 8_192 == 59
    assert slices.reserved_share > 0.98 and slices.used_share < 0.2
    assert blocks.used_share > 0.98 and blocks.num_running > 3 * slices.num_running
    ratio = blocks.output_tokens_per_s / slices.output_tokens_per_s
    assert 1.2 < ratio < 1.5  # far less than 3: prefill is the next limit
    slices, blocks = pools["azure-code", 8_192], pools["azure-code", 16]
    assert slices.num_running == blocks.num_running and slices.num_running < 59
    assert slices.output_tokens_per_s == pytest.approx(blocks.output_tokens_per_s)
    assert slices.used_share < 0.3 < 0.9 < blocks.used_share


def test_a_full_token_budget_leaves_half_the_pool_empty(pools):
    """«As long as somebody waits, every step is full to its token budget.»"""
    workload = claims.continuous.sweep_workloads(600, 0)["azure-conv"]
    options = {"max_model_len": 8_192, "max_num_seqs": 600, "max_num_batched_tokens": 2_048}
    run = run_simulation(workload, BOOK, strategies=["chunked"], **options)["chunked"]
    assert {step.num_computed_tokens for step in run.steps if step.num_waiting} == {2_048}
    assert summarize(run)["output_tokens_per_s"] == pools["azure-conv", 16].output_tokens_per_s
    assert 0.4 < pools["azure-conv", 16].reserved_share < 0.6


def test_where_paging_loses_is_told_in_numbers():
    """Large blocks waste more and share less; tiny ones need long tables; and slices that fit leave little to win."""
    conversations = load_workload("shared-prefix:turns=2,prefix_tokens=128", num_requests=16, seed=1)
    options = {"enable_prefix_caching": True, "kv_cache_tokens": 16_384, "max_num_seqs": 8}
    table = []
    for size in (1, 4, 16, 64, 256):
        unused = claims.reservations(LENGTHS, max_model_len=1_024, block_size=size)["blocks"].unused
        longest = max(-(-(prompt + answer - 1) // size) for prompt, answer in LENGTHS)
        options |= {"block_size": size, "max_num_batched_tokens": 128}
        run = run_simulation(conversations, SMALL, strategies=["chunked"], **options)["chunked"]
        table.append((unused, longest, summarize(run)["prefix_hit_rate"]))
        row = f"{size} {100 * unused:.0f} % {longest} {100 * table[-1][2]:.0f} %"
        assert line_of("claim-4.1", str(size), f"{100 * unused:.0f} %") == row
    unused, longest, hits = zip(*table)
    assert list(unused) == sorted(unused) and list(longest) == sorted(longest, reverse=True)
    assert list(hits) == sorted(hits, reverse=True) and hits[0] > 0.5 and hits[-1] == 0
    equal = load_workload("uniform:prompt_min=200,prompt_max=200,output_min=56,output_max=56", num_requests=32)
    variants = {
        name: {"strategy": "continuous", "block_size": size} for name, size in (("slices", 256), ("blocks", 16))
    }
    runs = run_simulation(equal, SMALL, variants=variants, **SAME_POOL | {"max_model_len": 256})
    for name, run in runs.items():
        s = summarize(run)
        used = 100 * s["kv_occupancy"]["tokens_of_reserved"]
        row = f"{name}: {len(run.steps)} steps, {used:.0f} % in use of reserved, "
        row += f"{s['num_preemptions']} preemptions, {s['num_lost_tokens']} tokens computed again"
        assert row in output("7.4", "claim-4.1")
        assert (s["num_lost_tokens"] > 0) == (name == "blocks")


# 4.1: the chapter's own pool


def own_pool():
    names = {}
    exec(code_cell("class Pool:"), names)
    return names["Pool"]


def test_the_pool_of_the_chapter_has_twenty_lines():
    source = code_cell("class Pool:")
    assert len([line for line in source.splitlines() if line.strip()]) <= 20


def test_the_pool_of_the_chapter_does_what_the_package_does():
    Pool, rng = own_pool(), random.Random(5)
    for size in (1, 4, 7):
        ours, theirs, tokens = Pool(12, size), BlockKV(12, size), {}
        for _ in range(300):
            name = rng.choice("abcde")
            if name in tokens and rng.random() < 0.3:
                ours.give_back(name)
                theirs.free(name)
                del tokens[name]
            else:
                wanted = tokens.get(name, 0) + rng.randint(1, 9)
                done = ours.grow(name, wanted)
                assert done == theirs.allocate(name, wanted)
                tokens[name] = wanted if done else tokens.get(name, 0)
            assert {who: table for who, table in ours.tables.items() if table} == theirs._tables
            assert ours.free == theirs._free
            theirs.check()


def test_a_token_is_found_where_it_lies():
    pool = own_pool()(8, 4)
    assert pool.grow("a", 5) and pool.grow("b", 9)
    places = [pool.find("b", position) for position in range(9)]
    assert places == [(2, 0), (2, 1), (2, 2), (2, 3), (3, 0), (3, 1), (3, 2), (3, 3), (4, 0)]


# 4.2: bytes a token


def test_bytes_a_token_do_not_depend_on_the_layout():
    from minibatcher import Engine

    found = set()
    for size in (1_024, 16):
        engine = Engine.from_model("bard", device="cpu", max_model_len=1_024, kv_cache_tokens=4_096, block_size=size)
        found.add(sum(tensor.nbytes for layer in engine.runner.pool for tensor in layer) / 4_096)
    spec = model_spec("bard")
    (size,) = found
    assert size == claims.kv_size(spec, "float32").bytes_per_token == 2 * 6 * 2 * 32 * 4
    printed = output("7.4", "claim-4.2")
    assert f"slices: {size:,.0f} bytes a token" in printed and f"blocks: {size:,.0f} bytes a token" in printed
    large = claims.kv_size(model_spec("llama-3.1-70b")).bytes_per_token
    assert f"70 billion parameters: {large:,} bytes a token, in slices or in blocks" in printed
    assert "a block table adds 0.25 bytes a token" in printed


# 4.3: shared beginnings


def test_shared_blocks_are_those_of_the_chapter():
    from minibatcher import load_model

    names = {"loaded": load_model("bard", device="cpu"), "Pool": own_pool(), "print": lambda *words: None}
    exec(code_cell("from itertools import takewhile"), names)
    kv, printed = PrefixKV(32, 16), output("7.4", "claim-4.3")
    for name, tokens in names["prompts"].items():
        request = Request(name, tokens)
        found = kv.start(name, request.token_slice, len(tokens))
        kv.publish(name, request.token_slice, len(tokens))
        assert kv.table(name) == names["pool"].tables[name]
        computed = len(tokens) - found
        assert f"{name:7} {found:2} of {len(tokens)} tokens found, {computed:2} to compute: {kv.table(name)}" in printed
    kv.check()
    assert ": 0 blocks in use, 4 kept, 28 free." in printed  # three shared, and one that an answer has filled
    assert (
        f"{kv.num_used_blocks} blocks are in use. Without sharing it would be {kv.num_shared_blocks} more." in printed
    )
    assert found == 48 < len(tokens)


@pytest.mark.parametrize("num_tokens, expected", [(31, 16), (32, 16), (33, 32)])
def test_the_last_token_of_a_prompt_is_always_computed(num_tokens, expected):
    """The chapter asks for 32 tokens in blocks of 16."""
    kv, first, second = PrefixKV(8, 16), Request("a", list(range(num_tokens))), Request("b", list(range(num_tokens)))
    kv.start("a", first.token_slice, num_tokens)
    kv.publish("a", first.token_slice, num_tokens)
    assert kv.start("b", second.token_slice, num_tokens) == expected


def test_what_the_prefix_cache_saves_stands_in_the_chapter():
    conversations = load_workload("shared-prefix:turns=2,prefix_tokens=128", num_requests=16, seed=1)
    variants = make_variants(["chunked"], {"enable_prefix_caching": [False, True]})
    runs = run_simulation(conversations, SMALL, variants=variants, max_num_seqs=8, max_num_batched_tokens=128)
    computed = {}
    for name, run in runs.items():
        s = summarize(run)
        bound = run.header.get("prefix_bound")
        best = f"{100 * bound['tokens'] / bound['of']:.0f} %" if bound else "–"
        computed[name] = s["num_computed_tokens"]
        row = f"{name} {100 * s['prefix_hit_rate']:.0f} % {best} {computed[name]:,} {len(run.steps)}"
        assert line_of("claim-4.3", name) == row
    assert computed["prefix cache"] < 0.6 * computed["no prefix cache"]
    assert "Answers: the same, token for token." in output("7.4", "claim-4.3")


# 4.5: when blocks run out


def speakers(**options):
    """The chapter's eight requests in virtual time: who is preempted does not depend on the tokens."""
    from minibatcher import load_model

    encode = load_model("bard", device="cpu").tokenizer.encode
    names = ["ROMEO", "JULIET", "HAMLET", "OPHELIA", "FALSTAFF", "MACBETH", "PUCK", "KING LEAR"]
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    requests = [Request(name, encode(f"<|bos|>{name}:"), params) for name in names]
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 256} | options
    return simulated_engine(SMALL, "chunked", max_model_len=2_048, **options).run(requests)


def test_preemption_loses_work_and_no_answer():
    tight = {"kv_cache_tokens": 256}
    runs = {
        "plenty": speakers(kv_cache_tokens=16_384),
        "recompute": speakers(**tight),
        "swap": speakers(**tight, preemption="swap"),
        "optimistic": speakers(**tight, admission="optimistic"),
        "worst case": speakers(**tight, admission="worst-case"),
    }
    numbers = {}
    for name, run in runs.items():
        s = summarize(run)
        numbers[name] = (len(run.steps), s["num_preemptions"], s["num_lost_tokens"], s["num_swapped_blocks"])
        row = " ".join(map(str, [name, *numbers[name], 0]))  # no answer has changed
        assert line_of("claim-4.5", name, str(len(run.steps))) == row
        assert s["num_finished"]["length"] == 8 and s["num_output_tokens"] == 8 * 60
    steps, preemptions, lost, swapped = zip(*numbers.values())
    assert steps[0] == 60 and list(steps) == sorted(steps)
    assert preemptions[0] == preemptions[4] == 0 < preemptions[3] < preemptions[1]
    assert lost[1] > 0 == lost[2] and swapped[2] > 0 == swapped[1]


def test_no_two_prompts_of_the_book_begin_alike():
    options = {"strategies": ["chunked"], "enable_prefix_caching": True, "max_num_seqs": 8}
    run = run_comparison(book_workload(), device="cpu", **options)["chunked"]
    assert summarize(run)["num_cached_tokens"] == 0 and "prefix_bound" not in run.header


def test_recompute_against_swap_stands_in_the_chapter(talks):
    tight = {"max_num_seqs": 256, "max_num_batched_tokens": 2_048, "max_model_len": 8_192, "kv_cache_tokens": 40_000}
    ways = make_variants(["chunked"], {"preemption": ["recompute", "swap"]})
    speeds = []
    for name, run in run_simulation(talks, BOOK, variants=ways, **tight).items():
        s = summarize(run)
        row = f"{name} {s['num_preemptions']} preemptions, {s['num_lost_tokens']:,} tokens computed again, "
        row += f"{s['num_swapped_blocks']:,} blocks copied: {s['output_tokens_per_s']:,.0f} output tokens/s"
        assert row in flat(output("7.4", "claim-4.5"))
        speeds.append(s["output_tokens_per_s"])
    assert 1 < speeds[1] / speeds[0] < 1.1  # «the two are close, swapping wins a little»
    size = claims.kv_size(BOOK.model).bytes_per_token * 16 // 4  # of a block, on one of four GPUs
    pieces = 2 * BOOK.model.num_layers
    assert f"2 × {BOOK.model.num_layers} pieces of {size // pieces // 1024} KiB" in output("7.4", "claim-4.5")


# 4.6, 4.7: beside it, and after it


def test_five_techniques_are_set_apart_with_a_line_each():
    rows = table_rows(section("What continuous batching is not"))
    assert [row[0] for row in rows] == [
        "quantization",
        "speculative decoding",
        "tensor parallelism",
        "output streaming",
        "FlashAttention",
    ]
    assert all(len(row) == 3 and all(len(cell) > 20 for cell in row[1:]) for row in rows)


def knob_tables():
    """The rows of the two tables on production: names of knobs; what to try when something hurts."""
    names, hurts = section("The same knobs in production").split("When should you turn which?")
    return table_rows(names), table_rows(hurts)


def test_what_to_try_is_a_knob_of_the_first_table():
    names, hurts = knob_tables()
    assert len(hurts) == 6 and all(len(row) == 4 for row in hurts)
    vllm = {row[1].strip("`") for row in names}
    assert {knob for row in hurts for knob in re.findall(r"`(\w+)`", row[2])} <= vllm
    assert {name for row in hurts for name in re.findall(r"`(\w+)`", row[1])} == {
        "num_requests_waiting",
        "num_requests_running",
        "kv_cache_usage_perc",
        "num_preemptions",
        "inter_token_latency_seconds",
        "prefix_cache_hits",
        "prefix_cache_queries",
    }


def test_the_knobs_named_are_those_of_the_package():
    rows, _ = knob_tables()
    ours = {field.name for options in (SchedulerConfig, EngineOptions) for field in fields(options)}
    named = [row[0].strip("`") for row in rows]
    assert set(named) <= ours
    assert {"max_num_seqs", "max_num_batched_tokens", "block_size", "gpu_memory_utilization"} <= set(named)
    assert all(len(row) == 6 for row in rows)
    assert not EngineOptions().enable_prefix_caching  # «our engine has it off»
    assert SchedulerConfig().admission == "preempt"


def test_the_workload_goes_into_a_file_and_what_serves_it_exists(tmp_path, capsys):
    visits = profile("azure-conv", 200, request_rate=1.0, arrivals="poisson", seed=0).fit_to_context(8_192)
    visits.to_jsonl(tmp_path / "conversations.jsonl")
    lines = (tmp_path / "conversations.jsonl").read_text(encoding="utf-8").splitlines()
    assert "\n".join(lines[1:4]) in output("7.4", "claim-4.7") and f"{len(lines)} lines" in output("7.4", "claim-4.7")
    (told,) = re.findall(r"(\d+) of (\d+) answers are those of the engine", output("7.4", "claim-4.7"))
    assert told[0] == told[1] == str(len(book_workload())) and "data: [DONE]" in output("7.4", "claim-4.7")
    assert load_workload(str(tmp_path / "conversations.jsonl")).requests == visits.requests
    with pytest.raises(SystemExit):
        main(["--help"])
    told = capsys.readouterr().out
    text = section("The same knobs in production")
    commands = {match[1] for match in re.finditer(r"(?:`|^)minibatcher (\w+)", text, re.MULTILINE)}
    assert commands == {"compare", "simulate", "serve", "replay"}
    assert all(re.search(rf"^    {command} ", told, re.MULTILINE) for command in commands)


# M.4: what an answer costs


@pytest.fixture(scope="module")
def offline(talks):
    runs = run_simulation(talks, BOOK, strategies=["static", "chunked"], **BILL)
    return {name: cost(run, 12.0)["cost_per_million_output_tokens"] for name, run in runs.items()}


def test_the_offline_bill_stands_in_the_chapter(offline):
    printed = flat(output("7.4", "claim-M.4"))
    for name, price in offline.items():
        assert f"{name} {price:.2f} for a million output tokens" in printed
    assert f"Static batching costs {offline['static'] / offline['chunked']:.1f} × as much." in printed


PROMISE = {"ttft_ms": 10_000, "tpot_ms": 100}
SEARCH = {"share": 0.9, "low": 0.25, "high": 10.0, "start": 1.0, "tolerance": 0.1}


def servers(*strategies, **options):
    """The two servers of the chapter's bill, by name."""
    visits = profile("azure-conv", 200, request_rate=1.0, arrivals="poisson", seed=0).fit_to_context(8_192)
    return dict(rate_servers(visits, BOOK, make_variants(list(strategies)), **BILL | options))


def per_million(run):
    return cost(run, 12.0)["cost_per_million_output_tokens"]


def test_the_bill_at_the_same_promise_stands_in_the_chapter(offline):
    """And static batching is dearer still when people must not wait."""
    price = {}
    for name, serve in servers("static", "chunked").items():
        found = find_capacity(serve, PROMISE, **SEARCH)
        run = serve(found.request_rate)
        price[name] = per_million(run)
        row = f"{name} {found.request_rate:.2f} {price[name]:.2f} {1_000 * cost(run, 12.0)['cost_per_request']:.2f} "
        broke = {"static": "too many are late", "chunked": "the queue grows"}[name]
        assert line_of("claim-M.4", name, f"{found.request_rate:.2f}") == row + broke
    assert price["static"] / price["chunked"] > 2 * offline["static"] / offline["chunked"]


def test_a_promise_moves_static_batching_and_slots_move_the_chunked():
    """What the chapter says will happen to who changes `promise`, or `bill`."""
    lax, strict = {"ttft_ms": 30_000, "tpot_ms": 200}, {"ttft_ms": 2_000, "tpot_ms": 100}

    def holds(serve, rate, promise):
        options = SEARCH | {"low": rate, "high": 1.1 * rate, "start": rate, "max_probes": 2}
        return find_capacity(serve, promise, **options).probes[0].sustained

    static, chunked = servers("static", "chunked").values()
    (more_slots,) = servers("chunked", max_num_seqs=128).values()
    assert not holds(static, 0.25, strict) and not holds(static, 1.4, PROMISE) and holds(static, 1.4, lax)
    for promise in (strict, PROMISE, lax):
        assert holds(chunked, 7.4, promise) and not holds(chunked, 8.2, promise)
    assert holds(more_slots, 8.2, strict)


def test_the_load_sets_the_bill():
    price = {}
    for rate in (0.2, 1, 4, 7):
        price[rate] = [per_million(serve(rate)) for serve in servers("static", "chunked").values()]
        assert line_of("claim-M.4", f"{rate} ") == " ".join([str(rate), *(f"{one:.2f}" for one in price[rate])])
    assert price[0.2][0] == pytest.approx(price[0.2][1], rel=0.01)  # «while both keep up, they cost the same»
    assert price[1][0] == pytest.approx(price[1][1], rel=0.03) and price[7][0] > 2 * price[7][1]


# M.6: an honest comparison


def test_the_pitch_is_dishonest_and_the_record_says_so(talks):
    theirs, his = {"strategy": "continuous", "max_num_seqs": 16}, {"strategy": "chunked", "max_num_seqs": 64}
    common = {"max_num_batched_tokens": 2_048, "max_model_len": 8_192}
    ratios, differing = [], []
    for slots in (16, 64):
        variants = {"theirs": theirs | {"max_num_seqs": slots}, "his": his}
        data = comparison(run_simulation(talks, BOOK, variants=variants, **common))
        speed = [run["output_tokens_per_s"] for run in data["strategies"].values()]
        ratios.append(speed[1] / speed[0])
        differing.append(data["differing"])
    printed = output("7.4", "claim-M.6")
    assert differing == [["max_num_seqs"], []]
    assert "in his pitch: max_num_seqs\n" in printed and "in our try: nothing\n" in printed
    assert f": {ratios[0]:.2f} × as many" in printed and f"what is left: {ratios[1]:.2f} × as many" in printed
    assert ratios[0] > 2 and ratios[1] < 1.2


def test_each_item_of_the_checklist_stands_where_it_says():
    workload = load_workload("uniform:prompt_min=4,prompt_max=8,output_min=2,output_max=4", num_requests=3)
    variants = {name: {"strategy": "continuous", "block_size": size} for name, size in (("slices", 64), ("blocks", 16))}
    data = comparison(run_comparison(workload, device="cpu", variants=variants, max_model_len=64, max_num_seqs=2))
    run = data["strategies"]["blocks"]
    places = {"`header`": data["header"] | run["header"], "`strategies`": run}
    checklist = table_rows(section("An honest comparison"))
    assert len(checklist) == 9
    for _, where in checklist:
        place, _, names = where.partition(": ")
        named = re.findall(r"`(\w+)`", names or where)
        assert named
        for name in named:
            assert name in places.get(place, data) or name in data, f"{name} is said to stand in {place}"
    assert run["requests"][0].keys() >= {"id", "prompt_tokens", "output_tokens", "finish_reason", "output_hash"}
    for name in ("model_fingerprint:", "differing: block_size", "first raw result, output_hash:"):
        assert line_of("claim-M.6", name)
