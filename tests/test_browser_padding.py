"""The padding picture in a browser, without a kernel and with one: what it counts, and what a reader does to it."""

import json

import pytest
from browser import cell_text, num_colours, run_cell, screenshot

from minibatcher.viz.padding import (
    budget_steps,
    ended_numbers,
    make_batches,
    padding_numbers,
    padding_text,
    padding_view,
)

ROOT = ".mb-padding"
CHAT = padding_view().data["workloads"][-1]["draws"][0]


@pytest.fixture
def show(open_page, tmp_path):
    """Opens the page of a padding_view and returns it, ready."""

    def show(*arguments, width=1280, theme="light", scale=1, **options):
        path = tmp_path / "padding.html"
        padding_view(*arguments, **options).save(path, "Padding")
        page = open_page(path, width=width, theme=theme, scale=scale)
        still(page)
        return page

    return show


def still(page) -> None:
    """Wait until the rows have come to rest."""
    page.wait_for_selector(f'{ROOT}[data-moving="false"]')


def state(page) -> dict:
    """The root's data-* attributes, by the names that the script gives them."""
    return page.eval_on_selector(ROOT, "root => ({...root.dataset})")


def press(page, name: str, value: str) -> None:
    page.click(f'{ROOT} [aria-label="{name}"] [data-value="{value}"]')
    still(page)


def choose(page, workload: str) -> None:
    page.select_option(f'{ROOT} [aria-label="workload"]', workload)
    still(page)


def type_lengths(page, prompts: list, answers: list | tuple = ()) -> None:
    if not page.is_visible(f"{ROOT} .prompts"):
        page.click(f"{ROOT} summary")
    page.fill(f"{ROOT} .prompts", " ".join(map(str, prompts)))
    page.fill(f"{ROOT} .answers", ", ".join(map(str, answers)))
    page.click(f"{ROOT} .apply")
    still(page)


def sentences(page) -> list[str]:
    return [text.replace("\u00a0", " ") for text in page.locator(f"{ROOT} .sentence").all_inner_texts()]


def colours_on(page, which: int) -> int:
    """How many colours a canvas shows; a blank one shows one."""
    return num_colours(page.locator(f"{ROOT} canvas").nth(which))


def assert_agrees(page) -> None:
    """What the page counts is what Python counts for the page's lengths, batches and order."""
    shown = state(page)
    lengths, outputs = json.loads(shown["lengths"]), json.loads(shown["outputs"])
    size, order = int(shown["batchSize"]), shown["order"]
    prefill = padding_numbers(lengths, size, order)
    ended = ended_numbers(outputs, prefill.batches)
    assert json.loads(shown["batches"]) == [list(batch) for batch in prefill.batches]
    assert (int(shown["computed"]), int(shown["useful"])) == (prefill.computed, prefill.useful)
    assert float(shown["wastedShare"]) == prefill.wasted_share
    assert tuple(json.loads(shown["factors"])) == prefill.factors
    ended_names = ("endedSteps", "endedComputed", "endedUseful", "endedShare", "mostEnded", "shareOfSteps")
    assert tuple(float(shown[name]) for name in ended_names) == ended
    if shown["view"] == "padded":
        assert sentences(page) == padding_text(lengths, outputs, size, order).split("\n\n")[1].split("\n")
    if shown["view"] == "chunked":
        queue = [r for batch in prefill.batches for r in batch]
        budget = int(shown["budget"])
        steps = budget_steps([lengths[r] for r in queue], [outputs[r] for r in queue], budget, size)
        tokens = [len(step.decodes) + sum(n for _, n in step.chunks) for step in steps]
        assert (int(shown["budgetSteps"]), int(shown["budgetTokens"])) == (len(steps), sum(tokens))
        assert int(shown["largestStep"]) == max(tokens) <= budget
        assert int(shown["promptSteps"]) == max(i for i, step in enumerate(steps, 1) if step.chunks)


def test_eighty_times_is_seen_at_once(show):
    page = show()
    assert (state(page)["computed"], state(page)["useful"]) == ("8000", "4050")
    assert "The 50-token prompt pays 80 × the work it needs." in sentences(page)[0]
    assert page.locator(f"{ROOT} .big").first.inner_text() == "49 %"
    assert page.locator("img").count() == 0  # the still picture has made way
    assert colours_on(page, 0) > 3 and colours_on(page, 1) > 3
    assert_agrees(page)


@pytest.mark.parametrize(
    ("lengths", "outputs", "batch_size"),
    [
        ([7], [3], None),
        ([1], [1], None),
        ([1, 2, 1], [1, 1, 5], 2),
        ([64] * 6, [10] * 6, 4),
        ([64] * 6, [10] * 6, 100),  # more than there are
        ([37 * i % 900 + 1 for i in range(100)], [53 * i % 300 + 1 for i in range(100)], 16),
        ([1_000, 999], [131_072, 1], None),
    ],
)
def test_the_page_counts_as_python_does(show, lengths, outputs, batch_size):
    page = show(lengths, outputs, batch_size=batch_size)
    for order in ("arrival", "sorted", "bucketed"):
        press(page, "order", order)
        assert_agrees(page)
    for view in ("packed", "chunked"):
        press(page, "view", view)
        assert_agrees(page)
        assert colours_on(page, 0) > 2


def test_typed_lengths_and_their_edges(show):
    page = show()
    for lengths, outputs in (([1], [1]), ([8] * 3, [5] * 3), (list(range(1, 101)), [2] * 100)):
        type_lengths(page, lengths, outputs)
        shown = state(page)
        assert (json.loads(shown["lengths"]), json.loads(shown["outputs"])) == (lengths, outputs)
        assert_agrees(page)
    type_lengths(page, [5, 6])  # answers come by themselves
    assert len(json.loads(state(page)["outputs"])) == 2
    before = state(page)
    for prompts, answers, sentence in (
        ([50, 0], [], "“0” is not a length: a whole number of tokens from 1 to 131,072."),
        ([50, 131_073], [], "“131073” is not a length"),
        (["many"], [], "“many” is not a length"),
        ([], [], "at least one prompt length is needed."),
        ([1, 2], [3], "2 prompts need as many answers, not 1."),
        ([1] * 257, [], "at most 256 requests, not 257."),
    ):
        type_lengths(page, prompts, answers)
        assert sentence in page.inner_text(f"{ROOT} [role=alert]")
        assert state(page) == before
    page.fill(f"{ROOT} input.prompt", "0")
    page.press(f"{ROOT} input.prompt", "Enter")
    assert "“0” is not a length" in page.inner_text(f"{ROOT} [role=alert]")
    assert page.input_value(f"{ROOT} input.prompt") == "5" and state(page) == before
    page.fill(f"{ROOT} input.prompt", "9")
    page.press(f"{ROOT} input.prompt", "Enter")
    assert json.loads(state(page)["lengths"]) == [9, 6]
    assert page.inner_text(f"{ROOT} [role=alert]") == ""


def test_workloads_and_switches(show):
    page = show()
    choose(page, "equal")
    assert float(state(page)["wastedShare"]) == float(state(page)["endedShare"]) == 0
    choose(page, "one-long")
    assert float(state(page)["wastedShare"]) > 0.8
    choose(page, "finisher")
    assert sentences(page)[1].endswith("In 99 % of the steps, 31 of 32 rows make tokens that are thrown away.")
    choose(page, "chat")
    assert json.loads(state(page)["lengths"]) == CHAT["lengths"] and state(page)["batchSize"] == "8"
    rows = page.locator(f"{ROOT} .orders tbody tr")
    assert rows.count() == 3
    cells = [rows.nth(i).locator("td").all_inner_texts() for i in range(3)]
    assert cells[0] == ["62 %", "64 %"] and cells[1] == ["35 %", "64 %"]  # sorting helps the first, not the second
    press(page, "order", "sorted")
    assert page.locator(f"{ROOT} tr[aria-current]").get_attribute("data-order") == "sorted"
    assert_agrees(page)
    page.click(f"{ROOT} .again")
    still(page)
    assert json.loads(state(page)["lengths"]) != CHAT["lengths"]
    assert_agrees(page)
    page.locator(f"{ROOT} .batch").fill("5")
    still(page)
    assert state(page)["batchSize"] == "5"
    assert_agrees(page)
    press(page, "view", "chunked")
    assert page.is_hidden(f'{ROOT} .pic[data-kind="output"]')
    budget = page.locator(f"{ROOT} .budget")
    budget.focus()
    budget.press("ArrowLeft")
    assert state(page)["budget"] == "256"
    assert_agrees(page)
    page.locator(f"{ROOT} canvas").first.hover(position={"x": 55, "y": 200})
    assert page.inner_text(f"{ROOT} .status").startswith("Step 1: ")
    press(page, "view", "packed")
    assert page.is_visible(f'{ROOT} .pic[data-kind="output"]')
    assert "none of them padding" in sentences(page)[0]


def test_dragging_a_rows_end(show):
    page = show((1_000, 4_000), (100, 400))
    end = page.locator(f'{ROOT} .pic[data-kind="prompt"] .end[data-request="0"]')
    box = end.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    other = page.locator(f'{ROOT} .pic[data-kind="prompt"] .end[data-request="1"]').bounding_box()
    pixels = (other["x"] - box["x"]) / 3_000
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + 1_000 * pixels, y, steps=4)
    assert abs(json.loads(state(page)["lengths"])[0] - 2_000) <= 20  # a pixel is some tokens
    assert_agrees(page)
    page.mouse.move(x - 2_000 * pixels, y, steps=4)  # beyond the left edge
    assert json.loads(state(page)["lengths"])[0] == 1
    page.mouse.move(x + 5_000 * pixels, y, steps=4)  # beyond the right edge: the row grows
    assert abs(json.loads(state(page)["lengths"])[0] - 6_000) <= 20
    page.mouse.up()
    assert state(page)["workload"] == "own" and state(page)["selected"] == "0"
    page.mouse.move(x, y)  # let go: nothing moves any more
    assert abs(json.loads(state(page)["lengths"])[0] - 6_000) <= 20
    answer = page.locator(f'{ROOT} .pic[data-kind="output"] .end[data-request="1"]').bounding_box()
    page.mouse.move(answer["x"] + answer["width"] / 2, answer["y"] + 5)
    page.mouse.down()
    page.mouse.move(answer["x"] - 100, answer["y"] + 5, steps=4)
    page.mouse.up()
    assert json.loads(state(page)["outputs"])[1] < 400
    assert_agrees(page)


def test_the_keyboard_does_it_all(show):
    page = show((100, 400, 200), (10, 20, 30))
    end = page.locator(f'{ROOT} .pic[data-kind="prompt"] .end[tabindex="0"]')
    assert end.count() == 1  # one stop of the Tab key, not one a row
    end.focus()
    page.keyboard.press("Shift+ArrowRight")
    assert json.loads(state(page)["lengths"]) == [101, 400, 200]
    page.keyboard.press("ArrowRight")
    page.keyboard.press("PageUp")
    grown = json.loads(state(page)["lengths"])[0]
    assert grown > 130
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Shift+ArrowLeft")
    assert json.loads(state(page)["lengths"]) == [grown, 399, 200]
    page.keyboard.press("Home")
    page.keyboard.press("ArrowLeft")  # not below one token
    assert json.loads(state(page)["lengths"]) == [grown, 1, 200]
    assert page.inner_text(f"{ROOT} [role=alert]") == ""
    focused = "document.activeElement.getAttribute"
    assert page.evaluate(f'{focused}("aria-label")') == "prompt of request 2"
    assert page.evaluate(f'{focused}("aria-valuetext")') == "1 token"
    page.keyboard.press("Delete")
    assert json.loads(state(page)["lengths"]) == [grown, 200]
    assert page.evaluate(f'{focused}("aria-label")') == "prompt of request 2"
    press(page, "order", "sorted")  # rows are chosen in the order in which they stand
    page.locator(f'{ROOT} .pic[data-kind="prompt"] .end[tabindex="0"]').focus()
    page.keyboard.press("ArrowUp")
    assert state(page)["selected"] == "0"
    assert_agrees(page)


def test_adding_and_removing(show):
    page = show()
    page.click(f"{ROOT} .add")
    still(page)
    assert state(page)["requests"] == "3" and state(page)["batchSize"] == "3" and state(page)["selected"] == "2"
    assert_agrees(page)
    for _ in range(2):
        page.click(f"{ROOT} .remove")
        still(page)
    assert json.loads(state(page)["lengths"]) == [50] and page.is_disabled(f"{ROOT} .remove")
    page.locator(f'{ROOT} .pic[data-kind="prompt"] .end').press("Delete")
    assert page.inner_text(f"{ROOT} [role=alert]") == "one request must stay." and state(page)["requests"] == "1"
    assert_agrees(page)


def test_every_control_has_a_name(show):
    page = show(CHAT["lengths"], CHAT["outputs"], batch_size=8)
    nameless = page.eval_on_selector_all(
        f"{ROOT} button, {ROOT} input, {ROOT} select, {ROOT} [role=slider], {ROOT} canvas",
        """all => all.filter(e => !(e.getAttribute("aria-label") || e.closest("label") || e.textContent.trim()))
          .map(e => e.outerHTML)""",
    )
    assert nameless == []
    assert page.locator(f"{ROOT} canvas").first.get_attribute("aria-label").startswith("32 prompts in 4 batches")


@pytest.mark.parametrize("width", [1400, 700, 480])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_it_fits_and_is_crisp(show, width, theme):
    page = show(width=width, theme=theme, scale=2)
    for workload, view in (("given", "padded"), ("chat", "padded"), ("chat", "packed"), ("one-long", "chunked")):
        choose(page, workload)
        press(page, "view", view)
        screenshot(page, f"padding-{workload}-{view}-{width}-{theme}")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        canvas = page.locator(f"{ROOT} canvas").first
        assert canvas.evaluate("c => c.width") == pytest.approx(2 * canvas.bounding_box()["width"], abs=2)
    side = page.locator(f"{ROOT} .head").first.bounding_box()["width"]
    assert side > 0.9 * (min(width, 1200) - 40)  # steps take the whole width
    dark = page.eval_on_selector(ROOT, "root => getComputedStyle(root).color.match(/\\d+/g).map(Number)[0] > 128")
    assert dark == (theme == "dark")


def test_narrow_pictures_stand_below_each_other(show):
    page = show()
    boxes = [page.locator(f"{ROOT} .pic").nth(i).bounding_box() for i in range(2)]
    assert boxes[0]["y"] == boxes[1]["y"]  # beside each other, a request's answer beside its prompt
    page.set_viewport_size({"width": 600, "height": 900})
    page.wait_for_function(f'document.querySelector("{ROOT} canvas").width < 600')
    boxes = [page.locator(f"{ROOT} {part}").bounding_box() for part in (".head.a", ".pic.a", ".head.b", ".pic.b")]
    assert [box["y"] for box in boxes] == sorted(box["y"] for box in boxes)


def test_it_starts_as_it_was_asked_to(show):
    page = show(CHAT["lengths"], CHAT["outputs"], batch_size=8, order="bucketed", view="chunked", budget=300)
    shown = state(page)
    assert (shown["order"], shown["view"], shown["budget"], shown["batchSize"]) == ("bucketed", "chunked", "300", "8")
    assert_agrees(page)
    assert json.loads(shown["batches"]) == [list(b) for b in make_batches(CHAT["lengths"], 8, "bucketed")]


def test_with_a_kernel_the_state_comes_back(lab, open_page):
    cells = [
        "from minibatcher.viz.padding import padding_view\nwidget = padding_view().widget()\nwidget",
        "print(widget.state.get('order'), widget.state.get('lengths'))",
        "widget.tell({'lengths': [8, 2], 'outputs': [3, 4], 'batch_size': 1})",
    ]
    page = lab.open(open_page, cells)
    run_cell(page, 0)
    still(page)
    press(page, "order", "sorted")
    page.fill(f"{ROOT} input.prompt", "60")
    page.press(f"{ROOT} input.prompt", "Enter")
    page.locator(f'{ROOT} .pic[data-kind="prompt"] .end[tabindex="0"]').focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Shift+ArrowLeft")
    page.wait_for_timeout(600)  # the kernel hears of it a little later
    assert run_cell(page, 1).strip() == "sorted [60, 3999]"
    run_cell(page, 2)
    page.wait_for_selector(f'{ROOT}[data-lengths="[8,2]"]')
    assert state(page)["batchSize"] == "1" and cell_text(page, 0)
    assert_agrees(page)
    screenshot(page, "padding-lab")


def test_jupyterlab_leaves_the_keys_to_the_picture(lab, open_page):
    """In both forms: the arrows choose a row, not a cell, and a letter makes no cell."""
    first = "from minibatcher.viz.padding import padding_view\npadding_view()"
    page = lab.open(open_page, [first, "padding_view().widget()"])
    page.set_default_timeout(10_000)
    for number in range(2):
        run_cell(page, number)
        picture = page.locator(ROOT).nth(number)
        picture.wait_for()
        picture.locator('.pic[data-kind="prompt"] .end[tabindex="0"]').focus()
        for key in (
            "b",
            "ArrowDown",
            "Shift+ArrowLeft",
            "ArrowUp",
            "ArrowUp",
            "d",
            "d",
            "ArrowDown",
            "Shift+ArrowLeft",
        ):
            page.keyboard.press(key)
        assert json.loads(picture.get_attribute("data-lengths")) == [50, 3998]
        assert page.locator(".jp-Notebook .jp-Cell").count() == 2
        picture.locator("input.prompt").fill("60")
        picture.locator("input.prompt").press("Enter")
        assert json.loads(picture.get_attribute("data-lengths")) == [50, 60]
