import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minibatcher.model.sampling import ban, keep_top, request_seed, sample, uniform
from minibatcher.request import SamplingParams


def uniforms(n, seed=0):
    return torch.tensor([uniform(seed, i) for i in range(n)], dtype=torch.float64)


def chi_square(counts, probabilities):
    """Distance of counts from expectation, as a number of standard deviations of the chi-square distribution."""
    kept = probabilities > 0
    assert counts[~kept].sum() == 0
    expected = probabilities[kept] * counts.sum()
    freedom = int(kept.sum()) - 1
    return (((counts[kept] - expected) ** 2 / expected).sum().item() - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize(
    "params", [{"temperature": 1.0}, {"temperature": 0.6}, {"temperature": 1.3, "top_k": 7, "top_p": 0.8}]
)
def test_distribution(params):
    torch.manual_seed(3)
    logits, n = torch.randn(40) * 2, 40_000
    params = SamplingParams(**params)
    tokens = sample(logits.expand(n, -1), [params] * n, uniforms(n, seed=11))
    wanted = torch.softmax(keep_top((logits / params.temperature)[None], [params])[0].double(), -1)
    assert abs(chi_square(torch.bincount(tokens, minlength=40).double(), wanted)) < 4


@given(st.lists(st.integers(-6, 6), min_size=2, max_size=12), st.integers(0, 14), st.floats(0.01, 1.0))
def test_kept_sets_are_exact(logits, top_k, top_p):
    params = SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p)
    kept = (
        torch.isfinite(keep_top(torch.tensor([logits], dtype=torch.float32), [params]))[0].nonzero().flatten().tolist()
    )
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[: top_k or None]
    weights = [math.exp(logits[i]) for i in order]
    total, running, wanted = sum(weights), 0.0, []
    for i, weight in zip(order, weights):
        if top_p < 1 and running / total >= top_p - 1e-12:
            break
        wanted.append(i)
        running += weight
    edge = abs(running / total - top_p) < 1e-9  # a sum that hits p to the last bit may go either way
    assert kept == sorted(wanted) or edge


def test_of_equals_the_lowest_ids_are_kept():
    level = torch.zeros(2, 4000)
    kept = keep_top(level, [SamplingParams(temperature=1.0, top_k=3), SamplingParams(temperature=1.0, top_p=0.001)])
    assert torch.isfinite(kept).nonzero().tolist() == [[row, i] for row, n in ((0, 3), (1, 4)) for i in range(n)]
    half = keep_top(torch.zeros(1, 4), [SamplingParams(temperature=1.0, top_p=0.5)])
    assert torch.isfinite(half).nonzero()[:, 1].tolist() == [0, 1]  # two reach a half: a third is not needed


def test_greedy_takes_the_lowest_of_equals():
    logits = torch.tensor([[0.0, 5.0, 5.0, 1.0], [7.0, 7.0, 7.0, 7.0]])
    assert sample(logits, [SamplingParams()] * 2, torch.tensor([0.9, 0.9])).tolist() == [1, 0]


@given(
    st.lists(st.tuples(st.sampled_from([0, 0.5, 1.0]), st.integers(0, 5), st.sampled_from([0.3, 0.9, 1.0])), min_size=1)
)
def test_a_row_does_not_depend_on_its_neighbours(settings):
    n = len(settings)
    logits = torch.randn(n, 50, generator=torch.Generator().manual_seed(n)) * 3
    params = [SamplingParams(temperature=t, top_k=k, top_p=p) for t, k, p in settings]
    banned = [[i % 50, 7] if i % 2 else [] for i in range(n)]
    u = uniforms(n)
    together = sample(logits, params, u, banned)
    alone = [sample(logits[i : i + 1], params[i : i + 1], u[i : i + 1], banned[i : i + 1]).item() for i in range(n)]
    assert together.tolist() == alone and together.dtype == torch.int64


def test_extreme_random_numbers_stay_in_the_set():
    logits = torch.tensor([[1.0, 2.0, 3.0, -torch.inf], [-torch.inf, 0.0, 0.0, 0.0]])
    params = [SamplingParams(temperature=1.0)] * 2
    assert sample(logits, params, torch.tensor([0.0, 0.0])).tolist() == [0, 1]
    almost = torch.tensor([1 - 2**-53] * 2, dtype=torch.float64)
    assert sample(logits, params, almost).tolist() == [2, 3]
    # In float32 a number just below 1 is 1. It must not reach the tokens without any probability.
    logits = torch.tensor([[1.0, 2.0, -torch.inf, -torch.inf]])
    assert sample(logits, params[:1], torch.tensor([1.0])).item() == 1


def test_tiny_temperature_is_nearly_greedy():
    logits = torch.tensor([[1.0, 4.0, 2.0]])
    assert sample(logits, [SamplingParams(temperature=1e-6)], torch.tensor([0.999])).item() == 1


def test_banned_tokens_never_come_and_logits_stay():
    logits = torch.tensor([[9.0, 1.0, 2.0], [9.0, 1.0, 2.0]])
    before = logits.clone()
    params = [SamplingParams(), SamplingParams(temperature=1.0)]
    assert sample(logits, params, torch.tensor([0.0, 0.0]), [[0], [0, 1]]).tolist() == [2, 2]
    assert torch.equal(logits, before)
    ban(logits, [1], [2])
    assert logits.isinf().nonzero().tolist() == [[1, 2]]


def test_random_numbers():
    values = [uniform(seed, i) for seed in range(20) for i in range(500)]
    assert len(set(values)) == len(values) and min(values) >= 0 and max(values) < 1
    counts = torch.histc(torch.tensor(values), 50, 0, 1).double()
    assert abs(chi_square(counts, torch.full((50,), 0.02, dtype=torch.float64))) < 4
    # Neither neighbours in one stream nor the same place of neighbouring streams go together.
    grid = torch.tensor(values).view(20, 500)
    assert abs(torch.corrcoef(torch.stack([grid[:, :-1].flatten(), grid[:, 1:].flatten()]))[0, 1]) < 0.05
    assert abs(torch.corrcoef(torch.stack([grid[:-1].flatten(), grid[1:].flatten()]))[0, 1]) < 0.05
    assert uniform(5, 3) == uniform(5, 3) and uniform(2**70 + 5, 0) < 1


def test_request_seeds():
    seeds = {request_seed(engine, name) for engine in range(5) for name in ("a", "b", "1", "11")}
    assert len(seeds) == 20 and request_seed(1, "1") == request_seed(1, "1") and all(0 <= s < 2**64 for s in seeds)


@pytest.mark.parametrize("temperature", [1e-39, 1e-30, 1e-6])
def test_a_tiny_temperature_is_nearly_greedy(temperature):
    logits = torch.randn(5, 30, generator=torch.Generator().manual_seed(2)) * 1e3
    params = [SamplingParams(temperature=temperature)] * 5
    u = torch.linspace(0, 0.99, 5, dtype=torch.float64)
    assert sample(logits, params, u).tolist() == logits.argmax(dim=-1).tolist()


def test_top_k_beyond_the_vocabulary_keeps_all():
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(2))
    u = torch.tensor([0.7], dtype=torch.float64)
    wide, all_of_it = (sample(logits, [SamplingParams(temperature=1.0, top_k=k)], u) for k in (2**31 - 1, 0))
    assert wide.tolist() == all_of_it.tolist()
