"""Still plots: each passes the figure check, shows the numbers of its runs, and turns empty input into a sentence."""

import inspect
import pkgutil
import time
from importlib import import_module
from itertools import pairwise

import numpy as np
import pytest
from fakes import fake_engine, fake_requests, fake_run
from figure_cases import FIGURES, laptop_cost, one_pool, preempting, small
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text
from test_metrics import by_hand

from minibatcher import viz
from minibatcher.errors import InvalidParameter
from minibatcher.labkit import show
from minibatcher.metrics import itl, summarize, ttft
from minibatcher.request import Request, SamplingParams
from minibatcher.timeline import RowState, Timeline
from minibatcher.utilisation import utilisation
from minibatcher.viz.check import check_figure, in_palette
from minibatcher.viz.gantt import preempted_gaps
from minibatcher.viz.kv import occupancy
from minibatcher.viz.memory_map import pieces_at, tables_at
from minibatcher.viz.palette import OKABE_ITO, tint
from minibatcher.viz.roofline import step_points


def empty() -> Timeline:
    return Timeline("measured", {"strategy": "static", "max_num_seqs": 3, "block_size": 4})


def words(figure: Figure) -> str:
    return "\n".join(text.get_text() for text in figure.findobj(Text))


def curve(ax, label: str):
    return next(line for line in ax.lines if line.get_label() == label)


# The figure check, over every figure of the package


@pytest.mark.parametrize(("name", "case", "make"), FIGURES, ids=[f"{name}-{case}" for name, case, _ in FIGURES])
def test_every_figure_passes_the_check(name, case, make):
    assert check_figure(make()) == []


def test_every_figure_maker_is_in_the_list():
    makers = set()
    for module in pkgutil.iter_modules(viz.__path__, "minibatcher.viz."):
        for name, function in inspect.getmembers(import_module(module.name), inspect.isfunction):
            returns = inspect.signature(function).return_annotation
            drawn = name.startswith(("plot_", "draw", "_still")) and returns in ("Figure", "Axes")
            if drawn and function.__module__ == module.name:
                makers.add(name)
    assert makers == {name for name, _, _ in FIGURES}
    assert {name for name in viz.__all__ if name.startswith("plot_")} <= makers


def good() -> Figure:
    figure = Figure(figsize=(6, 4), layout="constrained")
    ax = figure.add_subplot()
    ax.plot([0, 1, 2], [0, 1, 4], color=OKABE_ITO["blue"])
    ax.set_xlabel("time, s")
    ax.set_ylabel("output, tokens")
    ax.set_title("A figure")
    figure.alt = "A line that rises from 0 to 4 tokens within 2 seconds, ever more steeply."
    return figure


def with_overlap(figure: Figure) -> None:
    figure.axes[0].text(1, 2, "one thing", color="black")
    figure.axes[0].text(1.02, 2.05, "another")


def with_long_ticks(figure: Figure) -> None:
    figure.axes[0].set_xticks(np.linspace(0, 2, 30), [f"{v:.4f}" for v in np.linspace(0, 2, 30)])


def with_clipped(figure: Figure) -> None:
    figure.axes[0].text(1.9, 2, "this runs over the edge", clip_on=True)


def with_outside(figure: Figure) -> None:
    figure.text(0.95, 0.5, "this runs off the sheet")


def with_exponents(figure: Figure) -> None:
    figure.axes[0].set_yscale("symlog")
    figure.axes[0].set_ylim(0, 1000)


def with_fill(figure: Figure) -> None:
    figure.axes[0].fill_between([0, 1], [0, 1], color="#ff00ff")


FAULTS = {
    "no alt": (lambda f: delattr(f, "alt"), "figure.alt must tell"),
    "alt without a number": (
        lambda f: setattr(f, "alt", "A line that rises, ever more steeply, to the right."),
        "name a",
    ),
    "short alt": (lambda f: setattr(f, "alt", "4 tokens"), "at least 40 characters"),
    "no title": (lambda f: f.axes[0].set_title(""), "no title"),
    "no label": (lambda f: f.axes[0].set_xlabel(""), "the x axis of picture 0 has no label"),
    "no unit": (lambda f: f.axes[0].set_ylabel("output"), "the y axis of picture 0 names no unit: 'output'"),
    "foreign line": (lambda f: f.axes[0].lines[0].set_color("red"), "the colour #FF0000"),
    "foreign marker": (lambda f: f.axes[0].lines[0].set(marker="o", markerfacecolor="lime"), "the colour #00FF00"),
    "foreign bar": (lambda f: f.axes[0].bar([0], [1], color="tab:purple"), "the colour #9467BD"),
    "foreign fill": (with_fill, "the colour #FF00FF"),
    "foreign text": (lambda f: f.axes[0].text(1, 2, "red", color="red"), "the colour #FF0000"),
    "foreign image": (lambda f: f.axes[0].imshow([[0, 1]], cmap="viridis", aspect="auto"), "the colour #440154"),
    "overlap": (with_overlap, "'one thing' and 'another' overlap"),
    "crowded ticks": (with_long_ticks, "overlap"),
    "clipped by the axes": (with_clipped, "'this runs over the edge' is clipped"),
    "off the sheet": (with_outside, "'this runs off the sheet' is clipped"),
    "small print": (lambda f: f.axes[0].text(1, 2, "tiny", fontsize=7), "'tiny' has 7 points"),
    "small exponents": (with_exponents, "points, of which 6"),
}


def test_a_good_figure_passes_and_is_left_as_it_was():
    figure = good()
    canvas, dpi = figure.canvas, figure.dpi
    assert check_figure(figure) == []
    assert figure.canvas is canvas and figure.dpi == dpi


@pytest.mark.parametrize("fault", FAULTS)
def test_the_check_finds(fault):
    figure = good()
    spoil, phrase = FAULTS[fault]
    spoil(figure)
    problems = check_figure(figure)
    assert problems and all(isinstance(problem, str) for problem in problems)
    assert any(phrase in problem for problem in problems), problems


def test_both_zooms_are_looked_at():
    figure = good()
    a = figure.text(0.3, 0.5, "left")
    figure.text(0.36, 0.5, "right")
    assert check_figure(figure) == []
    a.set_text("left enough to touch")
    assert {problem[:9] for problem in check_figure(figure)} == {"at 100 % ", "at 80 % z"}


def test_palette_tints_and_greys_pass():
    for colour in OKABE_ITO.values():
        for share in (1.0, 0.6, 0.35, 0.12, 0.0):
            assert in_palette(tint(colour, share))
    assert in_palette((0.5, 0.5, 0.5)) and in_palette((0, 0, 0))
    for foreign in ((1, 0, 0), (0, 1, 0), (0.4, 0.2, 0.6), (0.0, 0.3, 0.45)):  # the last is a shade of blue, no tint
        assert not in_palette(foreign)
    # matplotlib's own colours, some of which are near
    assert not any(in_palette(to_rgb(f"C{i}")) for i in range(10) if i != 7)  # C7 is grey


# What the figures show


def test_roofline_points_by_hand():
    timeline, cost = by_hand(), laptop_cost()
    points = step_points(timeline, cost)
    assert {kind: len(found) for kind, found in points.items()} == {"decode": 2, "prefill": 1, "mixed": 1}
    # The last step decodes c alone: one token, one row of logits, five tokens in its cache, in half a second.
    flops = cost.model.linear_flops(1, 1) + cost.model.attention_flops(5)
    read = cost.model.linear_bytes("float32") + 5 * cost.model.kv_bytes_per_token("float32")
    assert points["decode"][1] == pytest.approx((flops / read, flops / 0.5))


def test_roofline_points_add_up_to_the_utilisation():
    timeline, cost = small()["static"], laptop_cost()
    points = np.concatenate(list(step_points(timeline, cost).values()))
    order = np.concatenate([[i for i, s in enumerate(timeline.steps) if kind_of(s) == kind] for kind in KINDS])
    seconds = np.array([timeline.steps[int(i)].duration for i in order])
    peak = cost.device.rate("float32") * timeline.duration
    assert points[:, 1] @ seconds / peak == pytest.approx(utilisation(timeline, cost)["hfu"])


KINDS = ("decode", "prefill", "mixed")


def kind_of(step) -> str:
    states = {row.state for row in step.rows if row.num_tokens}
    return "decode" if RowState.PREFILL not in states else "mixed" if RowState.DECODE in states else "prefill"


def test_roofline_draws_the_machine():
    figure = viz.plot_roofline(small()["chunked"], laptop_cost())
    ax = figure.axes[0]
    x, y = ax.lines[0].get_data()
    assert x[1] == pytest.approx(120 / 25) and list(y[1:]) == pytest.approx([120, 120])
    assert y[0] == pytest.approx(25 * x[0])
    assert "as measured" in words(figure) and "GFLOP/s, simulated" in words(figure)
    above = viz.plot_roofline(small()["chunked"], laptop_cost("qwen2.5-0.5b"))
    steps = len(small()["chunked"].steps)
    assert f"{steps} steps above it" in words(above) and "simulated for another machine" in above.alt


def test_latency_curves_are_those_of_the_samples():
    runs = small()
    figure = viz.plot_latency_cdf(runs)
    for name, timeline in runs.items():
        samples = np.sort([ttft(r) for r in timeline.requests.values()]) * 1e3
        x, y = curve(figure.axes[0], name).get_data()
        assert y[0] == 0 and y[-1] == 1 and x[-1] == pytest.approx(samples[-1])
        for sample in samples:  # the share that took at most so long
            assert y[np.searchsorted(x, sample + 1e-9) - 1] == pytest.approx((samples <= sample + 1e-9).mean())
    assert f"chunked {summarize(runs['chunked'])['ttft_ms']['p50']:.3g} and" in figure.alt
    assert len({str(curve(figure.axes[0], name)._unscaled_dash_pattern) for name in runs}) == 4
    colours = {to_hex(curve(figure.axes[0], name).get_color()) for name in runs}
    assert len(colours) == 4


def test_long_curves_are_thinned_but_keep_their_ends():
    timeline = fake_run("continuous", fake_requests(120, seed=9, rate=200, longest=400), num_blocks=400)
    gaps = sorted(gap for r in timeline.requests.values() for gap in itl(r))
    assert len(gaps) > 2100
    x, y = curve(viz.plot_latency_cdf(timeline).axes[1], "continuous").get_data()
    assert len(x) <= 2002 and (x[0], x[-1]) == pytest.approx((gaps[0] * 1e3, gaps[-1] * 1e3)) and y[-1] == 1


def test_runs_without_a_sample_say_so():
    one_token = fake_run("solo", fake_requests(1, seed=1, longest=1))
    figure = viz.plot_latency_cdf(one_token)
    assert "no sample" in words(figure) and "Inter-token latency, p50 and p99 in ms: solo no sample" in figure.alt


def test_sweep_shows_the_percentiles_in_order_of_the_knob():
    runs = {512: small()["chunked"], 64: small()["static"], 128: small()["dynamic"]}
    figure = viz.plot_latency_sweep(runs, "max_num_batched_tokens")
    for ax, key in zip(figure.axes, ("ttft_ms", "itl_ms")):
        for p in ("p50", "p90", "p99"):
            x, y = curve(ax, p).get_data()
            assert list(x) == [64, 128, 512]
            assert list(y) == pytest.approx([summarize(runs[value])[key][p] for value in (64, 128, 512)])
        assert ax.get_xlabel() == "token budget of a step, tokens"
    assert f"{summarize(runs[64])['ttft_ms']['p99']:,.0f} at 64" in figure.alt


def test_batch_sizes_from_numbers_and_from_runs():
    figure = viz.plot_batch_throughput({8: 300.0, 2: 50.0}, ridge=6, clock="measured")
    ax = figure.axes[0]
    assert list(curve(ax, "measured").get_ydata()) == [50, 300]
    assert list(curve(ax, "proportional to batch size").get_ydata()) == [50, 200]
    assert list(curve(ax, "ridge: batch size 6").get_xdata()) == [6, 6]
    assert "50 at 2, 300 at 8" in figure.alt and "tokens/s, measured" in words(figure)
    run = viz.plot_batch_throughput({4: small()["static"], 8: 300.0}, clock="measured")
    (speed, _) = curve(run.axes[0], "measured and simulated").get_ydata()
    assert speed == pytest.approx(summarize(small()["static"])["output_tokens_per_s"])


def test_spread_shows_median_least_and_most():
    runs = {"static": [fake_run("static", fake_requests(8, seed=s, longest=30)) for s in range(3)]}
    speeds = sorted(summarize(run)["output_tokens_per_s"] for run in runs["static"])
    figure = viz.plot_strategy_spread(runs)
    ax = figure.axes[0]
    assert ax.patches[0].get_width() == pytest.approx(speeds[1])
    assert list(ax.lines[0].get_xdata()) == pytest.approx([speeds[0], speeds[2]])
    assert f"static {speeds[1]:,.0f} ({speeds[0]:,.0f} to {speeds[2]:,.0f})" in figure.alt


def test_gantt_rows_cover_what_happened():
    timeline = preempting()
    gaps = preempted_gaps(timeline)
    assert {name: len(found) for name, found in gaps.items()} == {
        name: r.num_preemptions for name, r in timeline.requests.items() if r.num_preemptions
    }
    origin = timeline.span[0]
    for name, found in gaps.items():
        for lost, back in found:  # nobody computes in a gap
            inside = [s for s in timeline.steps if lost <= s.start - origin < back - 1e-9]
            assert inside and not any(row.request_id == name for s in inside for row in s.rows)
    figure = viz.plot_gantt(timeline)
    ax = figure.axes[0]
    queued = [line.get_xdata() for line in ax.lines if line.get_linestyle() == "-"]
    for record, (left, right) in zip(timeline.requests.values(), queued):
        assert left == pytest.approx(record.arrival_time - origin)
        assert right == pytest.approx(record.first_scheduled_time - origin)
    assert sum(line.get_linestyle() == "--" for line in ax.lines) == sum(map(len, gaps.values())) > 3
    first = ax.collections[-1].get_offsets()
    assert sorted(first[:, 0]) == pytest.approx(sorted(r.token_times[0] - origin for r in timeline.requests.values()))
    assert "preempted, queued again" in words(figure)


def test_gantt_shows_some_of_many_and_those_who_never_ran():
    figure = viz.plot_gantt(small()["chunked"], most=5)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["r0", "r3", "r6", "r9"]
    assert "12 requests in order of arrival, 4 of them shown" in words(figure)
    late = by_hand()
    late.steps = late.steps[:1]  # c and d are still queued at the end
    late.requests["c"].finish_time = 1.7  # given up, and d is still there when the run ends at 1.9
    queued = [line.get_xdata()[1] for line in viz.plot_gantt(late).axes[0].lines]
    assert queued == pytest.approx([0.1, 0.1, 0.7, 0.9])


def test_occupancy_by_hand():
    times, filled, reserved, _, pool = occupancy(by_hand())
    assert pool == 40
    assert times == pytest.approx([0, 0.1, 0.5, 0.6, 1.0, 1.5])
    assert list(filled) == [0, 7, 8, 11, 5, 0] and list(reserved) == [0, 12, 12, 16, 8, 0]
    figure = viz.plot_kv_occupancy(by_hand())
    held, reserved_for = 7 * 0.4 + 8 * 0.1 + 11 * 0.4 + 5 * 0.5, 12 * 0.5 + 16 * 0.4 + 8 * 0.5
    assert f"{100 * reserved_for / 40 / 1.5:.0f} % reserved" in figure.alt and "40 % reserved at the peak" in figure.alt
    assert f"{100 * held / reserved_for:.0f} % of what was reserved held a token" in words(figure)


def test_an_idle_pool_is_empty():
    todo = fake_requests(2, seed=1, longest=5)
    todo[1].arrival_time = 10.0  # long after the first one is done
    times, filled, reserved, cached, _ = occupancy(fake_run("continuous", todo))
    waiting = np.searchsorted(times, 5.0) - 1
    assert filled[waiting] == reserved[waiting] == 0 and times[waiting + 1] == pytest.approx(10.0)
    assert not cached.any()


def test_kept_prefixes_are_shown_and_shared_tokens_are_counted_once():
    head, other = list(range(16)), list(range(50, 53))
    todo = [
        Request(f"r{i}", [*head, 100 + i], SamplingParams(max_tokens=4), arrival_time=0.04 * (i > 0)) for i in range(3)
    ]
    todo.append(Request("other", other, SamplingParams(max_tokens=60)))
    engine = fake_engine("chunked", block_size=8, num_blocks=16, enable_prefix_caching=True)
    timeline = engine.run(todo)
    _, filled, reserved, cached, pool = occupancy(timeline)
    assert pool == 128 and all(filled <= reserved) and all(reserved + cached <= pool)
    three = next(step for step in timeline.steps if len(step.rows) == 3)  # two blocks shared, one each
    context = next(row.context for row in three.rows if row.request_id == "other")
    assert three.kv_tokens == 16 + 1 + 1 + context and three.kv_cached_blocks == 0
    assert three.kv_used_blocks == 4 + -(-context // 8)
    assert cached[-1] == 16  # the head outlives its owners
    figure = viz.plot_kv_occupancy(timeline)
    assert "kept for its prefixes" in figure.alt and "prefixes kept, nobody's" in words(figure)
    with pytest.raises(InvalidParameter, match="prefix caching"):
        viz.plot_memory_map(timeline)


def watched_run(name: str, n: int, **options):
    """The timeline of a run, and the tables that its KV pool really had in each step."""
    engine = fake_engine(name, seconds_per_step=0.008, seconds_per_token=0.0001, **options)
    runner, tables = engine.runner, []
    run = runner.run

    def watched(plan):
        running = engine.scheduler.running
        tables.append({r.request_id: list(runner.kv.table(r.request_id)) for r in running})
        return run(plan)

    runner.run = watched
    return engine.run(fake_requests(n, seed=4, rate=60.0, longest=60)), tables


@pytest.mark.parametrize("name", ["continuous", "chunked"])
def test_tables_led_through_the_record_are_the_real_ones(name):
    options = {"num_blocks": 200, "block_size": 4, "max_model_len": 128, "max_num_seqs": 6}
    timeline, tables = watched_run(name, 25, max_num_batched_tokens=40, **options)
    assert len(tables) == len(timeline.steps) > 100 and len({str(t) for t in tables}) > 50
    for position, real in enumerate(tables):
        assert tables_at(timeline, position) == real, position


def test_after_preemptions_the_number_of_blocks_still_agrees():
    timeline = preempting()
    assert sum(r.num_preemptions for r in timeline.requests.values()) > 3
    for position, step in enumerate(timeline.steps):
        tables = tables_at(timeline, position)
        assert sum(map(len, tables.values())) == step.kv_used_blocks
        owned = [block for table in tables.values() for block in table]
        assert len(set(owned)) == len(owned)


@pytest.mark.parametrize("name", ["static", "continuous"])
def test_map_pieces_add_up_to_the_record(name):
    timeline = one_pool()[name]
    size = timeline.header["block_size"]
    for position, step in enumerate(timeline.steps):
        pieces = pieces_at(timeline, position)
        kinds = {kind: sum(p.stop - p.start for p in pieces if p.kind == kind) for kind in ("used", "ended", "unused")}
        assert kinds["used"] + kinds["ended"] == step.kv_tokens
        assert sum(kinds.values()) == step.kv_used_blocks * size
        ordered = sorted(pieces)
        assert all(a.stop <= b.start for a, b in pairwise(ordered))
        ended = {row.request_id for row in step.rows if row.state is RowState.FINISHED}
        assert {p.owner for p in pieces if p.kind == "ended"} == ended


def test_map_is_drawn_at_the_moment_asked_for():
    runs = one_pool()
    assert "0.5 s after the first arrival, simulated" in words(viz.plot_memory_map(runs, time=0.5))
    both = viz.plot_memory_map(runs)
    step = max(runs["continuous"].steps, key=lambda step: step.kv_tokens)
    assert f"blocks of 16 tokens) holds {len(step.rows)} requests" in both.alt


def test_pools_of_unequal_size_have_equal_areas_for_equal_tokens():
    figure = viz.plot_memory_map({"640 tokens": one_pool()["static"], "3,200 tokens": small()["static"]})
    assert {ax.get_ylim() for ax in figure.axes} == {(4, 0)} and {ax.get_xlim() for ax in figure.axes} == {(0, 800)}
    assert "no part of the pool" in words(figure)


# What can't be drawn, and what is enormous


@pytest.mark.parametrize(
    ("draw", "sentence"),
    [
        (lambda: viz.plot_latency_cdf({}), "a picture of latencies needs at least one run"),
        (lambda: viz.plot_latency_cdf({"x": empty()}), "the run 'x' has none"),
        (lambda: viz.plot_latency_sweep({}, "max_queue_delay_s"), "a sweep needs runs by numbers"),
        (lambda: viz.plot_latency_sweep({"slow": by_hand()}, "speed, s"), r"'speed, s', not \['slow'\]"),
        (lambda: viz.plot_latency_sweep({1: empty()}, "speed, s"), "runs with steps"),
        (lambda: viz.plot_roofline(empty(), laptop_cost()), "a roofline needs runs with steps"),
        (lambda: viz.plot_batch_throughput({}), "at least one point"),
        (lambda: viz.plot_batch_throughput({1: 3.0}), "measured or simulated: clock is None"),
        (lambda: viz.plot_batch_throughput({0: 3.0}, clock="measured"), "numbers above 0, not 0 and 3.0"),
        (lambda: viz.plot_batch_throughput({1: float("nan")}, clock="measured"), "not 1 and nan"),
        (lambda: viz.plot_batch_throughput({1: 3.0}, clock="measured", ridge=-1), "ridge must be a batch size above 0"),
        (lambda: viz.plot_strategy_spread({}), "at least one run of each strategy"),
        (lambda: viz.plot_strategy_spread({"static": []}), "at least one run of each strategy"),
        (lambda: viz.plot_gantt(empty()), "a Gantt chart needs runs with steps"),
        (lambda: viz.plot_gantt(by_hand(), most=0), "most must be a whole number"),
        (lambda: viz.plot_kv_occupancy(empty()), "a picture of KV memory needs runs with steps"),
        (lambda: viz.plot_memory_map({}), "a memory map needs at least one run"),
        (lambda: viz.plot_memory_map(by_hand(), time=-1.0), "time must be a number of seconds"),
    ],
)
def test_what_cannot_be_drawn_gets_a_sentence(draw, sentence):
    with pytest.raises(InvalidParameter, match=sentence):
        draw()


def test_damaged_records_get_a_sentence():
    nameless = by_hand()
    del nameless.header["block_size"]
    with pytest.raises(InvalidParameter, match="its header says block_size None"):
        viz.plot_kv_occupancy(nameless)
    crowded = by_hand()
    crowded.steps[0].rows[0] = crowded.steps[0].rows[0]._replace(context=400)
    with pytest.raises(InvalidParameter, match="need more blocks than its pool has"):
        viz.plot_memory_map(crowded, time=0.0)
    standing = by_hand()
    for step in standing.steps:
        step.duration = 0.0
    with pytest.raises(InvalidParameter, match="computed something and took time"):
        viz.plot_roofline(standing, laptop_cost())


def test_enormous_timelines_are_drawn_quickly():
    base = fake_run("chunked", fake_requests(400, seed=1, rate=400, longest=400), num_blocks=600)
    assert len(base.steps) > 1500
    begun = time.process_time()
    for figure in (
        viz.plot_gantt(base),
        viz.plot_kv_occupancy(base),
        viz.plot_memory_map(base),
        viz.plot_roofline(base, laptop_cost()),
        viz.plot_latency_cdf(base),
    ):
        figure.draw_without_rendering()
    assert time.process_time() - begun < 30  # about 2 s


def test_show_takes_the_words_of_the_figure(monkeypatch):
    import IPython.display

    shown = []
    monkeypatch.setattr(IPython.display, "display", lambda data, raw: shown.append(data))
    figure = viz.plot_kv_occupancy(by_hand())
    show(figure)
    assert shown[0]["text/plain"] == figure.alt and 'alt="KV memory over time' in shown[0]["text/html"]
    show(figure, "my own words")
    assert shown[1]["text/plain"] == "my own words"
    with pytest.raises(InvalidParameter, match="no words"):
        show(Figure())
