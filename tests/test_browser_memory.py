"""The memory film in a browser: each moment shows what the run held, and a reader plays, stops and points at it."""

import json

import pytest
from browser import check_crisp, drag_finger, has_light_ink, run_cell, screenshot
from figure_cases import one_pool, preempting, small_blocks
from test_memory_view import RUNS

from minibatcher.viz import memory_view
from minibatcher.viz.memory_map import pieces_at, tables_at
from minibatcher.viz.memory_view import moments_of

ROOT = ".mb-memory"
# Whether the upper left corner of a block is black: there is an outline. Of a light page, rows of `each` blocks.
CORNER_IS_INK = """(canvas, [block, each]) => {
  const left = 48, top = 15, width = (canvas.clientWidth - left - 2) / each, row = 24;
  const x = left + (block % each) * width, y = top + Math.floor(block / each) * row + 1;
  return canvas.getContext("2d").getImageData(Math.round(x), y, 1, 1).data.slice(0, 3).every(value => value < 60);
}"""


@pytest.fixture
def show(open_page, tmp_path):
    """Opens the page of a memory_view and returns it."""

    def show(timelines, width=1280, theme="light", scale=1, **options):
        path = tmp_path / "memory.html"
        memory_view(timelines, **options).save(path, "Memory")
        page = open_page(path, width=width, theme=theme, scale=scale)
        page.wait_for_selector(f"{ROOT}[data-now]")
        return page

    return show


def root(page) -> dict[str, str]:
    return page.eval_on_selector(ROOT, "root => ({...root.dataset})")


def told(page, run: int = 0) -> dict[str, str]:
    return page.locator(f"{ROOT} .run").nth(run).evaluate("run => ({...run.dataset})")


def drawn(page) -> None:
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def seek(page, time: float) -> None:
    page.locator(f"{ROOT} .scrub").fill(repr(float(time)))
    drawn(page)


def press(page, *keys: str) -> None:
    for key in keys:
        page.keyboard.press(key)
    drawn(page)


def assert_agrees(page, run: int, timeline, position: int) -> None:
    """What a pool shows is what the run held while this step ran."""
    found, pieces = told(page, run), pieces_at(timeline, position)
    sums = {kind: sum(p.stop - p.start for p in pieces if p.kind == kind) for kind in ("used", "ended", "unused")}
    assert (int(found["used"]), int(found["ended"])) == (sums["used"], sums["ended"])
    assert int(found["reserved"]) == sum(sums.values())
    assert float(found["wasted"]) == pytest.approx(1 - sums["used"] / sum(sums.values()))
    assert json.loads(found["tables"]) == tables_at(timeline, position)
    assert int(found["waiting"]) == len(timeline.waiting_at(position))
    states = [row.state.value for row in timeline.steps[position].rows]
    assert int(found["running"]) == len(states) - states.count("finished")


@pytest.mark.parametrize("name", ["slices", "blocks", "preempting", "by hand", "idle at times"])
def test_every_moment_shows_what_the_run_held(show, name):
    timeline = RUNS[name]()
    page = show(timeline)
    for time, position in moments_of(timeline)[::9]:
        seek(page, time)
        if position is not None:
            assert_agrees(page, 0, timeline, position)
    seek(page, timeline.duration + 1)
    assert told(page)["tables"] == "{}" and told(page)["reserved"] == "0" and told(page)["wasted"] == ""


def test_two_pools_on_one_clock(show):
    runs = one_pool()
    page = show(runs)
    assert page.locator("img").count() == 0  # the still picture has made way
    assert [told(page, i)["run"] for i in range(2)] == list(runs)
    for time in (0.5, 1.87, 3.0):
        seek(page, time)
        for i, timeline in enumerate(runs.values()):
            begun = [position for at, position in moments_of(timeline) if at <= time and position is not None]
            assert_agrees(page, i, timeline, begun[-1])
    boxes = [page.locator(f"{ROOT} .run canvas").nth(i).bounding_box() for i in range(2)]
    assert boxes[0]["y"] == boxes[1]["y"] and boxes[0]["width"] == boxes[1]["width"]
    values = page.locator(f"{ROOT} .run").first.locator(".value").all_inner_texts()
    assert values[0] == "3.00 s" and values[2] == "640 (100 %)"
    seek(page, 6.0)  # when one has long been done
    assert told(page, 1)["tables"] == "{}" and told(page, 0)["tables"] != "{}"


def test_it_starts_where_the_still_picture_stands(show):
    page, timeline = show(one_pool()), one_pool()["continuous"]
    fullest = max(range(len(timeline.steps)), key=lambda i: timeline.steps[i].kv_tokens)
    assert_agrees(page, 1, timeline, fullest)


def test_buttons_and_keys_step_through_a_run(show):
    timeline = one_pool()["continuous"]
    page, times = show(timeline), [time for time, _ in moments_of(timeline)]
    page.locator(ROOT).focus()
    press(page, "Home")
    assert float(root(page)["now"]) == pytest.approx(times[0], abs=1e-6)
    press(page, "ArrowRight", "ArrowRight", "ArrowRight")
    assert float(root(page)["now"]) == pytest.approx(times[3], abs=1e-6)
    press(page, "ArrowLeft")
    assert told(page)["column"] == "2"
    press(page, "PageDown")
    assert float(root(page)["now"]) == pytest.approx(times[2] + timeline.duration / 10, abs=1e-6)
    press(page, "End")
    assert told(page)["tables"] == "{}"
    page.click(f"{ROOT} .home")
    page.click(f"{ROOT} .next")
    drawn(page)
    assert told(page)["column"] == "1"
    page.click(f"{ROOT} .back")
    drawn(page)
    assert told(page)["column"] == "0"
    strip = page.locator(f"{ROOT} .overview").bounding_box()
    page.mouse.click(strip["x"] + strip["width"] / 2, strip["y"] + 8)
    drawn(page)
    assert 0.3 < float(root(page)["now"]) / timeline.duration < 0.7
    # What a screen reader is told once it stands still.
    page.wait_for_function(f"() => document.querySelector('{ROOT} .spoken').textContent.includes('of 640 tokens used')")


def test_it_plays_pauses_and_ends_by_itself(show):
    page = show(one_pool())
    page.select_option(f"{ROOT} .speed", "20")
    page.locator(ROOT).focus()
    press(page, "Home", "Space")
    assert root(page)["playing"] == "true" and page.inner_text(f"{ROOT} .play").endswith("Pause")
    page.wait_for_function(f"() => document.querySelector('{ROOT} .run').dataset.column >= 3")
    press(page, "Space")
    first = root(page)
    page.wait_for_timeout(200)
    assert root(page) == first and first["playing"] == "false"
    page.select_option(f"{ROOT} .speed", "1000")
    page.click(f"{ROOT} .play")
    page.wait_for_function(f"() => document.querySelector('{ROOT}').dataset.playing === 'false'")
    assert root(page)["now"] == root(page)["extent"]


def test_a_story_names_a_request_and_its_blocks(show):
    runs = one_pool()
    page, timeline = show(runs), runs["continuous"]
    position = max(range(len(timeline.steps)), key=lambda i: timeline.steps[i].kv_tokens)
    tables = tables_at(timeline, position)
    canvas = page.locator(f"{ROOT} .run canvas").nth(1)
    plain = canvas.evaluate("c => c.toDataURL()")
    assert page.inner_text(f"{ROOT} .story").startswith("Point at a piece")
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + 60, box["y"] + 15 + 12)  # the first block of the first row
    drawn(page)
    owner = next(name for name, table in tables.items() if 0 in table)
    story = page.inner_text(f"{ROOT} .story")
    row = next(row for row in timeline.steps[position].rows if row.request_id == owner)
    assert story.splitlines()[0] == f"{owner} · continuous" and root(page)["request"] == owner
    assert f"block table: {', '.join(map(str, tables[owner]))}" in story
    assert f"{row.context} tokens in {len(tables[owner])} blocks of 16" in story
    assert canvas.evaluate("c => c.toDataURL()") != plain
    lit = [block for block in range(40) if canvas.evaluate(CORNER_IS_INK, [block, 10])]
    assert lit == sorted(tables[owner])
    page.mouse.move(box["x"] + 5, box["y"] + 27)  # beside the pool
    drawn(page)
    assert root(page)["request"] == "" and canvas.evaluate("c => c.toDataURL()") == plain
    page.mouse.move(box["x"] + 60, box["y"] + 27)
    page.mouse.move(box["x"] - 300, box["y"] - 40)  # away
    drawn(page)
    assert root(page)["request"] == ""


def test_requests_are_chosen_with_the_keyboard_and_followed(show):
    runs = one_pool()
    page = show(runs)
    seek(page, 1.87)
    page.locator(ROOT).focus()
    names = []
    for _ in range(3):
        press(page, "ArrowDown")
        names.append(root(page)["request"])
    assert len(set(names)) == 3
    press(page, "ArrowUp")
    assert root(page)["request"] == names[1]
    page.wait_for_function("name => document.querySelector('.spoken').textContent.includes(name)", arg=names[1])
    story = page.inner_text(f"{ROOT} .story")
    press(page, "PageDown")
    assert page.inner_text(f"{ROOT} .story") != story
    press(page, "Escape")
    assert root(page)["request"] == ""
    press(page, "ArrowDown", "End")  # whoever it was is gone
    assert root(page)["request"] == "" and page.inner_text(f"{ROOT} .story").startswith("Point at a piece")


def test_a_free_block_and_a_slice_have_words_too(show):
    page = show(one_pool())
    seek(page, 6.0)
    boxes = [page.locator(f"{ROOT} .run canvas").nth(i).bounding_box() for i in range(2)]
    page.mouse.move(boxes[1]["x"] + 60, boxes[1]["y"] + 27)
    assert page.inner_text(f"{ROOT} .story") == "block 0: free"
    page.mouse.move(boxes[0]["x"] + 60, boxes[0]["y"] + 27)
    assert "slot 0: " in page.inner_text(f"{ROOT} .story") and "in a slice of 160" in page.inner_text(f"{ROOT} .story")


def test_a_finger_does_it_too(show):
    page = show(one_pool())
    box = page.locator(f"{ROOT} .run canvas").nth(1).bounding_box()
    drag_finger(page, (box["x"] + 60, box["y"] + 27))
    drawn(page)
    assert root(page)["request"] and "block table: " in page.inner_text(f"{ROOT} .story")  # it stays when lifted
    drag_finger(page, (box["x"] + 5, box["y"] + 27))
    drawn(page)
    assert root(page)["request"] == ""
    strip, before = page.locator(f"{ROOT} .overview").bounding_box(), float(root(page)["now"])
    drag_finger(page, *((strip["x"] + strip["width"] * share, strip["y"] + 8) for share in (0.5, 0.6, 0.7)))
    drawn(page)
    assert float(root(page)["now"]) > before


def test_notes_say_what_is_left_out(show):
    page = show(one_pool(), max_moments=50)
    assert "In static, one moment of every " in page.inner_text(f"{ROOT} .note")
    page = show(one_pool()["continuous"])
    assert page.is_hidden(f"{ROOT} .note")


def test_every_control_has_a_name(show):
    page = show(one_pool())
    page.wait_for_function(f"() => document.querySelector('{ROOT} .run canvas').getAttribute('aria-label')")
    nameless = page.eval_on_selector_all(
        f"{ROOT} button, {ROOT} input, {ROOT} select, {ROOT} .run canvas, {ROOT} .overview",
        """all => all.filter(e => !(e.getAttribute("aria-label") || e.closest("label") || e.textContent.trim()))
          .map(e => e.outerHTML)""",
    )
    assert nameless == []


@pytest.mark.parametrize("width", [1400, 700, 480])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_it_fits_and_is_crisp(show, width, theme):
    for name, runs in (("pools", one_pool()), ("small", small_blocks()), ("preempting", preempting())):
        page = show(runs, width=width, theme=theme, scale=2)
        page.locator(ROOT).focus()
        press(page, "ArrowDown", "ArrowDown")
        screenshot(page, f"memory-{name}-{width}-{theme}")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        canvas = page.locator(f"{ROOT} .run canvas").first
        check_crisp(canvas, 2)
    assert has_light_ink(page, ROOT) == (theme == "dark")


def test_with_a_kernel_the_state_comes_back(lab, open_page):
    cells = [
        "import sys; sys.path.insert(0, TESTS)\nfrom figure_cases import one_pool\n"
        "from minibatcher.viz import memory_view\nwidget = memory_view(one_pool()).widget()\nwidget",
        "print(widget.state.get('time'), widget.state.get('request'))",
        "widget.tell({'time': 3.0})",
    ]
    cells[0] = cells[0].replace("TESTS", repr(__file__.rsplit("/", 1)[0]))
    page = lab.open(open_page, cells)
    run_cell(page, 0)
    page.wait_for_selector(f"{ROOT}[data-now]")
    page.locator(ROOT).focus()
    press(page, "b", "Home", "ArrowDown")
    page.wait_for_timeout(600)  # the kernel hears of it a little later
    assert page.locator(".jp-Notebook .jp-Cell").count() == 3
    assert run_cell(page, 1).strip() == "0 r0"
    run_cell(page, 2)
    page.wait_for_selector(f'{ROOT}[data-now="3.000000"]')
