"""The running comparison: one workload, a row a strategy, chapter by chapter."""

import pytest

from minibatcher import load_model
from minibatcher.claims import machine
from minibatcher.errors import InvalidParameter, UnknownName
from minibatcher.labkit import book_workload, running_comparison, scoreboard
from minibatcher.labkit.thread import strategies_until
from minibatcher.metrics import summarize
from minibatcher.scheduling import STRATEGIES


def test_each_chapter_adds_its_strategies():
    assert strategies_until("7.0") == ("solo",)
    assert strategies_until("7.1") == ("solo", "static", "dynamic")
    assert strategies_until("7.3") == ("solo", "static", "dynamic", "continuous", "chunked")
    assert set(strategies_until("7.3")) == {"solo", *STRATEGIES}
    with pytest.raises(UnknownName):
        strategies_until("7.4")


def test_the_workload_has_a_long_tail_and_long_prompts():
    rows = list(book_workload())
    assert len(rows) == 32 and all(row.arrival_time == 0 for row in rows)
    assert max(r.output_tokens for r in rows) > 3 * sorted(r.output_tokens for r in rows)[16]
    assert sum(r.prompt_tokens > 200 for r in rows) >= 4
    assert all(r.prompt_tokens + r.output_tokens <= 2_048 for r in rows)  # the bundled model's context


def test_a_model_or_a_cost_model():
    with pytest.raises(InvalidParameter, match="not both"):
        running_comparison("7.0")


@pytest.fixture(scope="module")
def simulated():
    return running_comparison("7.3", cost=machine())


def test_the_table_is_what_the_metrics_say(simulated, capsys):
    scoreboard(simulated, price_per_hour=12.0)
    title, *lines = capsys.readouterr().out.splitlines()
    assert title.startswith("SIMULATED") and "requests/s arrive" in " ".join([title, lines[0]])
    cells = {line.split()[0]: line for line in lines if line.split()[0] in simulated}
    assert list(cells) == list(strategies_until("7.3"))
    first = summarize(simulated["solo"])["output_tokens_per_s"]
    for name, timeline in simulated.items():
        s = summarize(timeline)
        assert f"  {len(timeline.steps):,}  " in f"  {cells[name]}  "
        assert f"{s['output_tokens_per_s'] / first:.2f} ×" in cells[name]
        assert f"{100 * s['slot_occupancy']:.0f} %" in cells[name]
        price = 12 / 3600 / s["output_tokens_per_s"] * 1e6
        assert float(cells[name].split()[-1]) == pytest.approx(price, abs=0.01)


def test_every_strategy_has_its_reason_in_the_table(simulated):
    """What the chapters promise of it, for the 70B model."""
    s = {name: summarize(timeline) for name, timeline in simulated.items()}
    assert s["static"]["output_tokens_per_s"] > 4 * s["solo"]["output_tokens_per_s"]
    assert s["continuous"]["output_tokens_per_s"] > 2 * s["static"]["output_tokens_per_s"]
    assert s["chunked"]["itl_ms"]["p99"] < 0.3 * s["continuous"]["itl_ms"]["p99"]
    assert s["chunked"]["output_tokens_per_s"] > 0.95 * s["continuous"]["output_tokens_per_s"]


def test_measured_runs_say_whether_their_answers_are_the_same(capsys):
    runs = running_comparison("7.1", load_model("bard"))
    scoreboard(runs)
    out = " ".join(capsys.readouterr().out.split())
    assert (
        out.startswith("MEASURED")
        and "all requests at once" in out
        and "Answers: the same, token for token, in every run." in out
    )
    steps = {name: len(t.steps) for name, t in runs.items()}
    assert steps["static"] == steps["dynamic"] < steps["solo"] == sum(r.output_tokens for r in book_workload())

    next(iter(runs["static"].requests.values())).output_token_ids[0] += 1
    scoreboard(runs)
    assert "NOT the same" in " ".join(capsys.readouterr().out.split())
