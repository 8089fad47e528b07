"""The padding picture's numbers: those of runs, those of the book; and its still form."""

import numpy as np
import pytest
from fakes import fake_engine
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg

from minibatcher.claims import fastest_finisher, padding_factors
from minibatcher.errors import InvalidParameter, UnknownName
from minibatcher.request import Request, SamplingParams
from minibatcher.timeline import RowState, Timeline
from minibatcher.viz.padding import (
    MAX_REQUESTS,
    ORDERS,
    budget_steps,
    ended_numbers,
    make_batches,
    padding_numbers,
    padding_text,
    padding_view,
    plot_padding,
)

a_length = st.integers(1, 40)
some_lengths = st.lists(st.tuples(a_length, a_length), min_size=1, max_size=12)


def run(strategy: str, lengths: list[int], outputs: list[int], **knobs) -> Timeline:
    """The timeline of the package's own scheduler with these requests, all there at once, and no model behind it."""
    engine = fake_engine(strategy, num_blocks=400, max_model_len=128, batch_timeout_s=0.0, **knobs)
    params = [SamplingParams(max_tokens=output, ignore_eos=True) for output in outputs]
    return engine.run([Request(f"r{r}", list(range(n)), params[r]) for r, n in enumerate(lengths)])


def test_a_short_prompt_beside_a_long_one_pays_eighty_times():
    numbers = padding_numbers((50, 4_000))
    assert numbers == (((0, 1),), 8_000, 4_050, 1 - 4_050 / 8_000, (80.0, 1.0))
    assert list(numbers.factors) == padding_factors([50, 4_000])
    view = padding_view()
    for words in (view.alt, view.text):
        assert "8,000 tokens computed, 4,050 useful, 49 % wasted" in words
        assert "The 50-token prompt pays 80 × the work it needs." in words


def test_the_fastest_finisher_is_that_of_the_claim():
    claim = fastest_finisher()
    numbers = ended_numbers([20] * 31 + [2_000], [range(32)])
    assert numbers.num_steps == claim.num_steps == 2_000
    assert numbers.most_ended == claim.max_ended_rows == 31
    assert numbers.share_of_steps == claim.share_of_steps == 0.99
    assert numbers.wasted_share == pytest.approx(claim.wasted_share)
    text = padding_text([100] * 32, [20] * 31 + [2_000])
    assert "In 99 % of the steps, 31 of 32 rows make tokens that are thrown away." in text


@given(some_lengths, st.integers(1, 5), st.sampled_from(["arrival", "bucketed"]))
def test_numbers_are_those_of_a_run_of_fixed_batches(requests, batch_size, order):
    lengths, outputs = map(list, zip(*requests))
    strategy = "dynamic" if order == "bucketed" else "static"
    timeline = run(strategy, lengths, outputs, max_num_seqs=batch_size, bucket_by_length=order == "bucketed")
    prefills = [step for step in timeline.steps if step.admitted]
    prefill = padding_numbers(lengths, batch_size, order)
    assert [tuple(int(name[1:]) for name in step.admitted) for step in prefills] == list(prefill.batches)
    assert sum(step.width * len(step.rows) for step in prefills) == prefill.computed
    assert sum(step.num_useful_tokens for step in prefills) == prefill.useful
    ended = ended_numbers(outputs, prefill.batches)
    rows = [row for step in timeline.steps for row in step.rows]
    assert (len(timeline.steps), len(rows)) == (ended.num_steps, ended.computed)
    assert sum(row.state is not RowState.FINISHED for row in rows) == ended.useful


@given(some_lengths, st.integers(1, 5), st.integers(1, 50))
def test_steps_under_a_budget_are_those_of_the_chunked_scheduler(requests, max_num_seqs, budget):
    lengths, outputs = map(list, zip(*requests))
    timeline = run("chunked", lengths, outputs, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
    ran = [{(row.request_id, row.num_tokens) for row in step.rows if row.num_tokens} for step in timeline.steps]
    steps = budget_steps(lengths, outputs, budget, max_num_seqs)
    assert ran == [
        {*((f"r{r}", 1) for r in step.decodes), *((f"r{r}", num_tokens) for r, num_tokens in step.chunks)}
        for step in steps
    ]


@given(st.lists(a_length, min_size=1, max_size=30), st.integers(1, 8), st.sampled_from(list(ORDERS)))
def test_every_request_stands_in_one_batch(lengths, batch_size, order):
    batches = make_batches(lengths, batch_size, order)
    assert sorted(r for batch in batches for r in batch) == list(range(len(lengths)))
    assert all(len(batch) == batch_size for batch in batches[:-1]) and len(batches[-1]) <= batch_size
    numbers = padding_numbers(lengths, batch_size, order)
    assert numbers.useful == sum(lengths) <= numbers.computed and min(numbers.factors) == 1
    if order == "sorted" and len(lengths) % batch_size == 0:
        assert numbers.computed <= padding_numbers(lengths, batch_size).computed


def test_sorting_helps_the_first_waste_not_the_second():
    chat = next(w for w in padding_view().data["workloads"] if w["name"] == "chat")["draws"][0]
    padding, ended = {}, {}
    for order in ORDERS:
        numbers = padding_numbers(chat["lengths"], chat["batch_size"], order)
        padding[order] = numbers.wasted_share
        ended[order] = ended_numbers(chat["outputs"], numbers.batches).wasted_share
    assert padding["sorted"] < 0.6 * padding["arrival"]
    assert ended["sorted"] == pytest.approx(ended["arrival"], abs=0.02)


def test_equal_lengths_waste_nothing():
    numbers = padding_numbers([512] * 8, 4)
    assert (numbers.computed, numbers.wasted_share, set(numbers.factors)) == (8 * 512, 0.0, {1.0})
    assert ended_numbers([128] * 8, numbers.batches)[3:] == (0.0, 0, 0.0)
    assert "pays" not in padding_text([512] * 8, [128] * 8, 4)


def test_a_little_waste_is_not_none():
    assert "< 1 % wasted" in padding_text([1_000, 999], [10, 10])
    assert "> 99 % wasted" in padding_text([1] * 255 + [4_000], [10] * 256)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"lengths": []}, "a prompt length is needed for at least one request"),
        ({"lengths": [50, 0]}, "a prompt length is a whole number of tokens from 1 to 131,072, not 0"),
        ({"lengths": [50, 2.5]}, "not 2.5"),
        ({"output_lengths": [20, 0]}, "an output length is a whole number of tokens from 1 to 131,072, not 0"),
        ({"output_lengths": [20]}, "2 prompts need as many output lengths, not 1"),
        ({"lengths": [1] * (MAX_REQUESTS + 1)}, f"at most {MAX_REQUESTS} requests, not {MAX_REQUESTS + 1}"),
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, not 0"),
        ({"budget": 0}, "budget must be a whole number of at least 1, not 0"),
    ],
)
def test_what_makes_no_picture_is_a_sentence(arguments, sentence):
    with pytest.raises(InvalidParameter, match=sentence.replace("(", r"\(")):
        padding_view(**arguments)


def test_unknown_names_list_the_known_ones():
    with pytest.raises(UnknownName, match="known: arrival, sorted, bucketed"):
        padding_view(order="longest")
    with pytest.raises(UnknownName, match="known: padded, packed, chunked"):
        padding_view(view="ragged")


def test_workloads_and_added_requests_are_the_same_each_time():
    assert padding_view().data == padding_view().data
    assert padding_view(seed=1).data["more"] != padding_view().data["more"]


@pytest.mark.parametrize("lengths", [(50, 4_000), (7,), (100,) * 8, tuple(range(1, 101)), (1,) * 256])
def test_the_still_figure_is_complete(lengths):
    figure = plot_padding(lengths, batch_size=8)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    assert len(np.unique(np.asarray(canvas.buffer_rgba()).reshape(-1, 4), axis=0)) > 20
    left, right = figure.axes
    assert left.get_xlabel() == "prompt's row, tokens" and right.get_xlabel() == "answer's row, steps of its batch"
    assert [key.get_text() for key in figure.legends[0].get_texts()] == [
        "useful (a colour a request)",
        "padding",
        "ended but still in the batch",
    ]
    size = figure.bbox
    for ax in figure.axes:
        tight = ax.get_tightbbox()
        assert size.x0 <= tight.x0 and tight.x1 <= size.x1 and size.y0 <= tight.y0 and tight.y1 <= size.y1
    titles = [ax.title.get_window_extent() for ax in figure.axes]
    assert not titles[0].overlaps(titles[1])


def test_the_bars_are_as_long_as_the_lengths():
    left, right = plot_padding((50, 4_000), (20, 2_000)).axes
    for ax, lengths in ((left, (50, 4_000)), (right, (20, 2_000))):
        spans = [(bar.get_x(), bar.get_width(), bool(bar.get_hatch())) for bar in ax.patches]
        short, long = lengths
        assert spans == [(0, short, False), (short, long - short, True), (0, long, False)]


def test_lengths_may_come_from_numpy():
    assert padding_numbers(np.array([50, 4_000])) == padding_numbers((50, 4_000))
    assert padding_view(np.array([50, 4_000]), np.array([20, 30])).data["workloads"][0]["draws"][0] == {
        "lengths": [50, 4_000],
        "outputs": [20, 30],
        "batch_size": None,
    }
