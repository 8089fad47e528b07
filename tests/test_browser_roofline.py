"""The roofline picture in a browser: its numbers are the claim's, and a reader moves it."""

import pytest
from browser import check_crisp, drag_finger, has_light_ink, run_cell, screenshot
from figure_cases import laptop_cost

from minibatcher.claims import step_intensity
from minibatcher.claims.common import machine
from minibatcher.runners.roofline import Efficiency
from minibatcher.viz.roofline_view import (
    MACHINES,
    MAX_DECODES,
    _sentences,
    _shipped,
    max_batch,
    roofline_view,
    turning_batch,
)

ROOT = ".mb-roofline"
SHIPPED = [_shipped(*names) for names in MACHINES]


@pytest.fixture
def show(open_page, tmp_path):
    """Opens the page of a roofline_view and returns it."""

    def show(*arguments, width=1280, theme="light", scale=1, **options):
        path = tmp_path / "roofline.html"
        roofline_view(*arguments, **options).save(path, "Roofline")
        page = open_page(path, width=width, theme=theme, scale=scale)
        page.wait_for_selector(ROOT)
        return page

    return show


def state(page) -> dict:
    return page.eval_on_selector(ROOT, "root => ({...root.dataset})")


def type_in(page, name: str, value) -> None:
    page.fill(f"{ROOT} input[type=number].{name}", str(value))
    page.press(f"{ROOT} input[type=number].{name}", "Enter")


def assert_agrees(page, cost) -> None:
    """What the page computes is what Python computes for the same step."""
    shown = state(page)
    batch, context, prefill = (int(shown[name]) for name in ("batch", "context", "prefill"))
    step = step_intensity(cost, num_decodes=batch, context_tokens=context, prefill_tokens=prefill)
    names = {"flops": "flops", "bytes": "bytes_read", "intensity": "intensity", "ridge": "ridge", "seconds": "seconds"}
    for name, field in {**names, "tokensPerS": "tokens_per_s"}.items():
        assert float(shown[name]) == pytest.approx(getattr(step, field), rel=1e-9), name
    assert (shown["computeBound"] == "true") == step.compute_bound
    assert int(shown["fit"]) == max_batch(cost, context, prefill)
    assert shown["turn"] == str(turning_batch(cost, context, prefill) or "")
    told = page.inner_text(f"{ROOT} .sentence")
    assert told == " ".join(_sentences(cost, batch, context, prefill))
    bound = "compute-bound" if step.compute_bound else "bandwidth-bound"
    assert page.inner_text(f"{ROOT} .value.bound") == bound


SETTINGS = [(1, 1, 0), (1, 1_000, 0), (32, 1_000, 512), (129, 500, 1), (1_024, 4_000, 4_096), (7, 131_072, 130)]


@pytest.mark.parametrize("number", range(len(MACHINES)))
def test_the_page_computes_as_python_does(show, number):
    page = show()
    page.select_option(f"{ROOT} .machine", str(number))
    cost = SHIPPED[number]
    for batch, context, prefill in SETTINGS:
        type_in(page, "batch", batch)
        type_in(page, "context", min(context, cost.model.max_position_embeddings))
        type_in(page, "prefill", prefill)
        assert (state(page)["batch"], state(page)["prefill"]) == (str(batch), str(prefill))
        assert_agrees(page, cost)


@pytest.mark.parametrize(
    "cost",
    [
        laptop_cost(),
        machine("llama-2-7b", "h100", 8, efficiency=Efficiency(attention_call_s=2e-6, token_s=1e-6, tile_tokens=1)),
        machine("llama-3.1-8b", "h100", 16),  # more devices than key/value heads
        machine().without("all_reduce", "overhead"),
    ],
)
def test_a_machine_of_ones_own(show, cost):
    page = show(cost, num_decodes=12, context_tokens=300, prefill_tokens=65)
    assert state(page)["machine"] == "0" and state(page)["batch"] == "12"
    assert_agrees(page, cost)
    for batch, context, prefill in SETTINGS[:4]:
        type_in(page, "batch", batch)
        type_in(page, "context", min(context, cost.model.max_position_embeddings))
        type_in(page, "prefill", prefill)
        assert_agrees(page, cost)


def test_sliders_follow_keys_and_pointer(show):
    page = show()
    slider = page.locator(f"{ROOT} input[type=range].batch")
    slider.focus()
    seen = []
    for _ in range(4):
        slider.press("ArrowRight")
        seen.append(int(state(page)["batch"]))
    assert seen == [2, 3, 4, 5] and slider.get_attribute("aria-valuetext") == "5"
    slider.press("End")
    assert state(page)["batch"] == str(MAX_DECODES)
    assert page.inner_text(f"{ROOT} .value.fit").replace("\u00a0", " ") == "486: B is too large"
    for batch, told in ((487, "486: B is too large"), (486, "486")):
        type_in(page, "batch", batch)
        assert page.inner_text(f"{ROOT} .value.fit").replace("\u00a0", " ") == told
        assert_agrees(page, SHIPPED[0])
    slider.press("Home")
    assert state(page)["batch"] == "1"
    for name, most in (("context", 131_072), ("prefill", 4_096)):
        other = page.locator(f"{ROOT} input[type=range].{name}")
        box = other.bounding_box()
        page.mouse.move(box["x"] + 8, box["y"] + box["height"] / 2)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] + 20, box["y"] + box["height"] / 2, steps=5)
        page.mouse.up()
        assert state(page)[name] == str(most)
    assert_agrees(page, SHIPPED[0])


def test_dragging_in_a_plot_moves_the_batch(show):
    page = show()
    rates = page.locator(f"{ROOT} canvas.rates").bounding_box()
    middle = rates["y"] + rates["height"] / 2
    page.mouse.move(rates["x"] + 70, middle)
    page.mouse.down()
    page.mouse.move(rates["x"] + rates["width"] / 2, middle, steps=3)
    half = int(state(page)["batch"])
    assert 16 < half < 64
    page.mouse.move(rates["x"] + rates["width"] + 300, middle, steps=3)
    assert state(page)["batch"] == str(MAX_DECODES)
    page.mouse.up()
    page.mouse.move(rates["x"] + 70, middle)
    assert state(page)["batch"] == str(MAX_DECODES)
    roof = page.locator(f"{ROOT} canvas.roof").bounding_box()
    page.mouse.click(roof["x"] + 55, roof["y"] + roof["height"] - 60)  # the lowest mark is the nearest
    assert state(page)["batch"] == "1"
    assert_agrees(page, SHIPPED[0])


def test_a_finger_does_it_too(show):
    page = show()
    rates = page.locator(f"{ROOT} canvas.rates").bounding_box()
    middle = rates["y"] + rates["height"] / 2
    drag_finger(page, *((rates["x"] + rates["width"] * share, middle) for share in (0.2, 0.4, 0.6, 0.8)))
    assert int(state(page)["batch"]) > 64
    assert_agrees(page, SHIPPED[0])


def test_what_is_no_setting_is_a_sentence(show):
    page = show(num_decodes=8)
    for name, value in (("batch", 0), ("batch", 1_025), ("context", 1.5), ("prefill", 4_097), ("batch", "")):
        type_in(page, name, value)
        assert "a whole number from" in page.inner_text(f"{ROOT} [role=alert]")
        assert (state(page)["batch"], state(page)["context"], state(page)["prefill"]) == ("8", "1000", "0")
        assert page.input_value(f"{ROOT} input[type=number].batch") == "8"
    type_in(page, "batch", 9)
    assert page.inner_text(f"{ROOT} [role=alert]") == "" and state(page)["batch"] == "9"


def test_a_machine_with_a_shorter_context_keeps_to_it(show):
    page = show(context_tokens=100_000)
    short = next(i for i, cost in enumerate(SHIPPED) if cost.model.name == "llama-2-7b")
    page.select_option(f"{ROOT} .machine", str(short))
    assert state(page)["context"] == "4096"
    assert_agrees(page, SHIPPED[short])


def test_every_control_has_a_name(show):
    page = show()
    nameless = page.eval_on_selector_all(
        f"{ROOT} button, {ROOT} input, {ROOT} select, {ROOT} canvas",
        "all => all.filter(e => !e.getAttribute('aria-label')).map(e => e.outerHTML)",
    )
    assert nameless == []
    assert "FLOPs per byte" in page.get_attribute(f"{ROOT} canvas.roof", "aria-label")


@pytest.mark.parametrize("width", [1400, 700, 480])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_it_fits_and_is_crisp(show, width, theme):
    page = show(laptop_cost(), width=width, theme=theme, scale=2, num_decodes=4, context_tokens=500)
    page.locator("img").wait_for(state="detached")  # the still picture has made way
    for name, number, prefill in (("laptop", 0, 0), ("mixed", 1, 512), ("small", 6, 0)):
        page.select_option(f"{ROOT} .machine", str(number))
        type_in(page, "prefill", prefill)
        screenshot(page, f"roofline-{name}-{width}-{theme}")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        for kind in ("roof", "rates"):
            canvas = page.locator(f"{ROOT} canvas.{kind}")
            check_crisp(canvas, 2)
    assert has_light_ink(page, ROOT) == (theme == "dark")


def test_with_a_kernel_the_state_comes_back(lab, open_page):
    cells = [
        "from minibatcher.viz import roofline_view\nwidget = roofline_view().widget()\nwidget",
        "print(widget.state)",
        "widget.tell({'num_decodes': 64, 'prefill_tokens': 128})",
    ]
    page = lab.open(open_page, cells)
    run_cell(page, 0)
    page.wait_for_selector(ROOT)
    type_in(page, "batch", 16)
    page.wait_for_timeout(600)  # the kernel hears of it a little later
    assert "'num_decodes': 16, 'context_tokens': 1000" in run_cell(page, 1)
    run_cell(page, 2)
    page.wait_for_selector(f'{ROOT}[data-batch="64"]')
    assert state(page)["prefill"] == "128"
    assert_agrees(page, SHIPPED[0])
