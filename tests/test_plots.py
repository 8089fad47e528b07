"""Pictures: they show what the timeline says, with labels, and without a display."""

import subprocess
import sys
import time
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from fakes import fake_requests as requests
from fakes import fake_run as run
from test_metrics import by_hand

from minibatcher.errors import InvalidParameter
from minibatcher.metrics import summarize
from minibatcher.timeline import RowState, Timeline
from minibatcher.viz import describe, plot_comparison, plot_slots, slots_text
from minibatcher.viz.palette import (
    HATCHES,
    LABELS,
    LETTERS,
    OKABE_ITO,
    PADDING,
    REQUEST_COLOURS,
    request_colour,
    strategy_colour,
    tint,
)
from minibatcher.viz.plots import slot_runs


def pixels(figure) -> np.ndarray:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())


def texts(figure) -> str:
    from matplotlib.text import Text

    return "\n".join(text.get_text() for text in figure.findobj(Text))


def test_runs_by_hand():
    steps = sorted(slot_runs(by_hand(), "step"))
    assert [(r.slot, round(r.left, 3), round(r.right, 3), r.request_id, r.kind) for r in steps] == [
        (0, 0, 1, "a", RowState.PREFILL),
        (0, 1, 3, "a", RowState.DECODE),  # two steps merged
        (1, 0, 0.4, "b", RowState.PREFILL),  # 2 of 5 tokens
        (1, 0.4, 1, "b", PADDING),
        (1, 1, 2, "b", RowState.FINISHED),
        (1, 3, 4, "d", RowState.STALLED),
        (2, 2, 3, "c", RowState.PREFILL),
        (2, 3, 4, "c", RowState.DECODE),
    ]
    seconds = sorted(slot_runs(by_hand(), "time"))  # counted from the first arrival, 1.0
    assert (seconds[1].left, seconds[1].right) == (
        pytest.approx(0.5),
        pytest.approx(1.0),
    )  # until the next step, at 2.0
    assert (seconds[2].left, seconds[2].right) == (pytest.approx(0.1), pytest.approx(0.1 + 0.4 * 2 / 5))
    assert seconds[-1].right == pytest.approx(1.5)


@pytest.mark.parametrize("name", ["static", "dynamic", "continuous", "chunked"])
def test_runs_cover_every_row_once(name):
    timeline = run(name, requests(15, seed=4, longest=40))
    area = Counter()
    for r in slot_runs(timeline, "step"):
        area[r.kind] += r.right - r.left
    rows = Counter(row.state for step in timeline.steps for row in step.rows)
    padded = sum(
        1 - row.num_tokens / step.width
        for step in timeline.steps
        for row in step.rows
        if step.width and 0 < row.num_tokens < step.width
    )
    assert area[PADDING] == pytest.approx(padded)
    assert sum(area.values()) == pytest.approx(sum(rows.values()))
    assert area[RowState.FINISHED] == rows[RowState.FINISHED] and area[RowState.STALLED] == rows[RowState.STALLED]
    assert (padded > 0) == (name in ("static", "dynamic"))


def test_slots_picture():
    timeline = run("static", requests(12, seed=1, longest=40), max_num_seqs=6)
    ax = plot_slots(timeline)
    assert ax.get_ylim() == (5.5, -0.5) and ax.get_xlim() == (0, len(timeline.steps))
    assert ax.get_ylabel() == "slot" and "step" in ax.get_xlabel()
    assert ax.get_title(loc="left") == "static · 6 slots · simulated times"
    image = pixels(ax.figure)
    assert image.shape[1] == 1200
    colours = {tuple(c) for c in image[..., :3].reshape(-1, 3).tolist()}
    for request_id in timeline.requests:  # decode rows in their request's tint
        wanted = np.array(tint(request_colour(request_id), 0.6)) * 255
        assert min(np.abs(np.array(list(colours)) - wanted).max(axis=1)) <= 1.5, request_id
    legend = [text.get_text() for text in ax.get_legend().get_texts()]
    assert legend == [LABELS[k] for k in (RowState.PREFILL, RowState.DECODE, RowState.FINISHED, PADDING)]
    in_time = plot_slots(timeline, x="time")
    assert in_time.get_xlabel().endswith(", s") and in_time.get_xlim() == (0, pytest.approx(timeline.duration))


def test_idle_is_white_and_work_is_not():
    timeline = run("solo", requests(1, seed=1, longest=40))
    timeline.header["max_num_seqs"] = 2  # slot 1 never gets a request
    ax = plot_slots(timeline, legend=False)
    image = pixels(ax.figure)

    def pixel(x, y):
        column, row = ax.transData.transform((x, y))
        return tuple(image[image.shape[0] - 1 - round(row), round(column), :3].tolist())

    assert pixel(len(timeline.steps) * 0.3, 1) == (255, 255, 255)
    for height in (-0.4, 0, 0.4):
        assert pixel(len(timeline.steps) * 0.3, height) != (255, 255, 255)


def test_given_axes_are_used_and_pyplot_is_not():
    from matplotlib.figure import Figure

    figure = Figure()
    ax = figure.add_subplot()
    assert plot_slots(by_hand(), ax, x="time", title="mine", until=7.0) is ax
    assert ax.get_title(loc="left") == "mine" and ax.get_xlim()[1] == 7.0
    code = "import sys, minibatcher.viz; assert not {'matplotlib.pyplot', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_bad_axis_gets_a_sentence():
    with pytest.raises(InvalidParameter, match='x must be "step" or "time", not \'tokens\''):
        plot_slots(by_hand(), x="tokens")
    with pytest.raises(InvalidParameter, match="at least one run"):
        plot_comparison({})


def test_comparison_picture(tmp_path):
    names = ["static", "dynamic", "continuous", "chunked"]
    timelines = {name: run(name, requests(30, seed=6)) for name in names}
    figure = plot_comparison(timelines)
    pictures = [ax for ax in figure.get_axes() if ax.get_ylabel() == "slot"]
    assert len(pictures) == 4 and len(figure.get_axes()) == 7
    ends = {ax.get_xlim() for ax in pictures}
    assert ends == {(0, 1.005 * max(t.duration for t in timelines.values()))}
    assert [ax.get_ylim() for ax in pictures] == [(3.5, -0.5)] * 4
    words = texts(figure)
    assert "30 requests, 4 ways of batching them · times are simulated" in words
    for phrase in ("tokens/s, simulated", "ms, simulated", "Time to first token, p50 and p99", "before static"):
        assert phrase in words
    for name in names:
        assert f"{summarize(timelines[name])['output_tokens_per_s']:,.0f}" in words
    figure.savefig(tmp_path / "compare.png")
    image = pixels(figure)
    assert image.shape[1] == 1200
    assert 0.05 < (image[..., :3].min(axis=-1) < 250).mean() < 0.9


def test_long_tick_labels_stand_apart():
    slow = by_hand()
    for request in slow.requests.values():
        request.arrival_time -= 38_000.0  # seconds: TTFTs of 38 million ms
    figure = plot_comparison({"static": slow, "continuous": slow})
    pixels(figure)
    bars = [ax for ax in figure.get_axes() if ax.get_ylabel() != "slot"]
    assert "," in bars[1].get_xticklabels()[-1].get_text()
    for ax in bars:
        boxes = [label.get_window_extent() for label in ax.get_xticklabels() if label.get_text()]
        assert len(boxes) > 1 and all(a.x1 + 5 < b.x0 for a, b in pairwise(boxes))


def test_empty_and_single_runs_can_be_drawn():
    empty = Timeline("measured", {"strategy": "static", "max_num_seqs": 3, "block_size": 4})
    pixels(plot_slots(empty).figure)
    assert "no sample" in texts(plot_comparison({"static": empty}))
    pixels(plot_comparison({"by hand": by_hand()}))
    assert describe(empty).endswith("no step ran. 0 requests were submitted.")


def test_large_comparison_is_quick():
    base = run("continuous", requests(260, seed=1, rate=400, longest=400), max_num_seqs=16, num_blocks=600)
    steps = len(base.steps)
    assert steps > 700
    start = time.process_time()
    pixels(plot_comparison(dict.fromkeys(["static", "dynamic"], base)))
    assert time.process_time() - start < 20  # about 1 s; a patch for every row would take minutes


def test_describe_has_the_numbers():
    text = describe(by_hand())
    assert text == (
        "Slots of a run with strategy by hand (measured times): 3 slots, 4 steps and 4 requests in 1.75 s. Shares of "
        "the slots' steps: prefill 25 %, decode 25 %, stalled 8 %, ended but still in the batch 8 %, idle 33 %. 22 % "
        "of the tokens computed were padding and 3 output tokens came out per second."
    )


def test_slots_as_text():
    lines = slots_text(by_hand()).splitlines()
    assert lines[1:4] == ["slot  0 Pdd.", "slot  1 Px.s", "slot  2 ..Pd"]
    assert lines[4].startswith("One letter is one step: P prefill; d decode; s stalled; x ended")
    long = run("static", requests(30, seed=6))
    lines = slots_text(long, columns=50).splitlines()
    assert len(lines) == 1 + 4 + 1 and all(len(line) <= 8 + 50 for line in lines[1:5])
    assert f"One letter is {-(-len(long.steps) // 50)} steps" in lines[-1]


def test_palette():
    assert tuple(OKABE_ITO.values()) == REQUEST_COLOURS and len(set(REQUEST_COLOURS)) == 7
    assert len({request_colour(f"r{i}") for i in range(7)}) == 7
    assert request_colour("request-12") == request_colour("request-12") != request_colour("request-13")
    assert request_colour("chat") in REQUEST_COLOURS and request_colour("") in REQUEST_COLOURS
    assert tint("#0072B2", 1) == pytest.approx((0, 0x72 / 255, 0xB2 / 255)) and tint("#0072B2", 0) == (1, 1, 1)
    assert len(set(LETTERS.values())) == len(LETTERS) == len(LABELS)
    assert len(set(HATCHES.values())) == 4 and RowState.DECODE not in HATCHES
    assert strategy_colour("static") != strategy_colour("chunked") and strategy_colour("new") in REQUEST_COLOURS
