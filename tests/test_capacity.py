"""The highest sustained request rate: against a server with a known limit, and against a sweep of the simulator."""

from __future__ import annotations

import json
import math
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minibatcher.capacity import ABOVE, BELOW, FOUND, INTERRUPTED, find_capacity, queue_growth, share_text
from minibatcher.cli import main
from minibatcher.errors import InvalidParameter
from minibatcher.hardware import device, model_spec
from minibatcher.metrics import goodput
from minibatcher.report_capacity import capacity_comparison, capacity_table
from minibatcher.runners.roofline import TERMS, CostModel
from minibatcher.simulate import rate_servers
from minibatcher.timeline import RequestRecord, Timeline
from minibatcher.variants import make_variants
from minibatcher.workload import load_workload

LIMIT = {"ttft_ms": 100.0}


def served(rate: float, *, late: int = 0, n: int = 200, wait: float = 0.01, priority=lambda i: 0) -> Timeline:
    """`n` requests at `rate`, the first `late` of them after a second, all others after `wait` seconds."""
    records = {}
    for i in range(n):
        arrival, delay = i / rate, 1.0 if i < late else wait
        times = [arrival + delay, arrival + delay + 0.01]
        records[f"r{i}"] = RequestRecord(
            f"r{i}", arrival, 5, 2, arrival + delay / 2, times, times[-1], "length", priority=priority(i)
        )
    return Timeline("simulated", {"max_num_seqs": 4, "block_size": 4, "num_blocks": 8}, [], records)


class Server:
    """Serves well up to `limit` requests per second, and remembers what it was asked for."""

    def __init__(self, limit: float) -> None:
        self.limit, self.asked = limit, []

    def __call__(self, rate: float) -> Timeline:
        self.asked.append(rate)
        return served(rate, late=0 if rate <= self.limit else 50)


@given(
    limit=st.floats(0.02, 900),
    tolerance=st.sampled_from([0.01, 0.05, 0.5]),
    span=st.sampled_from([(0.01, 1000.0), (0.019, 901.0)]),
)
def test_a_known_limit_is_found_within_the_tolerance(limit, tolerance, span):
    low, high = span
    server = Server(limit)
    found = find_capacity(server, LIMIT, low=low, high=high, tolerance=tolerance, max_probes=40)
    assert found.outcome == FOUND and found.warnings == []
    assert found.request_rate <= limit < found.failed_rate <= found.request_rate * (1 + tolerance) * (1 + 1e-12)
    assert server.asked[0] == high and [probe.request_rate for probe in found.probes] == server.asked
    assert {probe.request_rate: probe.sustained for probe in found.probes} == {
        rate: rate <= limit for rate in server.asked
    }
    steps = math.log2(math.log(high / low) / math.log1p(tolerance))
    assert len(server.asked) <= 3 + steps and min(server.asked) >= min(limit / 2, low)


def test_slow_runs_are_made_only_where_needed():
    server = Server(40.0)
    find_capacity(server, LIMIT, low=0.01, high=100.0)
    assert min(server.asked) == pytest.approx(1.0)  # the middle of both ends; the lowest is left alone


def test_a_limit_outside_the_range_is_told_not_faked():
    below = find_capacity(Server(0.5), LIMIT, low=1.0, high=100.0)
    assert (below.outcome, below.request_rate, below.failed_rate) == (BELOW, None, 1.0)
    assert below.sentence() == "not even the lowest rate, 1 requests/s, was sustained (all requests 75.0 %)"
    assert len(below.probes) <= 7  # it does not creep up on the lowest rate
    server = Server(1e9)
    above = find_capacity(server, LIMIT, low=1.0, high=100.0)
    assert (above.outcome, above.request_rate, above.failed_rate) == (ABOVE, 100.0, None) and server.asked == [100.0]
    assert "the limit lies above it" in above.sentence()
    lines = capacity_table(capacity_comparison({"slow": below, "fast": above}, objectives=LIMIT)).splitlines()
    assert next(line for line in lines if line.startswith("highest rate")).split()[-4:] == ["<", "1.00", "≥", "100"]


def test_the_search_starts_where_it_is_told():
    server = Server(2.5)
    found = find_capacity(server, LIMIT, low=0.25, high=32.0, start=4.0)
    assert server.asked[:3] == [4.0, 1.0, 2.0] and found.outcome == FOUND
    assert found.request_rate <= 2.5 < found.failed_rate <= 1.05 * found.request_rate
    server = Server(6.0)
    find_capacity(server, LIMIT, low=0.25, high=32.0, start=4.0)
    assert server.asked[:2] == [4.0, 32.0] and min(server.asked) == 4.0  # fast ones first, once it is known to hold
    server = Server(0.01)
    hopeless = find_capacity(server, LIMIT, low=0.25, high=32.0, start=4.0)
    assert hopeless.outcome == BELOW and server.asked == [4.0, 1.0, 0.5, 0.25]


def test_only_the_lowest_rate_holds():
    found = find_capacity(Server(1.0), LIMIT, low=1.0, high=64.0)
    assert found.outcome == FOUND and found.request_rate == 1.0 < found.failed_rate <= 1.05


def test_probes_that_run_out_are_told():
    found = find_capacity(Server(40.0), LIMIT, low=0.01, high=100.0, max_probes=3)
    assert len(found.probes) == 3 and found.request_rate <= 40.0 < found.failed_rate
    assert found.warnings == ["the search ended after 3 probes, before its ends met"]


@pytest.mark.parametrize("late, sustained", [(2, True), (3, False)])
def test_the_share_counts_every_request(late, sustained):
    found = find_capacity(lambda rate: served(rate, late=late), LIMIT, low=1.0, high=2.0)  # 2 of 200 are 1 %
    assert (found.outcome == ABOVE) is sustained


def test_refused_and_unfinished_requests_are_not_good():
    def serve(rate: float) -> Timeline:
        timeline = served(rate)
        for i, reason in enumerate(["refused", "error", None]):
            timeline.requests[f"r{i}"] = RequestRecord(f"r{i}", i / rate, 5, finish_reason=reason)
        return timeline

    found = find_capacity(serve, LIMIT, low=1.0, high=2.0)
    assert found.outcome == BELOW and found.probes[0].good_share == 197 / 200


def test_every_class_must_have_its_share():
    def serve(rate: float) -> Timeline:
        return served(rate, late=2, n=400, priority=lambda i: 0 if i < 20 else 2)  # 2 of 20 paid ones, 2 of 400

    assert find_capacity(serve, LIMIT, low=1.0, high=2.0).outcome == ABOVE
    found = find_capacity(serve, LIMIT, class_objectives={"paid": {"ttft_ms": 100.0}}, low=1.0, high=2.0)
    assert found.outcome == BELOW and found.probes[0].shares_by_class == {"paid": 0.9, "batch": 1.0}
    assert found.probes[0].failed_by == ("paid 90.0 %",) and found.sentence().endswith("was sustained (paid 90.0 %)")
    easy = {"paid": {"ttft_ms": 1001.0}}
    assert find_capacity(serve, LIMIT, class_objectives=easy, low=1.0, high=2.0).outcome == ABOVE


def falling_behind(rate: float, speed: float, n: int = 300) -> Timeline:
    """One request after another, `speed` a second; each is fast once it has begun."""
    timeline, free = served(rate, n=n), 0.0
    for record in timeline.requests.values():
        start = max(free, record.arrival_time)
        free = start + 1 / speed
        record.first_scheduled_time, record.token_times, record.finish_time = start, [start, start + 0.01], start + 0.01
    return timeline


def test_a_queue_that_grows_is_not_sustained_even_if_tokens_come_fast():
    fast = {"tpot_ms": 50.0}
    found = find_capacity(lambda rate: falling_behind(rate, 10.0), fast, low=1.0, high=1000.0, tolerance=0.01)
    assert all(probe.good_share == 1.0 for probe in found.probes)
    assert 10.0 <= found.request_rate <= 10.8  # it may fall behind by a few per cent unseen
    assert found.probes[0].queue_grows and not found.probes[0].sustained
    assert found.probes[0].failed_by == ("queue grew",) and found.sentence().endswith("that failed (queue grew)")
    text = capacity_table(capacity_comparison({"one": found}, objectives=fast))
    assert next(line for line in text.splitlines() if "failed by" in line).split() == ["failed", "by", "queue", "grew"]


def brute_force_growth(timeline: Timeline) -> tuple[float, float]:
    requests = sorted(timeline.requests.values(), key=lambda r: r.arrival_time)
    found = [
        sum(earlier.first_scheduled_time > r.arrival_time for earlier in requests[:i]) for i, r in enumerate(requests)
    ]
    third = len(found) // 3
    return sum(found[-2 * third : -third]) / third, sum(found[-third:]) / third


@given(st.floats(0.5, 50), st.integers(3, 60))
def test_queue_growth_by_counting(rate, n):
    timeline = falling_behind(rate, 10.0, n)
    assert queue_growth(timeline) == pytest.approx(brute_force_growth(timeline))


def test_queue_growth_of_few_and_of_refused_requests():
    assert queue_growth(served(1.0, n=1)) == (0.0, 0.0)
    timeline = served(1.0, n=9)
    for name in ("r3", "r4"):  # one refused at once, one never let in
        timeline.requests[name].first_scheduled_time = None
    timeline.requests["r3"].finish_time = timeline.requests["r3"].arrival_time
    timeline.requests["r4"].finish_time = None
    assert queue_growth(timeline) == (1 / 3, 1.0)
    timeline = served(1.0, n=9)
    for i, record in enumerate(timeline.requests.values()):
        record.first_scheduled_time = i + 1.0  # as the next one arrives: not waiting any more
    assert queue_growth(timeline) == (0.0, 0.0)


def test_doubts_are_told():
    few = find_capacity(lambda rate: served(rate, n=20), LIMIT, low=0.1, high=0.2)
    assert len(few.warnings) == 1 and "20 requests are few for a share of 99 %" in few.warnings[0]
    assert "at least 100" in few.warnings[0]
    short = find_capacity(lambda rate: served(rate, wait=0.09), LIMIT, low=1e3, high=2e3)
    assert len(short.warnings) == 1 and "all requests arrive within 0.0995 s, and one takes 0.1 s" in short.warnings[0]
    noisy = find_capacity(lambda rate: served(rate, late=60 if rate < 9 else 30), LIMIT, low=1.0, high=10.0)
    assert "70.0 % were within the objectives at 3.16 requests/s and 85.0 % at 10" in noisy.warnings[0]


def test_a_share_that_falls_short_never_reads_as_enough():
    assert share_text(0.98996) == "98.9 %" and share_text(0.99) == "99.0 %" and share_text(1.0) == "100.0 %"
    assert [share_text(good / 1000) for good in (970, 981, 999)] == ["97.0 %", "98.1 %", "99.9 %"]


def with_timeout(strategy: str, clock: str = "simulated", **timeout: float):
    def serve(rate: float) -> Timeline:
        timeline = served(rate, late=60 if rate < 9 else 30)
        timeline.clock = clock
        timeline.header |= {"strategy": strategy} | timeout
        return timeline

    return serve


def test_a_likely_cause_is_named_where_it_is_known():
    static = find_capacity(with_timeout("static", batch_timeout_s=0.1), LIMIT, low=1.0, high=10.0)
    assert len(static.warnings) == 2
    assert static.warnings[0].startswith("a batch that is not full waits 0.1 s for company, and the TTFT objective is")
    assert static.warnings[0].endswith("lower --batch-timeout-s") and static.warnings[1].endswith("fills sooner")
    paid = {"paid": {"ttft_ms": 70.0}}
    dynamic = with_timeout("dynamic", max_queue_delay_s=0.07)
    found = find_capacity(dynamic, LIMIT, class_objectives=paid, low=1.0, high=10.0)
    assert "objective is 70 ms" in found.warnings[0] and "--max-queue-delay-s" in found.warnings[0]
    for serve in (with_timeout("static", batch_timeout_s=0.09), with_timeout("chunked", batch_timeout_s=0.5)):
        (unknown,) = find_capacity(serve, LIMIT, low=1.0, high=10.0).warnings
        assert "chance decides" in unknown and "quieter" not in unknown  # a simulation knows no noise
    measured = with_timeout("chunked", "measured", batch_timeout_s=0.5)
    assert find_capacity(measured, LIMIT, low=1.0, high=10.0).warnings[0].endswith("or a quieter machine")


@pytest.mark.parametrize("raises", [True, False])
def test_an_interrupt_keeps_what_was_tried(raises):
    asked = []

    def serve(rate: float) -> Timeline:
        asked.append(rate)
        if len(asked) == 3 and raises:
            raise KeyboardInterrupt
        timeline = served(rate, late=0 if rate < 5 else 50)
        if len(asked) == 3:
            timeline.header["interrupted"] = True
        return timeline

    found = find_capacity(serve, LIMIT, low=0.1, high=100.0)
    assert found.outcome == INTERRUPTED and len(found.probes) == 2
    assert found.request_rate == pytest.approx(math.sqrt(10)) and found.failed_rate == 100.0
    assert found.sentence().startswith("interrupted; of the rates tried, 3.16 requests/s was the highest sustained")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"share": 0}, "share must be above 0"),
        ({"share": 1.1}, "share must be above 0 and at most 1"),
        ({"low": 0}, "from a number above 0 to a higher one"),
        ({"low": 3.0, "high": 2.0}, "to a higher one, not 3.0 to 2.0"),
        ({"high": math.inf}, "request rates must go"),
        ({"start": 0.5}, "start must be a request rate from 1.0 to 2.0, not 0.5"),
        ({"tolerance": 0}, "tolerance must be a number above 0"),
        ({"max_probes": 1}, "max_probes must be a whole number of at least 2"),
    ],
)
def test_bad_searches_get_a_sentence(change, message):
    with pytest.raises(InvalidParameter, match=message):
        find_capacity(Server(1.0), LIMIT, **({"low": 1.0, "high": 2.0} | change))
    with pytest.raises(InvalidParameter, match="at least one objective"):
        find_capacity(Server(1.0), {}, low=1.0, high=2.0)


def test_bisection_agrees_with_a_sweep_of_the_simulator():
    cost = CostModel(device("l4"), model_spec("llama-3.1-8b"))
    workload = load_workload("longtail", num_requests=100, seed=3).fit_to_context(400)
    objectives, share = {"ttft_ms": 1500.0, "tpot_ms": 120.0}, 0.95
    variants = make_variants(["continuous", "chunked"])
    for name, serve in rate_servers(workload, cost, variants, max_num_seqs=8, max_num_batched_tokens=256):
        found = find_capacity(serve, objectives, share=share, low=0.5, high=10.0)
        rates = [0.5 * 1.2**i for i in range(17)]  # 0.5 to 9.2
        holds = []
        for rate in rates:
            timeline = serve(rate)
            assert timeline.header["strategy"] == name
            middle, end = brute_force_growth(timeline)
            good = sum(
                1e3 * (r.token_times[0] - r.arrival_time) <= 1500
                and (r.token_times[-1] - r.token_times[0]) * 1e3 <= 120 * max(1, len(r.token_times) - 1)
                for r in timeline.requests.values()
            )
            holds.append(good >= share * 100 and end <= max(1.5 * middle, 5))
        assert holds == sorted(holds, reverse=True) and holds[2] and not holds[-3]  # more traffic is never better here
        highest = rates[holds.index(False) - 1]
        assert highest / 1.05 <= found.request_rate <= highest * 1.2
        assert found.probes[0].good_share == goodput(serve(10.0), **objectives)["good_share"]


SIMULATE = ["simulate", "--workload", "lognormal", "--num-requests", "120", "--quiet", "--find-capacity"]


def test_command_finds_the_capacity_of_each_column(tmp_path, capsys):
    out = tmp_path / "out.json"
    args = ["--strategies", "chunked", "--ordering", "fcfs,shortest-prompt", "--slo-ttft-ms", "300", "--hardware", "l4"]
    assert main([*SIMULATE, *args, "--json", str(out)]) == 0
    data, printed = json.loads(out.read_text()), capsys.readouterr().out
    assert data["schema"] == "minibatcher.capacity" and list(data["columns"]) == ["fcfs", "shortest-prompt"]
    assert data["objectives"] == {"ttft_ms": 300.0} and data["share"] == 0.99 and data["clock"] == "simulated"
    for name, column in data["columns"].items():
        assert column["outcome"] == "found" and column["request_rate"] < column["failed_rate"]
        rates = [probe["request_rate"] for probe in column["probes"]]
        assert rates[0] == column["high"] / 8 == 16 * column["low"] and column["request_rate"] in rates
        assert f"{name}: of the rates tried" in printed
    text = " ".join(printed.split())
    assert "SIMULATED" in text and "strategy chunked" in text and "workload lognormal" in text
    assert "at least 99 % of all requests are served within ttft ≤ 300 ms" in text


def test_command_takes_a_range_and_objectives_of_a_class(capsys):
    args = [*SIMULATE, "--workload", "classes", "--strategies", "continuous", "--capacity-range", "0.5:1"]
    assert main([*args, "--slo", "paid:ttft=60000", "--capacity-share", "0.5", "--json", "-"]) == 0
    captured = capsys.readouterr()
    data = json.loads(captured.out)
    assert data["columns"]["continuous"]["outcome"] == "above the highest" and "≥ 1.00" in captured.err
    assert data["class_objectives"] == {"paid": {"ttft_ms": 60000.0}} and "of each class" in captured.err


def test_command_on_the_real_engine(capsys):
    pytest.importorskip("torch")
    args = ["--num-requests", "8", "--max-model-len", "96", "--slo-ttft-ms", "600000", "--capacity-range", "2:900"]
    args += ["--strategies", "chunked", "continuous", "--max-num-seqs", "4", "--quiet", "--json", "-"]
    assert main(["compare", *args, "--find-capacity"]) == 0
    captured = capsys.readouterr()
    data = json.loads(captured.out)
    assert data["clock"] == "measured" and data["header"]["model"] == "bard"
    for column in data["columns"].values():
        first = column["probes"][0]
        assert first["request_rate"] == 900 and first["good_share"] == 1.0 and first["ttft_ms"]["n"] == 8
    assert "8 requests are few for a share of 99 %" in " ".join(captured.err.split())


@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_prints_what_was_found_and_exits_with_130(signum, ignored, capsys, monkeypatch):
    from minibatcher import simulate

    run, runs = simulate.run_simulation, []

    def interrupted(*args, **options):
        runs.append(args)
        if len(runs) == 5:
            signal.raise_signal(signum)
        return run(*args, **options)

    if ignored and signum == signal.SIGINT:
        pytest.skip("nothing is to happen then")
    monkeypatch.setattr(simulate, "run_simulation", interrupted)
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    if ignored:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a shell's background job
    try:
        code = main([*SIMULATE, "--strategies", "static", "chunked", "--slo-ttft-ms", "300", "--hardware", "l4"])
    finally:
        signal.signal(signal.SIGINT, before[0])
    assert signal.getsignal(signal.SIGTERM) == before[1]
    captured = capsys.readouterr()
    assert code == 130 and "static: interrupted; of the rates tried" in captured.out
    assert "chunked" not in captured.out and "interrupted: the rates are those tried so far" in captured.err


@pytest.mark.parametrize(
    "args, message",
    [
        ([], "needs an objective: --slo-ttft-ms"),
        (["--slo-ttft-ms", "5", "--request-rate", "3"], "leave --request-rate out"),
        (["--slo-ttft-ms", "5", "--capacity-share", "1.5"], "at most 1, not 1.5"),
        (["--slo-ttft-ms", "5", "--capacity-range", "5"], "'5' must be LOW:HIGH"),
        (["--slo-ttft-ms", "5", "--capacity-range", "5:2"], "from a lower rate to a higher one"),
        (["--slo-ttft-ms", "5", "--plot", "x.png"], "--plot is of single runs"),
        (["--slo-ttft-ms", "5", "--price-per-hour", "3"], "--price-per-hour is of single runs"),
        (["--slo-ttft-ms", "5", "--num-requests", "30000"], "every step, which is kept up to 10,000"),
    ],
)
def test_bad_commands_get_a_sentence(args, message, capsys):
    try:
        code = main([*SIMULATE, *args])
    except SystemExit as stop:
        code = stop.code
    error = capsys.readouterr().err
    assert code == 2 and message in error and error.count("\n") == 1


def test_each_probe_is_told_at_once_unless_quiet(capsys):
    args = ["simulate", "--workload", "lognormal", "--num-requests", "120", "--find-capacity", "--slo-ttft-ms", "300"]
    args += ["--strategies", "chunked", "--hardware", "l4"]
    assert main([*args, "--quiet", "--json", "-"]) == 0
    captured = capsys.readouterr()
    probes = json.loads(captured.out)["columns"]["chunked"]["probes"]
    assert not any(line.startswith("chunked: ") and "at once" in line for line in captured.err.splitlines())
    assert main(args) == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 + len(probes) and lines[0].endswith("requests/s when all are there at once")
    for line, probe in zip(lines[1:], probes):
        told = f"failed by: {', '.join(probe['failed_by'])}" if probe["failed_by"] else "sustained"
        assert line.startswith(f"chunked: {probe['request_rate']:.3g} requests/s: ") and line.endswith(told)
        assert bool(probe["failed_by"]) is not probe["sustained"]


@pytest.mark.parametrize("command, count", [("compare", "100"), ("simulate", "1,000")])
def test_the_help_says_how_many_requests_a_run_takes(command, count, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert f"faster or slower: {count} in each run" in " ".join(capsys.readouterr().out.split())


def test_a_range_too_low_for_a_year_is_told_before_anything_is_served(capsys):
    talking = [word for word in SIMULATE if word != "--quiet"]
    assert main([*talking, "--slo-ttft-ms", "300", "--capacity-range", "1e-6:5"]) == 2
    out, err = capsys.readouterr()
    assert "s after the start; a year is the most" in err and "within the objectives" not in out + err


def test_steps_that_cost_nothing_have_no_highest_rate(capsys):
    nothing = [word for term in TERMS for word in ("--without", term)]
    assert main([*SIMULATE, "--slo-ttft-ms", "300", "--strategies", "continuous", *nothing]) == 2
    assert "all requests were served in no time, so no rate is too high" in capsys.readouterr().err
