"""From rows to requests: lengths that are forced, and lengths that are left open."""

from __future__ import annotations

import pytest

from minibatcher.errors import WorkloadError
from minibatcher.prompts import synthetic_prompt, to_requests
from minibatcher.request import SamplingParams
from minibatcher.workload import Workload, WorkloadRequest


class Words:
    """A tokenizer with one id a word."""

    def encode(self, text, *, add_special_tokens):
        return [len(word) for word in text.split()]


def workload(*rows):
    return Workload("w", tuple(WorkloadRequest(f"r{i}", 0.0, *row) for i, row in enumerate(rows)), "Made by a test.")


def test_rows_with_lengths_are_forced_and_rows_with_text_are_tokenized():
    params = SamplingParams(max_tokens=9, min_tokens=2, stop=("x",), temperature=0.5)
    forced, free = to_requests(
        workload((5, 3), (None, None, "to be or")), vocab_size=50, tokenizer=Words(), special=range(40), params=params
    )
    assert len(forced.prompt_token_ids) == 5 and set(forced.prompt_token_ids) <= set(range(40, 50))
    assert forced.params == SamplingParams(max_tokens=3, ignore_eos=True, temperature=0.5)
    assert free.prompt_token_ids == [2, 2, 2] and free.params == params
    with pytest.raises(WorkloadError, match="'r0' of w has text, but the model has no tokenizer"):
        to_requests(workload((None, None, "to be")), vocab_size=50)


@pytest.mark.parametrize("prompt_tokens, most", [(2, 9), (11, 9), (12, 8), (19, 1), (20, 9), (25, 9)])
def test_an_open_output_length_is_cut_to_what_the_context_leaves(prompt_tokens, most):
    rows = workload((prompt_tokens, None), (prompt_tokens, 30))
    params = SamplingParams(max_tokens=9, min_tokens=4)
    free, forced = to_requests(rows, vocab_size=50, params=params, max_model_len=20)
    assert free.params == SamplingParams(max_tokens=most, min_tokens=min(4, most))
    assert forced.params.max_tokens == 30  # the row says so; what does not fit is for the engine to refuse


def test_synthetic_prompts_repeat_and_differ():
    first = synthetic_prompt(30, 100, 4, "a")
    assert first == synthetic_prompt(30, 100, 4, "a")
    assert first != synthetic_prompt(30, 100, 5, "a") != synthetic_prompt(30, 100, 5, "b")
    assert len(synthetic_prompt(3, 100, 4, "\ud800")) == 3  # an id that no file could hold
