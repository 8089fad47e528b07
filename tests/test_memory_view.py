"""The memory film's data: what is packed is what the runs did; its text, its size, and what it refuses."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from fakes import fake_requests, fake_run
from figure_cases import one_pool, preempting, small, small_blocks
from test_metrics import by_hand

from minibatcher.errors import InvalidParameter
from minibatcher.timeline import RowState, Timeline
from minibatcher.viz import memory_view
from minibatcher.viz.memory_map import all_tables, pieces_at, tables_at
from minibatcher.viz.memory_view import _Holds, _pack, moments_of


def unpacked(data: dict, arrays: dict[str, np.ndarray]) -> Iterator[dict[str, tuple[int, bool, list[int]]]]:
    """Moment by moment: request → its tokens, whether it has ended, its block table."""
    names = [story[0] for story in data["requests"]]
    for column in range(len(arrays["time"])):
        found = {}
        for request, first, last, tokens, growth, ended in arrays["rows"].reshape(-1, 6).tolist():
            if first <= column < last:
                assert names[request] not in found
                found[names[request]] = (tokens + growth * (column - first), bool(ended), {})
        for request, first, last, block, count, place in arrays["holds"].reshape(-1, 6).tolist():
            if first <= column < last:
                found[names[request]][2].update({place + i: block + i for i in range(count)})
        for name, (tokens, ended, places) in found.items():
            assert sorted(places) == list(range(len(places)))
            found[name] = tokens, ended, [places[i] for i in range(len(places))]
        yield found


RUNS = {
    "slices": lambda: one_pool()["static"],
    "blocks": lambda: one_pool()["continuous"],
    "chunked": lambda: small()["chunked"],
    "small blocks": small_blocks,
    "preempting": preempting,
    "a part": lambda: one_pool()["continuous"].slice(20, 60),
    "by hand": by_hand,
    "idle at times": lambda: fake_run("continuous", fake_requests(6, rate=1.0)),
}


@pytest.mark.parametrize("name", list(RUNS))
@pytest.mark.parametrize("most", [10_000, 25])
def test_what_is_packed_is_what_the_run_did(name, most):
    timeline = RUNS[name]()
    data, arrays, moments = _pack(timeline, most)
    real = list(all_tables(timeline)[0])
    assert len(moments) == len(arrays["time"]) <= most + 1
    for moment, found in zip(moments, unpacked(data, arrays)):
        if moment.position is None:
            assert not found and moment[2:] == (0, moment.num_waiting, 0, 0, 0)
            continue
        step = timeline.steps[moment.position]
        assert found == {
            row.request_id: (row.context, row.state is RowState.FINISHED, real[moment.position][row.request_id])
            for row in step.rows
        }
        assert moment.time == step.start - timeline.span[0]
        assert moment.used + moment.ended == sum(row.context for row in step.rows)
        assert moment.num_waiting == len(timeline.waiting_at(moment.position))
    assert moments[0].time == arrays["time"][0] == moments_of(timeline)[0][0]
    assert moments[-1].position is None
    assert moments[-1].time == timeline.steps[-1].end - timeline.span[0] <= data["duration"]
    if most == 10_000:
        assert data["bin"] == 1 and len(moments) >= len(timeline.steps)


@pytest.mark.parametrize("name", ["slices", "blocks", "chunked", "small blocks"])
def test_the_figures_are_the_records(name):
    timeline = RUNS[name]()
    data, _, moments = _pack(timeline, 10_000)
    assert data["wrong"] == 0
    for moment in moments:
        if moment.position is None:
            continue
        step = timeline.steps[moment.position]
        assert (moment.used + moment.ended, moment.reserved) == (step.kv_tokens, step.kv_used_blocks * data["size"])
        pieces = pieces_at(timeline, moment.position)
        used = sum(piece.stop - piece.start for piece in pieces if piece.kind == "used")
        assert moment.used == used and moment.wasted_share == 1 - used / moment.reserved


def test_all_tables_are_those_of_each_moment():
    timeline = one_pool()["continuous"]
    for position, tables in enumerate(all_tables(timeline)[0]):
        assert tables == tables_at(timeline, position)


def test_prompts_may_get_their_blocks_as_they_are_computed():
    timeline = small_blocks()
    size = timeline.header["block_size"]
    counts = [sum(-(-row.context // size) for row in step.rows) for step in timeline.steps]
    assert counts != [step.kv_used_blocks for step in timeline.steps]
    steps = [replace(step, kv_used_blocks=count) for step, count in zip(timeline.steps, counts)]
    tables, wrong = all_tables(Timeline(timeline.clock, timeline.header, steps, timeline.requests))
    assert wrong == 0 and [sum(map(len, table.values())) for table in tables] == counts
    steps[-1] = replace(steps[-1], kv_used_blocks=0)
    assert all_tables(Timeline(timeline.clock, timeline.header, steps, timeline.requests))[1] == 1


def test_who_comes_back_to_the_same_blocks_was_away_in_between():
    holds = _Holds()
    for column, tables in enumerate([{0: [4, 5, 9]}, {0: [4, 5, 9, 8]}, {}, {0: [4, 5, 9, 8]}]):
        holds.add(column, tables)
    assert holds.spans == [
        [0, 0, 2, 4, 2, 0],
        [0, 0, 2, 9, 1, 2],
        [0, 1, 2, 8, 1, 3],
        [0, 3, 4, 4, 2, 0],
        [0, 3, 4, 9, 1, 2],
        [0, 3, 4, 8, 1, 3],
    ]


def test_nobody_holds_anything_while_the_engine_waits():
    found = moments_of(RUNS["idle at times"]())
    assert all(later > earlier for (earlier, _), (later, _) in pairwise(found))
    assert [position for _, position in found].count(None) == 5 and found[-1][1] is None
    assert [position for _, position in moments_of(one_pool()["static"])].count(None) == 1


def test_words_and_size():
    view = memory_view(one_pool())
    assert len(view.html()) < 150_000
    assert view.alt.startswith("Memory map of the KV pool") and "static: on average 8" in view.alt
    static, continuous = view.text.split("\n\n")
    assert static.startswith("static, simulated: a pool of 640 tokens in slices of 160")
    assert continuous.splitlines()[-1].startswith("On average 14 % of what is reserved holds nothing")
    assert len(continuous.splitlines()) == 13
    alone = memory_view(one_pool()["continuous"])
    assert len(alone.data["runs"]) == 1 and alone.data == memory_view(one_pool()["continuous"]).data
    assert alone.data["start"] in alone.arrays["0.time"]


def test_a_long_run_is_thinned_out():
    view = memory_view(one_pool(), max_moments=50)
    assert all(run["bin"] > 1 for run in view.data["runs"])
    assert max(view.arrays["0.time"].size, view.arrays["1.time"].size) <= 51


def test_what_makes_no_picture_is_a_sentence():
    with pytest.raises(InvalidParameter, match="a picture of KV memory needs at least one run"):
        memory_view({})
    with pytest.raises(InvalidParameter, match="max_moments must be a whole number of at least 2, not 1"):
        memory_view(one_pool(), max_moments=1)
    run = one_pool()["continuous"]
    sharing = Timeline(run.clock, run.header | {"enable_prefix_caching": True}, run.steps, run.requests)
    with pytest.raises(InvalidParameter, match="prefix caching"):
        memory_view(sharing)
    with pytest.raises(InvalidParameter, match="its header says block_size None"):
        memory_view(Timeline(run.clock, run.header | {"block_size": None}, run.steps, run.requests))
    tiny = Timeline(run.clock, run.header | {"block_size": 1}, run.steps, run.requests)
    with pytest.raises(InvalidParameter, match="need more blocks than its pool has"):
        memory_view(tiny)
