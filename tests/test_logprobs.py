"""Log-probabilities of output tokens: the model's own, whoever is beside whom, and only where asked for."""

from __future__ import annotations

import copy
import math

import pytest

torch = pytest.importorskip("torch")

from fakes import fake_engine  # noqa: E402
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from minibatcher import LLM, Engine, SamplingParams  # noqa: E402
from minibatcher.compiled.library import find_compiler  # noqa: E402
from minibatcher.errors import InvalidParameter  # noqa: E402
from minibatcher.model.loader import load_model  # noqa: E402
from minibatcher.model.logprobs import log_probabilities, most_probable  # noqa: E402
from minibatcher.request import FinishReason, Request, TokenLogprob  # noqa: E402
from minibatcher.runners import model as model_runner  # noqa: E402

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
TOLERANCE = 2e-4  # float32 against float64
SMALL = {"max_num_seqs": 3, "max_num_batched_tokens": 24, "block_size": 5}
TIGHT = {"max_num_batched_tokens": 48, "block_size": 4, "kv_cache_tokens": 120}


@pytest.fixture(scope="module")
def bard():
    return load_model("bard", dtype="float32")


@pytest.fixture(scope="module")
def truth(bard):
    """The log-probability of every token after each prefix, float64, each request by itself and in one go."""
    model = copy.deepcopy(bard.model).double()
    groups = bard.config.num_heads // bard.config.num_kv_heads

    def attend(layer, q, k, v):
        q, k, v = (x.transpose(0, 1) for x in (q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)

    @torch.inference_mode()
    def log_softmax(request: Request):
        tokens = torch.tensor([*request.prompt_token_ids, *request.output_token_ids[:-1]])
        hidden = model(tokens, torch.arange(len(tokens)), attend)[request.num_prompt_tokens - 1 :]
        return torch.log_softmax(hidden @ model.embed_tokens.weight.T, dim=-1)

    return log_softmax


def mixed_requests(bard) -> list[Request]:
    """Greedy and sampled ones, with 0, 1, 5 and 20 of the most probable tokens, and some that ask for nothing."""
    generator = torch.Generator().manual_seed(5)
    counts, made = (5, None, 0, 20, 1, None, 20, 3), []
    for i, (length, count) in enumerate(zip((3, 90, 41, 1, 57, 16, 33, 24), counts)):
        prompt = torch.randint(3, bard.config.vocab_size, (length,), generator=generator).tolist()
        sampling = {"temperature": 0.9, "top_p": 0.8, "seed": i} if i % 3 == 0 else {}
        params = SamplingParams(max_tokens=12 + 3 * i, ignore_eos=True, logprobs=count, **sampling)
        made.append(Request(f"r{i}", prompt, params))
    return made


def silent(request: Request) -> Request:
    """The same one, asking for nothing."""
    known = {
        name: getattr(request.params, name) for name in ("max_tokens", "ignore_eos", "temperature", "top_p", "seed")
    }
    return Request(request.request_id, request.prompt_token_ids, SamplingParams(**known))


def assert_true(request: Request, truth, tolerance: float = TOLERANCE) -> None:
    assert [entry.token_id for entry in request.logprobs] == request.output_token_ids
    expected, count = truth(request), request.params.logprobs
    for entry, row in zip(request.logprobs, expected):
        assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=tolerance)
        ids, values = [token for token, _ in entry.top], [value for _, value in entry.top]
        assert len(set(ids)) == len(ids) == count and values == sorted(values, reverse=True)
        assert values == pytest.approx(row[ids].tolist(), abs=tolerance)
        assert values == pytest.approx(row.topk(count).values.tolist(), abs=tolerance)


@pytest.mark.parametrize(
    "strategy, options",
    [
        ("solo", {}),
        ("static", {"max_num_seqs": 4}),
        ("dynamic", {"max_num_seqs": 3, "cpu_path": "plain"}),
        ("continuous", {"cpu_path": "prepacked"}),
        ("chunked", SMALL),
        ("chunked", SMALL | {"cpu_path": "plain", "plan_ahead": True}),
        ("continuous", TIGHT),
        ("chunked", TIGHT | {"preemption": "swap"}),
        ("chunked", TIGHT | {"plan_ahead": True, "enable_prefix_caching": True}),
        pytest.param("static", {"max_num_seqs": 4, "cpu_path": "compiled"}, marks=needs_compiler),
        pytest.param("chunked", TIGHT | {"cpu_path": "compiled"}, marks=needs_compiler),
    ],
)
def test_they_are_the_models_own_and_change_no_answer(bard, truth, strategy, options):
    engine = Engine.from_model(bard, strategy=strategy, max_model_len=512, **options)
    unasked = [silent(request) for request in mixed_requests(bard)]
    engine.run(unasked)
    assert not any(request.logprobs for request in unasked)
    asked = mixed_requests(bard)
    engine.run(asked)
    if "kv_cache_tokens" in options:
        assert sum(request.num_preemptions for request in asked) >= 1
    assert [r.output_token_ids for r in asked] == [r.output_token_ids for r in unasked]
    for request in asked:
        if request.params.logprobs is None:
            assert request.logprobs == []
        else:
            assert_true(request, truth)


def test_of_a_bfloat16_model_the_greedy_token_comes_first_though_others_are_as_probable(bard):
    """Of equal logits, of which there are many in bfloat16, the lowest id is chosen; so it is named first."""
    engine = Engine.from_model(load_model("bard", dtype="bfloat16"), strategy="chunked", max_model_len=512)
    requests = [
        Request(f"r{i}", [i + 3, 2 * i + 9], SamplingParams(max_tokens=60, logprobs=4, ignore_eos=True))
        for i in range(8)
    ]
    engine.run(requests)
    entries = [entry for request in requests for entry in request.logprobs]
    assert any(entry.top[0][1] == entry.top[1][1] for entry in entries)  # else this shows nothing
    for entry in entries:
        assert entry.top[0] == (entry.token_id, entry.logprob)
        assert list(entry.top) == sorted(entry.top, key=lambda pair: (-pair[1], pair[0]))


def test_clients_get_them_with_the_token(bard):
    engine, heard = Engine.from_model(bard, strategy="chunked", max_model_len=64), []
    asking = engine.add("KING:", SamplingParams(max_tokens=4, logprobs=2), on_output=heard.append)
    other = engine.add("KING:", SamplingParams(max_tokens=4), on_output=heard.append)
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    for seen in (heard, outputs):
        assert [o.logprob for o in seen if o.request_id == asking.request_id] == asking.logprobs
        assert [o.logprob for o in seen if o.request_id == other.request_id] == [None] * 4
    assert len(asking.logprobs) == 4 and all(len(entry.top) == 2 for entry in asking.logprobs)
    leaving = engine.add("KING:", SamplingParams(max_tokens=4, logprobs=2), on_output=heard.append)
    engine.step()
    engine.abort(leaving.request_id)
    assert heard[-1].token_id is None and heard[-1].logprob is None and len(leaving.logprobs) == 1


def test_a_banned_token_is_still_as_probable_as_the_model_finds_it(bard):
    """min_tokens keeps the most probable token from being chosen; that it is the most probable is told."""
    engine = Engine.from_model(bard, strategy="chunked", max_model_len=64)
    first = engine.add("KING:", SamplingParams(max_tokens=1, ignore_eos=True))
    engine.step()
    (best,) = first.output_token_ids
    params = SamplingParams(max_tokens=2, min_tokens=2, stop_token_ids=(best,), logprobs=3)
    request = engine.add("KING:", params)
    engine.step()
    (entry,) = request.logprobs
    assert entry.token_id != best == entry.top[0][0] and -math.inf < entry.logprob < entry.top[0][1]
    assert entry.top[1] == (entry.token_id, entry.logprob)


def test_nothing_is_computed_where_nobody_asks(bard, monkeypatch):
    asked = []

    def noted(logits, token_ids, counts):
        asked.append(log_probabilities(logits, token_ids, counts))
        return asked[-1]

    monkeypatch.setattr(model_runner, "log_probabilities", noted)
    engine = Engine.from_model(bard, strategy="chunked", max_model_len=64)
    engine.add("KING:", SamplingParams(max_tokens=3))
    while engine.has_work():
        engine.step()
    assert asked == [None] * 3


def test_completions_carry_them(bard):
    asked, other = LLM(bard, max_model_len=64).generate(
        ["KING:", "QUEEN:"], [SamplingParams(max_tokens=3, logprobs=1), SamplingParams(max_tokens=3)]
    )
    assert [entry.token_id for entry in asked.logprobs] == asked.token_ids and other.logprobs == []


def test_a_half_appended_token_leaves_none_behind():
    engine = fake_engine("chunked")
    request = engine.add([1, 2], SamplingParams(max_tokens=4, logprobs=0))
    request.output_token_ids += [7, 8]
    request.logprobs += [TokenLogprob(7, -1.0, ()), TokenLogprob(8, -2.0, ())]
    request.token_times.append(0.0)  # an interrupt has come before the second one's
    engine.abort_all()
    assert request.output_token_ids == [7] and request.logprobs == [TokenLogprob(7, -1.0, ())]
    assert request.finish_reason is FinishReason.ABORT


numbers = st.one_of(st.integers(-3, 3).map(float), st.sampled_from([-0.0, math.inf, -math.inf, 1e-38, -1e-38]))


@given(st.lists(st.one_of(numbers, st.floats(width=32, allow_nan=False)), min_size=1, max_size=30), st.integers(0, 40))
def test_the_most_probable_and_of_equals_the_lowest_ids(row, k):
    k = min(k, len(row))
    expected = sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]
    assert most_probable(torch.tensor([row, row[::-1]], dtype=torch.float32), k)[0].tolist() == expected


def test_a_small_vocabulary_is_given_whole_and_rows_get_what_they_ask_for():
    logits = torch.tensor([[0.0, 1.0, 2.0], [5.0, 5.0, -math.inf], [1.0, 1.0, 1.0]])
    before = logits.clone()
    logprobs = log_probabilities(logits, torch.tensor([0, 2, 1]), [20, None, 0])
    assert logprobs is not None and torch.equal(logits, before)
    (first, one), (third, three) = logprobs.read([0, 2, 1])
    assert (first, third) == (0, 2) and [token for token, _ in one.top] == [2, 1, 0]
    assert one.logprob == one.top[2][1] == pytest.approx(-math.log(1 + math.e + math.e**2))
    assert three == TokenLogprob(1, pytest.approx(-math.log(3)), ())
    ((_, impossible),) = log_probabilities(logits, torch.tensor([0, 2, 1]), [None, 1, None]).read([0, 2, 1])
    assert impossible.logprob == -math.inf and impossible.top[0] == (0, pytest.approx(-math.log(2)))
    assert log_probabilities(logits, torch.tensor([0, 2, 1]), [None] * 3) is None


@pytest.mark.parametrize("bad", [-1, 21, True, 2.0, "5"])
def test_how_many_is_checked(bad):
    with pytest.raises(InvalidParameter, match="logprobs must be a whole number from 0 to 20, or None, not "):
        SamplingParams(logprobs=bad)
