"""Chapter 7.1: what its cells printed is what the package computes again."""

import re
from dataclasses import replace

import pytest
from book import output, printed, tagged

from minibatcher import claims
from minibatcher.claims import padding
from minibatcher.labkit import book_workload
from minibatcher.labkit.notebooks import SET_UP

MACHINE = claims.machine()


def test_the_loop_is_shown_and_its_answers_are_those_of_the_engine():
    said = printed("7.1", "A static batch in under forty lines")
    lengths = [int(n) for n in re.findall(r"^r\d \D+(\d+) tokens", said, re.MULTILINE)]
    assert len(lengths) == 8
    assert f"The batch took {max(lengths)} steps" in said
    assert f"each request alone: the same {sum(lengths)} tokens" in said
    assert "class StaticScheduler(Scheduler):" in printed("7.1", "The same thing in the package")


def test_a_short_prompt_pays_for_its_neighbour():
    """1.2"""
    said = output("7.1", "claim-1.2")
    short, _ = claims.padded_prefill(MACHINE, [50, 4_000])
    assert short.token_factor == 4_000 / 50 == 80
    assert f"row of 4,000: 80 × the tokens, {short.flops_factor:.0f} × the calculations" in said


def test_the_fastest_finisher_under_both_readings():
    """1.3"""
    said = output("7.1", "claim-1.3")
    for case, ended in (((31, 20, 1, 2_000), 31), ((1, 20, 31, 2_000), 1)):
        found = claims.fastest_finisher(*case)
        share = 100 * sum(claims.ended_rows([20] * case[0] + [2_000] * case[2])) / (32 * 2_000)
        assert (found.max_ended_rows, found.share_of_steps) == (ended, 0.99)
        assert f"in 99 % of 2,000 steps {ended:2} of 32 rows are thrown away; of all rows that is {share:.0f} %" in said


def test_the_tail_is_set_by_the_longest_request():
    """1.4: the batches' lengths, then the table; nearly the same tokens per second, several times the latency."""
    said = output("7.1", "claim-1.4")
    for batch in claims.batch_ends(MACHINE, num_requests=128, max_num_seqs=32):
        assert batch.num_steps == batch.longest_output
        assert f"runs {batch.num_steps} steps: its longest answer has {batch.longest_output} tokens, the mean" in said
    table = {
        name: [float(x) for x in row.split()] for name, row in re.findall(r"^(static|continuous) +(.+)$", said, re.M)
    }
    for name, t in claims.tail_latency(MACHINE, request_rate=1.0).items():
        per_token = [1000 * t.per_token_p50_s, 1000 * t.per_token_p99_s]
        figures = [t.output_tokens_per_s, t.p50_s, t.p99_s, t.whole_batch_p50_s, *per_token]
        assert table[name] == pytest.approx(figures, abs=0.51)
        assert table[name][1:4] == pytest.approx(figures[1:4], abs=0.051)
    static, continuous = table["static"], table["continuous"]
    assert static[0] > 0.95 * continuous[0] and static[1] > 3 * continuous[1] and static[5] > 10 * continuous[5]


def test_equal_lengths_leave_nothing_to_gain():
    """1.5"""
    said = output("7.1", "claim-1.5")
    runs = claims.equal_lengths(MACHINE)
    for name, found in runs.items():
        assert re.search(rf"^{name} .*: {found.ratio:.2f} × as many$", said, re.M)
    assert runs["equal"].ratio == pytest.approx(1, abs=0.02)
    steps = re.findall(r"static +(\d+) steps, continuous +(\d+)", printed("7.1", "Where static batching is fine"))
    (equal, unequal) = [(int(a), int(b)) for a, b in steps]
    assert equal[0] == equal[1] == 2 * 48 and unequal[0] > unequal[1]


def test_what_a_delay_buys():
    """1.6: larger batches, less work, more waiting; where clients ask again at once, throughput too."""
    said = output("7.1", "claim-1.6")
    points = claims.delay_sweep(MACHINE, delays_s=(0.0, 0.4, 0.8), request_rates=[4.0], num_requests=200)
    points += claims.closed_loop_delay(claims.machine("llama-3.1-8b", num_gpus=1), num_clients=32)
    rows = [[float(x) for x in re.findall(r"[\d.]+", line)] for line in said.splitlines() if re.match(r" +\d", line)]
    assert len(rows) == len(points) == 5
    for row, p in zip(rows, points):
        shares = [100 * p.busy_share, 1000 * p.queue_mean_s, 1000 * p.latency_mean_s]
        assert row == pytest.approx([p.delay_s, p.mean_batch, p.output_tokens_per_s, *shares], abs=0.51)
    open_loop, (at_once, late) = rows[:3], rows[3:]
    assert [r[1] for r in open_loop] == sorted(r[1] for r in open_loop)  # larger batches
    assert [r[3] for r in open_loop] == sorted((r[3] for r in open_loop), reverse=True)  # less work
    assert [r[5] for r in open_loop] == sorted(r[5] for r in open_loop)  # people wait longer
    assert len({r[2] for r in open_loop}) == 1  # no more is served
    assert late[2] > 1.6 * at_once[2] and late[5] < at_once[5]
    assert late[1] == 32 and late[4] == 0  # all together, and the delay never runs out


def test_a_static_batch_waits_for_one_who_never_comes():
    """1.6: seven requests and eight slots; a delay takes from the first and from who has just missed the batch."""
    said = printed("7.1", "When may a batch start? Dynamic batching")
    rows = re.findall(r"^(static|dynamic, no delay|dynamic, delay) +(\d(?: \+ \d)*) +([\d ]+)$", said, re.M)
    names, sizes, figures = zip(*rows)
    assert names == ("static", "dynamic, no delay", "dynamic, delay")
    batches = [[int(size) for size in text.split(" + ")] for text in sizes]
    assert batches[0] == [7] and batches[1][0] == 1 and 1 < batches[2][0] < 7
    assert [sum(batch) for batch in batches] == [7] * 3
    static, at_once, delay = [[int(x) for x in text.split()] for text in figures]  # steps, first, last, mean
    assert static[0] < delay[0] < at_once[0]
    assert static[3] > 3 * max(at_once[3], delay[3])
    assert at_once[1] == 0 < delay[1] < static[1] and at_once[2] < delay[2] < static[2]


def test_sorting_mends_padding_alone():
    """1.7"""
    said = output("7.1", "claim-1.7")
    runs = claims.bucketing(MACHINE, num_requests=256, max_num_seqs=16)
    for name, w in runs.items():
        shares = [
            f"{100 * w.prompt_padding:.0f} %",
            f"{100 * w.ended_share:.0f} %",
            f"{w.prefill_s:.1f}",
            f"{w.decode_s:.1f}",
        ]
        assert re.search(rf"^{name} +" + " +".join(map(re.escape, shares)) + "$", said, re.M)
    before, after = runs["arrival"], runs["bucketed"]
    assert f"prefills take {after.prefill_s / before.prefill_s:.2f} × the time" in said
    assert after.prefill_s < before.prefill_s / 2 and after.decode_s == pytest.approx(before.decode_s, rel=0.05)


def test_sorting_more_requests_leaves_less_padding_and_alike_answers_less_waiting(monkeypatch):
    """1.7, what the prose adds to the table: a larger pool, and long prompts that bring long answers."""
    pools = [claims.bucketing(MACHINE, num_requests=n, max_num_seqs=16)["bucketed"] for n in (64, 256)]
    assert pools[1].prompt_padding < 0.7 * pools[0].prompt_padding

    def alike(*arguments, **options):
        workload = lognormal(*arguments, **options)
        by_prompt = sorted(workload.requests, key=lambda r: r.prompt_tokens)
        answers = sorted(r.output_tokens for r in by_prompt)
        of = {r.request_id: answer for r, answer in zip(by_prompt, answers)}
        requests = [replace(r, output_tokens=of[r.request_id]) for r in workload.requests]
        return replace(workload, requests=requests)

    lognormal = padding.lognormal
    monkeypatch.setattr(padding, "lognormal", alike)
    runs = claims.bucketing(MACHINE, num_requests=256, max_num_seqs=16)
    assert runs["bucketed"].ended_share < runs["arrival"].ended_share / 2


def test_the_running_comparison_tells_batch_efficiency():
    """M.5, and what the prose says of it: a third of solo's steps, three quarters of the tokens for nobody."""
    said = printed("7.1", "The running comparison")
    counted = re.findall(r"^(solo|static|dynamic) +([\d,]+) .*×", said, re.M)
    steps = {name: int(count.replace(",", "")) for name, count in counted}
    assert steps["solo"] == sum(row.output_tokens for row in book_workload())
    assert steps["static"] == steps["dynamic"] and 0.25 < steps["static"] / steps["solo"] < 0.4
    padding = dict(re.findall(r"^(solo|static|dynamic) .* ms +(\d+) % +\d+ %", said, re.M))
    assert padding["solo"] == "0" and padding["static"] == padding["dynamic"] and 70 < int(padding["static"]) < 80
    memory_and_queue = re.findall(r"^(?:solo|static|dynamic) +\d+ ms.* (\d+) % +([\d.]+)$", said, re.M)
    (_, alone), *batched = [(int(held), float(waiting)) for held, waiting in memory_and_queue]
    assert len(batched) == 2 and all(0 < held < 20 and waiting < alone for held, waiting in batched)


def test_the_running_comparison_keeps_queue_time_apart():
    """M.2: the wait is told beside the time to the first token, which includes it."""
    said = printed("7.1", "The running comparison")
    rows = re.findall(r"^(solo|static|dynamic) +(\d+) ms +(\d+) ms", said, re.M)
    assert [name for name, *_ in rows] == ["solo", "static", "dynamic"]
    for _, queue, first in rows:
        assert int(queue) <= int(first) < 2 * int(queue)  # most of it


def test_every_chapter_begins_with_the_same_set_up():
    ((_, cell),) = tagged("7.1", SET_UP)
    assert "from minibatcher.here import prepare" in "".join(cell["source"])
    assert output("7.1", SET_UP).startswith("minibatcher ")
