"""The life of one request: parameters, ends, and token slices."""

from __future__ import annotations

import pytest

from minibatcher.errors import InvalidParameter
from minibatcher.request import FinishReason, Request, SamplingParams, Status


@pytest.mark.parametrize(
    "bad, message",
    [
        ({"max_tokens": 0}, "max_tokens must be a whole number from 1 to 2,147,483,647, not 0"),
        ({"max_tokens": -5}, "not -5"),
        ({"max_tokens": 2.5}, "not 2.5"),
        ({"max_tokens": True}, "not True"),
        ({"min_tokens": 9, "max_tokens": 8}, r"min_tokens \(9\) must not exceed max_tokens \(8\)"),
        ({"temperature": -0.1}, "temperature must be 0"),
        ({"temperature": float("nan")}, "temperature must be 0"),
        ({"temperature": float("inf")}, "temperature must be 0"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 10**30}, "top_k"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids must hold token ids, not -1"),
        ({"stop_token_ids": ("a",)}, "stop_token_ids must hold token ids, not 'a'"),
        ({"stop_token_ids": (1.5,)}, "stop_token_ids must hold token ids, not 1.5"),
        ({"top_p": 0.0}, "top_p must be above 0"),
        ({"top_p": 1.01}, "top_p"),
        ({"seed": -1}, "seed"),
        ({"stop": ("",)}, "non-empty"),
        ({"stop": (3,)}, "non-empty"),
    ],
)
def test_bad_sampling_parameters_are_refused(bad, message):
    with pytest.raises(InvalidParameter, match=message):
        SamplingParams(**bad)


def test_one_stop_string_may_stand_alone():
    assert SamplingParams(stop="END").stop == ("END",)


@pytest.mark.parametrize("arrival", [-0.5, float("nan"), float("inf")])
def test_bad_arrival_times_and_empty_prompts_are_refused(arrival):
    with pytest.raises(InvalidParameter, match="arrival_time"):
        Request("r", [1], arrival_time=arrival)
    with pytest.raises(InvalidParameter, match="empty prompt"):
        Request("r", [])


@pytest.mark.parametrize("priority", ["high", None, True, 1.0, 10**9 + 1, -(10**30), float("nan")])
def test_a_priority_is_a_whole_number_and_of_a_size(priority):
    with pytest.raises(InvalidParameter, match="priority must be a whole number from -1,000,000,000 to 1,000,000,000"):
        Request("r", [1], priority=priority)


def test_largest_priorities_and_odd_names_of_tenants_are_fine():
    for priority in (10**9, -(10**9), 0):
        assert Request("r", [1], priority=priority, tenant="").priority == priority


@pytest.mark.parametrize("tenant", [None, 3, ["a"], b"a"])
def test_a_tenant_is_a_text(tenant):
    with pytest.raises(InvalidParameter, match=r"tenant must be a text, not .* \(request 'r'\)"):
        Request("r", [1], tenant=tenant)


def ends(tokens: list[int], eos=(7,), **params) -> tuple[FinishReason | None, int]:
    """(finish reason, tokens taken) when the model says `tokens`."""
    request = Request("r", [1, 2], SamplingParams(**params))
    for i, token in enumerate(tokens):
        request.append(token, float(i), frozenset(eos))
        if request.finished:
            break
    return request.finish_reason, request.num_output_tokens


def test_ends_of_a_sequence():
    assert ends([3, 4, 7, 5]) == (FinishReason.STOP, 3)
    assert ends([3, 4, 7, 5], ignore_eos=True, max_tokens=4) == (FinishReason.LENGTH, 4)
    assert ends([3, 4, 5, 6], max_tokens=3) == (FinishReason.LENGTH, 3)
    assert ends([3, 4, 7], max_tokens=3) == (FinishReason.STOP, 3)  # both at once: it stopped by itself
    assert ends([3, 9, 5], stop_token_ids=(9,)) == (FinishReason.STOP, 2)
    assert ends([3, 9, 5], stop_token_ids=(9,), ignore_eos=True) == (FinishReason.STOP, 2)
    assert ends([7, 7, 4, 7, 5], min_tokens=3) == (FinishReason.STOP, 4)
    assert ends([3, 4]) == (None, 2)


def test_a_request_ends_only_once():
    request = Request("r", [1])
    request.finish(FinishReason.ABORT, 1.0)
    with pytest.raises(RuntimeError, match="ended twice"):
        request.finish(FinishReason.STOP, 2.0)
    assert (request.status, request.finish_reason, request.finish_time) == (Status.FINISHED, FinishReason.ABORT, 1.0)


def test_computed_tokens_catch_up_with_tokens():
    request = Request("r", range(10, 15))
    assert (request.num_pending_tokens, request.is_decoding) == (5, False)
    request.num_computed_tokens = 5
    request.append(99, 0.0)
    assert (request.num_pending_tokens, request.is_decoding) == (1, True)
    request.num_computed_tokens = 0  # preempted: a decode becomes a prompt again
    assert (request.num_pending_tokens, request.is_decoding) == (6, False)
    request.append(98, 0.0)
    joined = [10, 11, 12, 13, 14, 99, 98]
    for start in range(8):
        for stop in range(start, 8):
            assert request.token_slice(start, stop) == joined[start:stop]


def test_a_one_token_prompt_is_no_decode():
    assert not Request("r", [5]).is_decoding


@pytest.mark.parametrize(
    "stop_after, made, reason", [(3, 3, FinishReason.STOP), (5, 5, FinishReason.LENGTH), (9, 5, FinishReason.LENGTH)]
)
def test_a_forced_length_ends_it_as_the_model_would(stop_after, made, reason):
    request = Request("r", [1, 2], SamplingParams(max_tokens=5, ignore_eos=True, stop_after=stop_after))
    assert request.max_total_tokens == 7  # all that a scheduler may know
    while not request.finished:
        request.append(8, now=1.0)
    assert (request.num_output_tokens, request.finish_reason) == (made, reason)


@pytest.mark.parametrize("stop_after", [0, -1, 2.0, True])
def test_a_forced_length_must_be_a_number_of_tokens(stop_after):
    with pytest.raises(InvalidParameter, match="stop_after"):
        SamplingParams(stop_after=stop_after)
