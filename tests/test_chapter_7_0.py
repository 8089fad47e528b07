"""Chapter 7.0: what its cells printed, computed again. Of measured figures, what holds on any machine."""

import re
from itertools import pairwise

import pytest
from book import output, printed

from minibatcher import Engine, Request, SamplingParams, claims, load_model
from minibatcher.hardware import ModelSpec, device, model_spec
from minibatcher.kernels.random_model import LLAMA_1B
from minibatcher.runners.roofline import CostModel

LAYERS = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 4}
FOUR_LAYERS = ModelSpec.from_hf(LLAMA_1B | LAYERS | {"num_hidden_layers": 4, "vocab_size": 2048}, "four layers")
COST = CostModel(device("h100"), FOUR_LAYERS, dtype="float32")  # bytes and FLOPs are those of any machine


@pytest.fixture(scope="module")
def bard():
    return load_model("bard")


def numbers(line):
    return [float(number.replace(",", "")) for number in re.findall(r"-?\d[\d,]*\.?\d*", line)]


def rows_under(text, head):
    """The numbers of the lines below the one that begins with `head`, up to the first one without."""
    lines = text.splitlines()
    (start,) = [i for i, line in enumerate(lines) if line.startswith(head)]
    rows = []
    for line in lines[start + 1 :]:
        if not (line[:1] == " " and numbers(line)):
            break
        rows.append(numbers(line))
    return rows


def after(text, words):
    """The numbers behind `words` in its line."""
    (line,) = [line for line in text.splitlines() if line.startswith(words)]
    return numbers(line.removeprefix(words))


def test_one_wide_step_then_narrow_ones(bard):
    """0.1: the engine computes the whole prompt in its first step, and one token in each further one."""
    prompt = bard.tokenizer.encode("<|bos|>PUCK: Why must I wait for strangers?<|eot|>FALSTAFF:")
    run = Engine.from_model(bard, strategy="solo").run([Request("puck", prompt, SamplingParams(max_tokens=60))])
    widths = [step.num_computed_tokens for step in run.steps]
    assert widths[0] == len(prompt) > 1 and set(widths[1:]) == {1}
    assert len(widths) == run.requests["puck"].num_output_tokens
    assert f"tokens in each step of the engine: {' '.join(map(str, widths))}\n" in output("7.0", "claim-0.1")


def test_the_ridge_is_the_measured_rate_by_the_measured_bandwidth():
    """0.2: and a step of float32 reaches it with so many tokens: four bytes a weight, two FLOPs a token."""
    text = output("7.0", "claim-0.2")
    (bandwidth, *_), (rate, *_) = after(text, "memory bandwidth"), after(text, "arithmetic rate")
    ridge, tokens = after(text, "ridge  ")
    assert ridge == pytest.approx(rate / bandwidth, rel=0.03)
    assert tokens == pytest.approx(2 * ridge, abs=0.7)


def bend_rows(text):
    """The table of the bend: batch, MB, intensity, ms, tokens/s, and, but in the first, the gain by doubling."""
    return rows_under(text, "            (counted)")


def test_a_batch_makes_more_tokens_for_nearly_the_same_bytes():
    """0.2: the table's bytes and FLOPs as the package counts them, its rates as its times say."""
    text = output("7.0", "claim-0.2")
    rows = bend_rows(text)
    assert [row[0] for row in rows] == [2**i for i in range(8)]
    steps = claims.decode_intensity(COST, [2**i for i in range(8)], context_tokens=64)
    for row, step in zip(rows, steps):
        batch, megabytes, intensity, milliseconds, rate = row[:5]
        assert megabytes == round(step.bytes_read / 1e6) and intensity == round(step.intensity, 1)
        assert rate == pytest.approx(1e3 * batch / milliseconds, rel=0.02)
    for smaller, row in pairwise(rows):
        assert row[5] == pytest.approx(2 * smaller[3] / row[3], rel=0.02)
    assert f"A batch of 16 fetches {steps[4].bytes_read / steps[0].bytes_read:.2f} times" in text
    assert steps[4].bytes_read < 1.05 * steps[0].bytes_read and steps[7].bytes_read < 1.3 * steps[0].bytes_read


def test_tokens_per_second_rise_and_bend_at_the_ridge():
    """0.2: a batch brings several times the tokens/s; its last doublings bring less than the best one did."""
    text = output("7.0", "claim-0.2")
    rows = bend_rows(text)
    gains = {row[0]: row[5] for row in rows[1:]}
    _, ridge_batch = after(text, "ridge  ")  # rounded
    assert rows[-1][4] > 3 * rows[0][4]
    places = [after(text, where) for where in ("up to the ridge ", "across it ", "beyond it ")]
    assert [gain for place in places for gain in place] == list(gains.values())  # none is left out
    below, across, beyond = places
    assert len(across) <= 1 and beyond
    assert 2 ** len(below) <= ridge_batch + 0.5 and 2 ** (7 - len(beyond)) >= ridge_batch - 0.5
    assert sum(list(gains.values())[-2:]) / 2 < 0.85 * max(gains.values())


def test_the_share_of_the_roof_is_that_of_the_measured_times():
    """0.2: where the ridge is, and at the largest batch, a step takes longer than bytes and FLOPs alone would."""
    text = output("7.0", "claim-0.2")
    (bandwidth, *_), (rate, *_) = after(text, "memory bandwidth"), after(text, "arithmetic rate")
    took = {row[0]: row[3] / 1e3 for row in bend_rows(text)}
    shares = re.findall(r"^B = (\d+) \(.*\): (\d+) % of what the roof allows$", text, re.MULTILINE)
    assert len(shares) == 2 and int(shares[1][0]) == max(took)
    for batch, share in shares:
        step = claims.step_intensity(COST, num_decodes=int(batch), context_tokens=64)
        least_s = max(step.bytes_read / (bandwidth * 1e9), step.flops / (rate * 1e9))
        assert float(share) == pytest.approx(100 * least_s / took[int(batch)], abs=1.5)
        assert float(share) < 105


def test_on_a_gpu_strangers_cost_next_to_nothing():
    """0.2, simulated: 48 requests in a step of one H100."""
    one_gpu = claims.machine("llama-3.1-8b", num_gpus=1)
    one, many = (claims.step_intensity(one_gpu, num_decodes=n, context_tokens=128) for n in (1, 48))
    text = printed("7.0", "The bend")
    assert f"(simulated): {many.seconds / one.seconds:.2f} × the time of one,\n" in text
    assert f"\n{many.tokens_per_s / one.tokens_per_s:.0f} × the tokens/s. The ridge: {one.ridge:.0f} FLOPs" in text
    assert many.seconds < 1.25 * one.seconds


def test_each_phase_was_measured_with_both_limits():
    """0.3, measured: what a step's shares and twice its tokens say; phases of as many tokens meet the same limit."""
    text = output("7.0", "claim-0.3")
    line = r"^(prefill|decode) +(\d+) \w+ +([\d.]+) +(\d+) % +(\d+) % +([\d.]+) × +(\w+)$"
    lines = re.findall(line, text, re.MULTILINE)
    cases = [(phase, n) for n in (2, 64) for phase in ("prefill", "decode")]
    assert [(phase, int(n)) for phase, n, *_ in lines] == cases
    limits, longer, used = {}, {}, {}
    for phase, n, intensity, memory, arithmetic, twice, limit in lines:
        what = {"prefill_tokens": int(n)} if phase == "prefill" else {"num_decodes": int(n), "context_tokens": 16}
        assert float(intensity) == round(claims.step_intensity(COST, **what).intensity, 1)
        shares = {"memory": int(memory), "arithmetic": int(arithmetic)}
        if limit != "neither":
            assert shares[limit] == max(shares.values()) >= 40
            assert float(twice) >= 1.4 if limit == "arithmetic" else float(twice) <= 1.4
        else:
            fits = float(twice) >= 1.4 if shares["arithmetic"] > shares["memory"] else float(twice) <= 1.4
            assert max(shares.values()) <= 40 or not fits
        limits[phase, int(n)], longer[phase, int(n)] = limit, float(twice)
        used[phase, int(n)] = shares["arithmetic"]
    for phase in ("prefill", "decode"):
        assert limits[phase, 2] != "arithmetic" and limits[phase, 64] == "arithmetic"
        assert longer[phase, 2] < longer[phase, 64] and 2 * used[phase, 2] < used[phase, 64]


def test_where_each_phase_meets_the_ridge_of_real_machines():
    """0.3, from data sheets: every line of the table."""
    text = output("7.0", "claim-0.3")
    machines = [("llama-3.1-8b", "h100", 1), ("llama-3.1-70b", "h100", 4), ("llama-3.1-70b", "h100", 8)]
    rows = claims.phase_bounds([*machines, ("llama-2-7b", "l4", 1)], contexts=(128, 1_000))
    for r in rows:
        decode = "never" if r.decode_ridge_batch is None else f"{r.decode_ridge_batch:,}"
        cells = f"{r.context_tokens:,} {r.ridge:.0f} {r.prefill_ridge_tokens:,} {decode} {r.max_batch:,}"
        line = f"{r.model} on {r.num_gpus} × {r.device} {cells}"
        assert line in [" ".join(printed.split()) for printed in text.splitlines()]
    assert rows[1].decode_ridge_batch is None  # the guess before it
    assert [row.decode_compute_bound_reachable for row in rows[2:6]] == [True, False, True, True]


def test_the_cache_saves_more_the_longer_the_request():
    """0.4: the speed-up is the quotient of its line's times, and grows with the length."""
    rows = rows_under(output("7.0", "claim-0.4"), "tokens so far")
    assert [row[0] for row in rows] == [16, 64, 256, 1024]
    speed_ups = [row[3] for row in rows]
    for _, with_cache, without, speed_up in rows:
        assert speed_up == pytest.approx(without / with_cache, rel=0.02, abs=0.06)
    assert speed_ups[0] < speed_ups[2] < speed_ups[3] and speed_ups[-1] > 10 > speed_ups[0]


def test_the_engine_lays_out_the_bytes_of_the_formula(bard):
    """0.5: 2 × K/V hidden size × layers × bytes, in the pool's own tensors."""
    spec = model_spec("bard")
    engine = Engine.from_model(bard, strategy="continuous", kv_cache_tokens=256)
    tensors = [tensor for layer in engine.runner.pool for tensor in layer]
    blocks, block_size = tensors[0].shape[:2]
    laid_out = sum(tensor.nbytes for tensor in tensors) // (blocks * block_size)
    assert laid_out == spec.kv_bytes_per_token("float32")
    assert f"bytes a token: {laid_out:,} by the formula, {laid_out:,} in the engine\n" in output("7.0", "claim-0.5")


def test_bytes_a_token_and_what_gqa_saves():
    """0.5: 800 KiB for OPT-13B, and every other line of the table."""
    lines = [" ".join(line.split()) for line in output("7.0", "claim-0.5").splitlines()]
    for s in claims.kv_sizes(["opt-13b", "llama-2-13b", "qwen3-14b", "llama-3.1-8b", "llama-3.1-70b"]):
        kib, without = s.bytes_per_token / 1024, s.bytes_without_gqa / 1024
        heads = f"{s.num_layers} {s.num_heads} {s.num_kv_heads}"
        assert f"{s.model} {heads} {kib:,.0f} {without:,.0f} {s.gqa_factor:.0f} ×" in lines
    assert "opt-13b 40 40 40 800 800 1 ×" in lines


def test_how_many_requests_fit_real_gpus():
    """0.6: the calculator's lines, and the picture of a 70B model on more and more GPUs."""
    text = output("7.0", "claim-0.6")
    lines = [" ".join(line.split()) for line in text.splitlines()]
    gpus = [("l4", 1), ("a100-80", 1), ("h200", 1)]
    for r in claims.concurrency(["llama-3.1-8b", "llama-2-13b", "qwen3-14b"], gpus, context_tokens=2_000):
        parts = (r.usable_bytes, r.weight_bytes, r.workspace_bytes, r.kv_bytes)
        gb = " ".join(f"{size / 1e9:.1f}" for size in parts)
        assert f"{r.model} on {r.num_gpus} × {r.device} {gb} {r.max_sequences:,}" in lines
    large = claims.concurrency(["llama-3.1-70b"], [("h100", 2), ("h100", 4), ("h100", 8)], context_tokens=2_000)
    two, four, eight = (r.max_sequences for r in large)
    assert f"Requests of 2,000 tokens that fit: {two} on 2, {four} on 4, {eight} on 8." in text
    assert four > 10 * two > 0


def test_a_small_cache_makes_small_batches(bard):
    """0.6 on the engine: the same requests, less KV memory, fewer of them in a step."""
    text = output("7.0", "claim-0.6")
    speakers = ["ROMEO", "JULIET", "HAMLET", "OPHELIA", "FALSTAFF", "MACBETH", "PUCK", "KING LEAR"]
    prompts = [bard.tokenizer.encode(f"<|bos|>{name}:") for name in speakers]
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    means = []
    for tokens in (1024, 256, 128):
        engine = Engine.from_model(bard, strategy="continuous", max_num_seqs=8, kv_cache_tokens=tokens)
        steps = engine.run([Request(f"r{i}", prompt, params) for i, prompt in enumerate(prompts)]).steps
        means.append(sum(len(step.rows) for step in steps) / len(steps))
        line = f"cache of {tokens:5,} tokens: {means[-1]:.1f} requests a step (mean), {len(steps)} steps\n"
        assert line in text
    assert means[0] == 8 and means == sorted(means, reverse=True) and means[2] < 4
