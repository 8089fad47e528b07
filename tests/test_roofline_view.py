"""The roofline that a reader moves: its text, its still form, and what it refuses."""

import pytest
from figure_cases import laptop_cost

from minibatcher.claims import phase_bounds, step_intensity
from minibatcher.claims.common import machine
from minibatcher.errors import InvalidParameter
from minibatcher.viz.roofline_view import MACHINES, MAX_DECODES, max_batch, roofline_view, turning_batch


def test_the_words_are_those_of_the_claim():
    cost = machine()
    step = step_intensity(cost, num_decodes=32, context_tokens=1_000)
    view = roofline_view(num_decodes=32)
    for words in (view.alt, view.text):
        assert f"{step.intensity:.1f} FLOPs per byte, below the ridge of {step.ridge:.0f}" in words
        assert f"takes {1e3 * step.seconds:.1f} ms and brings {step.tokens_per_s:,.0f} output tokens/s" in words
    line = next(line for line in view.text.splitlines() if line.startswith("    32 "))
    assert f"{step.bytes_read / 1e9:.0f} GB" in line and line.endswith("bandwidth-bound")
    assert view.text.splitlines()[-1].endswith("compute-bound, does not fit")


def test_where_it_turns_and_what_fits_are_those_of_the_claim():
    (bounds,) = phase_bounds([("llama-3.1-70b", "h100", 4)], [1_000], dtype="bfloat16")
    assert turning_batch(machine(), 1_000) == bounds.decode_ridge_batch
    assert max_batch(machine(), 1_000) == bounds.max_batch
    assert max_batch(machine(), 1_000, 1_000) == bounds.max_batch - 1
    assert turning_batch(machine(), 8_000) is None  # too many bytes of each one's own
    assert "Batches from 1 to 1,024 are all bandwidth-bound." in roofline_view(context_tokens=8_000).text
    assert "Batches from 1 to 1,024 are all compute-bound." in roofline_view(prefill_tokens=4_096).text
    # A prompt's arithmetic, until the decodes' own bytes outweigh it.
    assert "such a step is bandwidth-bound." in roofline_view(prefill_tokens=512, context_tokens=50_000).text


def test_the_readers_machine_comes_first():
    view = roofline_view(laptop_cost())
    assert view.data["machine"] == 0 and len(view.data["machines"]) == len(MACHINES) + 1
    assert view.data["machines"][0]["name"] == "bard on laptop, float32, as measured"
    assert "bard on laptop, float32, as measured" in view.alt
    names = [each["name"] for each in view.data["machines"]]
    assert len(set(names)) == len(names)
    shipped = roofline_view(machine("llama-3.1-8b", "h100", 1))
    assert shipped.data["machine"] == 1 and len(shipped.data["machines"]) == len(MACHINES)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"num_decodes": 0}, "num_decodes must be a whole number from 1 to 1,024, not 0"),
        ({"num_decodes": MAX_DECODES + 1}, "not 1025"),
        ({"num_decodes": 1.5}, "not 1.5"),
        ({"context_tokens": 131_073}, "context_tokens must be a whole number from 1 to 131,072"),
        ({"prefill_tokens": -1}, "prefill_tokens must be a whole number from 0 to 4,096, not -1"),
        ({"cost": "h100"}, "cost must be a CostModel"),
    ],
)
def test_what_makes_no_picture_is_a_sentence(arguments, sentence):
    with pytest.raises(InvalidParameter, match=sentence):
        roofline_view(**arguments)


def test_it_is_small_and_the_same_each_time():
    view = roofline_view(laptop_cost())
    assert len(view.html()) < 150_000
    assert view.data == roofline_view(laptop_cost()).data


def test_the_still_picture_shows_the_path_and_the_step():
    left, right = roofline_view(num_decodes=32).still.axes
    for ax in (left, right):
        filled, hollow, now = (collection.get_offsets() for collection in ax.collections)
        assert len(filled) == 9 and len(hollow) == 2 and len(now) == 1  # 512 and 1,024 do not fit
        assert now[0].tolist() in filled.tolist()
    step = step_intensity(machine(), num_decodes=32)
    assert left.collections[2].get_offsets()[0].tolist() == pytest.approx(
        [step.intensity, step.flops / step.seconds / 1e12]
    )
    assert right.collections[2].get_offsets()[0].tolist() == pytest.approx([32, step.tokens_per_s])
