"""The live view, as far as it goes without a browser."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace

import numpy as np
import pytest
from fakes import fake_engine, solo_answer
from test_background import slow_engine
from test_metrics import by_hand

pytest.importorskip("ipywidgets", reason="the live view is made of ipywidgets")
pytest.importorskip("anywidget", reason="and of anywidget")

from minibatcher.request import Request, SamplingParams
from minibatcher.timeline import DeviceSample, Timeline
from minibatcher.viz.live import LiveView, panel, recent


def requests(n: int = 8) -> list[Request]:
    return [Request(f"r{i}", [i, 7], SamplingParams(max_tokens=5 + i)) for i in range(n)]


def watched(engine, todo, **options) -> tuple[LiveView, list]:
    view, sent = LiveView(engine, todo, **options), []
    tell = view.slots.tell
    view.slots.tell = lambda message, arrays=None: (sent.append((message, arrays)), tell(message, arrays))
    return view, sent


def test_every_step_is_shown_once_and_in_order():
    engine, todo = slow_engine(seconds=0.001), requests(30)
    view, sent = watched(engine, todo, every_s=0.01)
    view.start()
    assert view.wait(30) and view.run.error is None
    assert len(sent) > 3 and all(message["kind"] == "append" for message, _ in sent)
    firsts = [message["first"] for message, _ in sent]
    sizes = [len(arrays["start"]) for _, arrays in sent]
    assert firsts == np.cumsum([0, *sizes[:-1]]).tolist() and sum(sizes) == len(view.timeline.steps)
    assert [r.output_token_ids for r in todo] == [solo_answer([i, 7], 5 + i) for i in range(30)]
    assert "all requests have ended" in view.panel.value and view.stop_button.disabled


def test_lost_messages_are_sent_again():
    engine = slow_engine(seconds=0.002)
    view, sent = watched(engine, requests(20), every_s=0.01)
    view.start()
    while len(sent) < 4:
        time.sleep(0.001)
    view.slots.state = {"wanted": 0}
    assert view.wait(30)
    again = [message["first"] for message, _ in sent]
    assert again.count(0) == 2
    place = len(again) - 1 - again[::-1].index(0)
    sizes = [len(arrays["start"]) for _, arrays in sent[place:]]
    assert sum(sizes) == len(view.timeline.steps)


def test_buttons():
    engine, todo = slow_engine(), requests(40)
    view, _ = watched(engine, todo, every_s=0.001)
    view.start()
    while view.look(lambda timeline: len(timeline.steps)) < 3:
        time.sleep(0.001)
    view.slots.state = {"request": "r0"}
    assert view.request_box.value == "r0"
    view.request_box.value = " r39 "
    view.abort_button.click()
    while "r39 aborted" not in view.panel.value:
        time.sleep(0.001)
    assert todo[39].finish_reason == "abort"
    view.request_box.value = "r39"
    view.abort_button.click()
    while "no request &#x27;r39&#x27; is waiting or running" not in view.panel.value:
        time.sleep(0.001)
    view.stop_button.click()
    assert view.wait(10) and view.timeline.header["interrupted"]
    assert {r.finish_reason for r in view.timeline.requests.values()} == {"length", "abort"}


def test_an_error_is_told():
    engine = slow_engine()
    engine.runner.run = lambda plan: (_ for _ in ()).throw(RuntimeError("the <device> is gone"))
    view, _ = watched(engine, requests(2))
    with pytest.warns(RuntimeWarning, match="the step failed"):
        view.start()
        view.wait(10)
    said = "all requests have ended, 2 with an error: the step failed: RuntimeError: the &lt;device&gt; is gone"
    assert said in view.panel.value
    view, _ = watched(slow_engine(), requests(2))
    view.run.engine.scheduler.schedule = lambda now: 1 / 0  # a bug there ends the run
    view.start()
    view.wait(10)
    assert "ended by an error: division by zero" in view.panel.value


def test_how_it_ended_is_told_after_an_abort_too():
    engine, shown = slow_engine(), []
    step = engine.step
    view, _ = watched(engine, requests(20), every_s=0.001)
    view._display = SimpleNamespace(update=lambda data, raw: shown.append(data["text/html"]))
    view.start()
    view.abort_button.click()  # of nobody
    while "no request" not in view.panel.value:
        time.sleep(0.001)

    def fail():
        step()
        raise RuntimeError("gone")

    engine.step = fail
    view.wait(10)
    for text in (view.panel.value, *shown):
        assert "is waiting or running · ended by an error: gone" in text
    assert len(shown) == 1 and "the whole run:" in shown[0] and "minibatcher-slots-" in shown[0]


def test_a_run_beside_another_says_that_it_is_slowed_down():
    first, _ = watched(slow_engine(), requests(30), every_s=0.001)
    second, _ = watched(slow_engine(), requests(30), every_s=0.001)
    first.start()
    second.start()
    while "each slows the other" not in first.panel.value:
        assert first.run.running
        time.sleep(0.001)
    first.stop()
    second.stop()
    assert "each slows the other" not in first.panel.value + second.panel.value


def test_what_the_window_holds_by_hand():
    run = by_hand()
    end = run.steps[-1].end
    facts = recent(run, end, window_s=1000.0)
    span = end - run.span[0]
    assert facts["busy"] == pytest.approx(sum(step.duration for step in run.steps) / span)
    working = sum(step.duration * sum(row.num_tokens > 0 for row in step.rows) for step in run.steps)
    assert facts["useful_slots"] == pytest.approx(working / (run.num_slots * span))
    useful = sum(step.num_useful_tokens for step in run.steps)
    assert facts["useful_tokens"] == pytest.approx(useful / sum(step.num_computed_tokens for step in run.steps))
    tokens = sum(len(r.token_times) for r in run.requests.values())
    assert facts["output_tokens_per_s"] == pytest.approx(tokens / span)
    last = run.steps[-1]
    only = recent(run, last.end, window_s=last.duration / 2)
    assert only["busy"] == pytest.approx(1.0)
    assert only["useful_slots"] == pytest.approx(sum(row.num_tokens > 0 for row in last.rows) / run.num_slots)


def test_the_panel_sets_busy_beside_useful():
    run = by_hand()
    text = panel(recent(run, run.steps[-1].end))
    assert "busy: a step was running" in text and "useful: slots" in text and "nvidia-smi" not in text
    assert run.clock in text
    run.device_samples.append(DeviceSample(1.0, 0.97, 3 * 2**30, 412.0))
    text = panel(recent(run, run.steps[-1].end))
    assert "nvidia-smi" in text and "97 %" in text and "3.0 GiB" in text and "412 W" in text
    run.device_samples.append(DeviceSample(2.0, 0.57, None, 400.0))
    text = panel(recent(run, run.steps[-1].end, math.inf))
    assert "the whole run" in text and "77 %" in text and "3.0 GiB" in text and "406 W" in text
    assert "slots held" not in text, "what holds for a moment only"
    nothing = Timeline(header={"max_num_seqs": 3})
    assert "no sample" in panel(recent(nothing, 0.0))


def test_a_run_that_is_over_can_be_shown():
    engine = fake_engine("chunked")
    view, _ = watched(engine, requests(3))
    view.start()
    assert view.wait(10) and view.box.children[1] is view.slots
