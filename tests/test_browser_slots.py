"""The slot animation in a browser: from a file without a kernel, and in JupyterLab. States are asserted, not speed."""

from __future__ import annotations

import base64
import json
from bisect import bisect_left
from itertools import pairwise

import pytest
from browser import cell_text, run_all_cells, run_cell, screenshot
from fakes import fake_requests, fake_run
from test_slots import by_hand, crowded, step

from minibatcher.cli import main
from minibatcher.metrics import summarize
from minibatcher.timeline import RowRecord, RowState, Timeline
from minibatcher.viz.interactive import module_source, pack
from minibatcher.viz.palette import IDLE, LETTERS
from minibatcher.viz.slots import animate
from minibatcher.viz.trace import columns

BOTH = ("static", "continuous")
# Colours that are not grey: what only cells, chips and marks have.
COLOURS = """canvas => {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height), seen = new Set();
  for (let i = 0; i < data.length; i += 4)
    if (Math.max(data[i], data[i + 1], data[i + 2]) - Math.min(data[i], data[i + 1], data[i + 2]) > 40)
      seen.add(data[i] << 16 | data[i + 1] << 8 | data[i + 2]);
  return seen.size;
}"""


@pytest.fixture(scope="module")
def timelines() -> dict[str, Timeline]:
    return {name: fake_run(name, fake_requests(24)) for name in BOTH}


@pytest.fixture(scope="module")
def files(tmp_path_factory, timelines):
    """Pages by name."""
    folder = tmp_path_factory.mktemp("pages")
    long = fake_run("chunked", fake_requests(800, rate=4, longest=100), max_num_seqs=2, num_blocks=400)
    assert len(long.steps) > 10_000
    films = {
        "one": animate(timelines["static"]),
        "both": animate(timelines),
        "crowded": animate(crowded()),
        "empty": animate(by_hand()),
        "single": animate(by_hand(step(0, [RowRecord(0, "only", RowState.PREFILL, 3, 3)]))),
        "long": animate(long, max_columns=500),
        "wide": animate(
            fake_run("chunked", fake_requests(300, rate=3000), max_num_seqs=256, num_blocks=4000, budget=512)
        ),
    }
    paths = {name: folder / f"{name}.html" for name in films}
    for name, film in films.items():
        film.save(paths[name], name)
    return paths


def root(page) -> dict[str, str]:
    return page.locator(".mb-slots").first.evaluate("element => ({ ...element.dataset })")


def told(page, run: int = 0) -> dict[str, str]:
    return page.locator(".mb-slots .run").nth(run).evaluate("element => ({ ...element.dataset })")


def at(page, step: int) -> dict[str, str]:
    """Go to a moment of a run's axis of steps, and read what is said of it."""
    page.locator(".scrub").fill(str(step))
    page.wait_for_function("n => document.querySelector('.run').dataset.step == n", arg=step)
    return told(page)


def press(page, *keys: str) -> dict[str, str]:
    """Press keys, let the picture be drawn, and read the first run's state."""
    for key in keys:
        page.keyboard.press(key)
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return told(page)


def expected_slots(timeline: Timeline, position: int) -> str:
    shown = [LETTERS[IDLE]] * timeline.num_slots
    for row in timeline.steps[position].rows:
        shown[row.slot] = f"{row.request_id}:{LETTERS[row.state]}"
    return " ".join(shown)


def agrees(found: dict[str, str], summary: dict) -> None:
    assert int(found["step"]) == summary["num_steps"]
    assert float(found["useful"]) == pytest.approx(summary["slot_occupancy"])
    assert float(found["padding"]) == pytest.approx(summary["padding_share"])
    assert int(found["outputTokens"]) == summary["num_output_tokens"]


def test_totals_are_those_of_the_metrics(open_page, files, timelines):
    page = open_page(files["both"])
    for i, name in enumerate(BOTH):
        found, summary = told(page, i), summarize(timelines[name])
        agrees(found, summary)
        assert found["run"] == name and found["clock"] == "simulated"
        assert float(found["tokensPerS"]) == pytest.approx(summary["output_tokens_per_s"])
        assert float(found["time"]) == pytest.approx(max(t.duration for t in timelines.values()), abs=1e-5) or i == 1
        assert (
            page.locator(".run").nth(i).locator(".value").nth(4).inner_text()
            == f"{summary['output_tokens_per_s']:,.0f}"
        )
    assert page.locator(".run .name").all_inner_texts()[1] == "time, simulated"


def test_every_step_shows_what_the_timeline_says(open_page, files, timelines):
    page, timeline = open_page(files["one"]), timelines["static"]
    for number in range(1, len(timeline.steps), 7):
        found = at(page, number)
        record = timeline.steps[number - 1]
        assert found["slots"] == expected_slots(timeline, number - 1)
        assert found["queue"].split() == timeline.waiting_at(number - 1)
        assert int(found["waiting"]) == record.num_waiting and int(found["kv"]) == record.kv_used_blocks
        part = Timeline(timeline.clock, timeline.header, timeline.steps[:number], timeline.requests)
        computed = sum(s.num_computed_tokens for s in part.steps)
        assert float(found["padding"]) == pytest.approx(sum(s.num_padding_tokens for s in part.steps) / computed)
        assert float(found["useful"]) == pytest.approx(summarize(part)["slot_occupancy"])
        tokens = sum(t <= record.end + 1e-9 for r in timeline.requests.values() for t in r.token_times)
        assert int(found["outputTokens"]) == tokens
        assert float(found["tokensPerS"] or 0) == pytest.approx(tokens / (record.end - timeline.span[0]))


def test_buttons_and_keys_step_through_a_run(open_page, files, timelines):
    page, steps = open_page(files["one"]), len(timelines["static"].steps)
    page.locator(".mb-slots").focus()
    assert press(page)["step"] == str(steps)
    assert press(page, "Home")["step"] == "1"
    assert press(page, "ArrowRight", "ArrowRight", "ArrowRight")["step"] == "4"
    assert press(page, "ArrowLeft")["step"] == "3"
    assert press(page, "PageDown")["step"] == str(round(3 + steps / 10))
    assert press(page, "PageUp")["step"] in ("3", "4")
    assert press(page, "End")["step"] == str(steps)
    assert press(page, "ArrowRight")["step"] == str(steps)
    page.locator(".scrub").focus()  # which has keys of its own
    assert press(page, "Home", "ArrowRight", "ArrowRight")["step"] == "3"
    page.locator(".home").click()
    page.locator(".next").click()
    assert press(page)["step"] == "2"
    page.locator(".back").click()
    assert press(page)["step"] == "1"
    assert page.locator(".mb-slots").get_attribute("data-playing") == "false"
    # What a screen reader is told once it stands still.
    page.wait_for_function(f"() => document.querySelector('.spoken').textContent.includes('step 1 of {steps}')")
    assert f"step 1 of {steps}" in page.locator(".run canvas").first.get_attribute("aria-label")


def test_it_plays_pauses_and_ends_by_itself(open_page, files, timelines):
    page, steps = open_page(files["one"]), len(timelines["static"].steps)
    page.locator(".mb-slots").focus()
    page.locator(".speed").select_option("20")
    page.locator(".mb-slots").focus()
    assert int(press(page, "Home", "Space")["step"]) < steps / 2  # from the beginning, however slow the page
    assert root(page)["playing"] == "true" and page.locator(".play").inner_text().endswith("Pause")
    page.wait_for_function("() => document.querySelector('.run').dataset.step >= 5")
    press(page, "Space")
    first = press(page)
    page.wait_for_timeout(200)
    assert told(page) == first and root(page)["playing"] == "false"
    assert int(first["step"]) == float(root(page)["now"]) < steps, "it stops at the end of a step"
    page.locator(".speed").select_option("1000")
    page.locator(".play").click()
    page.wait_for_function("() => document.querySelector('.mb-slots').dataset.playing === 'false'")
    assert press(page)["step"] == str(steps)
    page.locator(".play").click()  # again, from the beginning
    page.wait_for_function("steps => document.querySelector('.run').dataset.step < steps", arg=steps)


def test_a_picture_that_left_the_page_stops(open_page, files):
    page = open_page(files["one"])
    page.locator(".speed").select_option("1")
    page.locator(".play").click()
    page.wait_for_function("() => document.querySelector('.mb-slots').dataset.frames > 5")
    element = page.evaluate_handle("() => { const e = document.querySelector('.mb-slots'); e.remove(); return e; }")
    page.wait_for_timeout(100)
    frames = element.evaluate("e => e.dataset.frames")
    page.wait_for_timeout(200)
    assert element.evaluate("e => e.dataset.frames") == frames


def test_several_runs_move_on_one_clock(open_page, files, timelines):
    page = open_page(files["both"])
    assert root(page)["axis"] == "seconds"
    end = max(timeline.duration for timeline in timelines.values())
    for share in (0.2, 0.5, 0.93):
        page.locator(".scrub").fill(str(share * end))
        press(page)
        for i, timeline in enumerate(timelines.values()):
            now = float(root(page)["now"])
            starts = [s.start - timeline.span[0] for s in timeline.steps]
            position = bisect_left(starts, min(now, timeline.duration)) - 1
            found = told(page, i)
            assert int(found["step"]) == position + 1
            ended = now > timeline.duration
            empty = " ".join(LETTERS[IDLE] * timeline.num_slots)
            assert found["slots"] == (empty if ended else expected_slots(timeline, position))
    page.locator(".axis").select_option("steps")
    press(page)
    assert at(page, 9)["step"] == "9" == told(page, 1)["step"]


def test_behind_the_end_of_a_part_nobody_waits(open_page, tmp_path, timelines):
    whole = timelines["static"]
    animate({"part": whole.slice(20, 40), "whole": whole}).save(tmp_path / "part.html")
    page = open_page(tmp_path / "part.html")
    assert told(page)["queue"] == "" and told(page)["waiting"] == "0"
    page.locator(".mb-slots").focus()
    assert press(page, "Home")["queue"] != ""


def test_the_strip_below_shows_and_reaches_every_moment(open_page, files, timelines):
    page, steps = open_page(files["one"]), len(timelines["static"].steps)
    box = page.locator(".overview").bounding_box()
    page.mouse.click(box["x"] + 0.5 * box["width"], box["y"] + 5)
    assert 0.3 * steps < int(press(page)["step"]) < 0.7 * steps
    assert float(root(page)["shown"]) == steps
    page.locator(".in").click()
    page.locator(".in").click()
    press(page)
    assert float(root(page)["shown"]) == pytest.approx(steps / 4)
    page.locator(".mb-slots").focus()
    press(page, "-", "-", "-")
    assert float(root(page)["shown"]) == steps


def test_pointing_at_a_slot_tells_a_request_s_story(open_page, files, timelines):
    page, timeline = open_page(files["both"]), timelines["static"]
    page.locator(".scrub").fill(str(0.6 * timeline.duration))
    press(page)
    held = told(page)["slots"].split()
    slot = next(i for i, text in enumerate(held) if text != LETTERS[IDLE])
    name = held[slot].split(":")[0]
    box = page.locator(".run canvas").first.bounding_box()
    page.mouse.move(box["x"] + 60, box["y"] + 16 + 22 * slot + 10)  # the row's own box, beside its number
    press(page)
    story, record = page.locator(".story"), timeline.requests[name]
    assert root(page)["request"] == name and story.is_visible()
    text = story.inner_text()
    assert (
        text.startswith(f"{name} · slot {slot} · ") and f"{record.num_prompt_tokens} prompt tokens, arrived at" in text
    )
    assert "waited" in text and f"{record.num_output_tokens} output tokens" in text and ": length" in text
    assert "under continuous: first token at" in text
    queued = told(page)["queue"].split()
    page.mouse.move(box["x"] + box["width"] - 100, box["y"] + 16 + 5)
    press(page)
    assert root(page)["request"] == queued[0] and "waiting" in story.inner_text()
    page.mouse.move(5, 5)
    press(page)
    assert root(page)["request"] == "" and not story.is_visible()


def test_the_keyboard_reaches_every_story(open_page, files):
    page = open_page(files["both"])
    page.locator(".mb-slots").focus()
    held = press(page, "PageUp", "PageUp", "PageUp", "ArrowDown")["slots"].split()
    assert root(page)["request"] == held[0].split(":")[0]
    press(page, "ArrowDown")
    assert root(page)["request"] == held[1].split(":")[0]
    assert page.locator(".spoken").inner_text().startswith(f"{held[1].split(':')[0]} · slot 1")
    press(page, "ArrowUp", "ArrowUp")  # from the first slot to the last of all
    assert "continuous" in page.locator(".story").inner_text() or "idle" in page.locator(".story").inner_text()
    press(page, "Escape")
    assert not page.locator(".story").is_visible()
    page.locator(".mb-slots").focus()
    press(page, "End", "ArrowDown", "Space")  # it plays from the beginning, and the story is that of whoever sits there
    page.wait_for_function(
        """() => { const { request, now, extent } = document.querySelector(".mb-slots").dataset;
        const { slots } = document.querySelector(".run").dataset;
        return now < extent / 2 && request && slots.startsWith(request + ":"); }"""
    )
    press(page, "Space", "Escape")
    page.locator(".keys summary").focus()
    press(page, "Enter")
    assert page.locator(".keys kbd").first.is_visible()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [480, 700, 1280])
def test_it_fits_the_window_and_takes_its_colours(open_page, files, width, theme):
    page = open_page(files["both"], width=width, theme=theme, scale=2)
    page.locator(".mb-slots").focus()
    press(page, "PageUp", "PageUp", "PageUp", "PageUp", "ArrowDown")
    assert page.evaluate("() => document.documentElement.scrollWidth <= window.innerWidth")
    for i in range(2):
        canvas = page.locator(".run canvas").nth(i)
        assert canvas.evaluate(COLOURS) > 5
        assert canvas.evaluate("c => Math.abs(c.width - 2 * c.clientWidth) <= 2"), "crisp: two pixels for each of CSS"
    ground = page.locator(".run canvas").first.evaluate(
        "c => [...c.getContext('2d').getImageData(c.width / 2, 60, 1, 1).data]"
    )
    assert ground[3] == 255
    text = page.locator(".mb-slots").evaluate("e => getComputedStyle(e).color")
    assert text == ("rgb(0, 0, 0)" if theme == "light" else "rgb(255, 255, 255)")
    screenshot(page, f"slots-{width}-{theme}")


@pytest.mark.parametrize("width", [480, 700, 1280])
def test_numbers_stand_apart(open_page, files, width):
    page = open_page(files["long"], width=width)
    boxes = page.locator(".run .value").evaluate_all(
        """values => values.map(value => { const range = document.createRange(); range.selectNodeContents(value);
        const { left, right, top } = range.getBoundingClientRect(); return [top, left, right]; })"""
    )
    assert len(boxes) == 7
    for (top, _, right), (next_top, left, _) in pairwise(boxes):
        assert left > right + 4 or next_top > top


def test_it_follows_the_width_of_its_place(open_page, files):
    page = open_page(files["one"], width=1280)
    canvas = page.locator(".run canvas").first
    wide = canvas.evaluate("c => c.width")
    page.set_viewport_size({"width": 600, "height": 900})
    page.wait_for_function("wide => document.querySelector('.run canvas').width < wide / 1.5", arg=wide)
    assert page.evaluate("() => document.documentElement.scrollWidth <= window.innerWidth")


@pytest.mark.parametrize(
    ("name", "steps", "words"),
    [
        ("empty", 0, "0 of 0"),
        ("single", 1, "1 of 1"),
        ("crowded", None, "preempted: lost its slot"),
        ("wide", None, ""),
    ],
)
def test_odd_timelines_have_a_picture(open_page, files, name, steps, words):
    page = open_page(files[name])
    page.locator(".mb-slots").focus()
    found = press(page, "Space", "Space", "Home", "ArrowRight", "ArrowLeft", "ArrowDown", "+", "-", "End")
    assert steps is None or int(found["step"]) == steps
    assert words in page.locator(".mb-slots").inner_text()
    drawn = page.locator(".run canvas").first.evaluate(
        """canvas => { const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        return data.filter((v, i) => i % 4 === 3 && v > 0).length; }"""
    )
    assert drawn > 1000
    screenshot(page, f"slots-{name}")


def test_a_long_run_opens_in_fewer_columns_and_says_so(open_page, files):
    page = open_page(files["long"])
    found = told(page)
    assert int(found["step"]) == int(found["steps"]) > 10_000
    assert "each column stands for" in page.locator(".note").inner_text()
    assert page.locator(".run canvas").first.evaluate(COLOURS) > 5
    screenshot(page, "slots-long")


LIVE = """<!doctype html><meta charset="utf-8"><div id="here"></div><script type="module">
{source}
window.told = [];
const bytes = text => Uint8Array.from(atob(text), c => c.charCodeAt(0));
const start = {start};
const given = {{ data: start.data, arrays: unpack(start.layout, bytes(start.packed)) }};
window.handle = mount(document.getElementById("here"), given, state => told.push(state));
window.send = part => handle.receive(part.data, unpack(part.layout, bytes(part.packed)));
</script>"""


def parcel(data: dict, arrays: dict) -> dict:
    layout, packed = pack(arrays)
    return {"data": data, "layout": layout, "packed": base64.b64encode(packed).decode()}


def test_a_live_picture_grows_follows_and_forgets(open_page, tmp_path, timelines):
    whole = timelines["continuous"]
    part = Timeline(whole.clock, whole.header, [], {})
    film = animate(part, live=True)
    start = json.dumps(parcel(film.data, film.arrays))
    (tmp_path / "live.html").write_text(LIVE.format(source=module_source("slots"), start=start), encoding="utf-8")
    page = open_page(tmp_path / "live.html")
    part.requests = whole.requests
    for first, stop in ((0, 1), (1, 30), (30, 31), (20, 60), (60, len(whole.steps))):  # once, some come a second time
        part.steps = whole.steps[:stop]
        page.evaluate("part => send(part)", parcel(*columns(part, first)))
        found = press(page)
        assert int(found["step"]) == stop, "it follows the end"
        assert found["slots"] == expected_slots(whole, stop - 1)
    agrees(found, summarize(whole))
    page.locator(".scrub").fill("17")
    press(page)
    page.evaluate("part => send(part)", parcel(*columns(whole, len(whole.steps))))
    assert press(page)["slots"] == expected_slots(whole, 16), "a reader who looks back is left there"
    page.evaluate("part => send(part)", parcel({"kind": "clear"}, {}))
    assert press(page)["step"] == "0"
    page.evaluate("part => send(part)", parcel(*columns(whole, 5)))
    assert press(page)["step"] == "0"
    assert page.evaluate("() => told.some(state => state.wanted === 0)"), "it asks for what it missed"
    page.evaluate("part => send(part)", parcel(*columns(whole, 0)))
    assert press(page)["slots"] == expected_slots(whole, len(whole.steps) - 1)
    page.evaluate("() => handle.destroy()")
    assert page.locator(".mb-slots").count() == 0


def test_the_page_of_the_command_plays(open_page, tmp_path):
    path = tmp_path / "runs.html"
    args = ["simulate", "--num-requests", "20", "--max-num-seqs", "8", "--strategies", "static", "chunked", "--quiet"]
    assert main([*args, "--html", str(path)]) == 0
    page = open_page(path)
    assert page.locator(".run .title").all_inner_texts() == ["static", "chunked"]
    assert page.locator("table.comparison tbody tr").count() > 20
    assert "SIMULATED" in page.locator("table.comparison caption").inner_text()
    page.locator(".play").click()
    page.wait_for_function("() => document.querySelector('.mb-slots').dataset.playing === 'true'")
    screenshot(page, "slots-command")


CELLS = [
    "import sys; sys.path.insert(0, {tests!r})\n"
    "from fakes import fake_requests, fake_run\n"
    "from minibatcher.viz.slots import animate\n"
    "film = animate(fake_run('static', fake_requests(12)))\n"
    "film",
    "widget = film.widget()\nwidget",
    "print(widget.state['step'], widget.state['playing'], widget.state['axis'])",
]


def test_in_jupyterlab_inline_and_as_a_widget(open_page, lab, request):
    tests = str(request.path.parent)
    page = lab.open(open_page, [cell.format(tests=tests) for cell in CELLS])
    run_all_cells(page)
    films = page.locator(".mb-slots")
    page.wait_for_function("() => document.querySelectorAll('.mb-slots[data-frames]').length === 2")
    inline, widget = films.nth(0), films.nth(1)
    for film in (inline, widget):
        film.focus()
        page.keyboard.press("Home")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowDown")  # JupyterLab would go to the next cell
        page.wait_for_function("e => e.querySelector('.run').dataset.step === '2'", arg=film.element_handle())
        assert film.evaluate("e => document.activeElement === e && e.dataset.request !== ''")
        assert film.locator(".run canvas").first.evaluate(COLOURS) > 5
    page.wait_for_timeout(600)  # the kernel hears four times a second
    assert run_cell(page, 2).split() == ["2", "False", "steps"]
    widget.locator(".scrub").fill("25")
    widget.locator(".play").click()
    page.wait_for_function("e => e.querySelector('.run').dataset.step > 25", arg=widget.element_handle())
    page.wait_for_timeout(600)
    text = run_cell(page, 2).split()
    assert int(text[0]) > 25 and text[1] == "True" and "Traceback" not in cell_text(page, 0)
    screenshot(page, "slots-jupyterlab")


def test_in_a_part_of_a_run_what_was_before_it_has_no_time(open_page, timelines, tmp_path):
    whole = timelines["static"]
    part = whole.slice(20, 40)
    animate(part).save(tmp_path / "part.html")
    page = open_page(tmp_path / "part.html")
    name = next(
        row.request_id for row in part.steps[0].rows if part.requests[row.request_id].arrival_time < part.span[0]
    )
    slot = next(row.slot for row in part.steps[0].rows if row.request_id == name)
    box = page.locator(".run canvas").first.bounding_box()
    page.locator(".scrub").fill("1")
    press(page)
    page.mouse.move(box["x"] + 60, box["y"] + 16 + 22 * slot + 10)
    press(page)
    assert root(page)["request"] == name
    story = page.locator(".story").inner_text()
    assert "arrived before this part of the run" in story and "-" not in story.split("prompt tokens")[1][:40]
