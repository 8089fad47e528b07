"""Further answers to lab 7.0: right ones built in other ways, and wrong ones with a part of what they are told."""

from fractions import Fraction
from itertools import count, repeat
from math import ceil


def widths_by_loop(prompt_tokens, output_tokens):
    widths, cached = [], 0
    for total in range(prompt_tokens, prompt_tokens + output_tokens):
        widths.append(total - cached)
        cached = total
    return widths


def widths_generated(prompt_tokens, output_tokens):
    yield prompt_tokens
    yield from repeat(1, output_tokens - 1)


def computed_by_passes(prompt_tokens, output_tokens):
    passes = range(prompt_tokens, prompt_tokens + output_tokens)
    return passes[-1], sum(passes)


def computed_by_gauss(prompt_tokens, output_tokens):
    last = prompt_tokens + output_tokens - 1
    return [last, (prompt_tokens + last) * output_tokens // 2]


def kv_by_group(num_layers, num_heads, num_kv_heads, head_size, bytes_per_value):
    hidden, group = num_heads * head_size, num_heads // num_kv_heads
    return 2 * hidden * num_layers * bytes_per_value // group


def kv_by_layers(num_layers, num_heads, num_kv_heads, head_size, bytes_per_value):
    total = 0
    for _ in range(num_layers):
        total += num_kv_heads * head_size * bytes_per_value
        total += num_kv_heads * head_size * bytes_per_value
    return total


def fit_by_filling(memory, weights, workspace, kv, tokens):
    used, requests = weights + workspace, 0
    while used + kv * tokens <= memory:
        used += kv * tokens
        requests += 1
    return requests


def fit_in_tokens(memory, weights, workspace, kv, tokens):
    return max(memory - weights - workspace, 0) // kv // tokens


def step_by_search(batch, weights, cache, flops, bandwidth, rate):
    def times(n):
        return (weights + n * cache) / bandwidth, n * flops / rate

    never = cache / bandwidth >= flops / rate
    return max(times(batch)), 0 if never else next(n for n in count(1) if times(n)[1] >= times(n)[0])


def step_by_fractions(batch, weights, cache, flops, bandwidth, rate):
    slope = Fraction(flops, rate) - Fraction(cache, bandwidth)
    seconds = max(Fraction(weights + batch * cache, bandwidth), Fraction(batch * flops, rate))
    return seconds, ceil(Fraction(weights, bandwidth) / slope) if slope > 0 else 0


def raises_where_nothing_fits(memory, weights, workspace, kv, tokens):
    if memory < weights + workspace:
        raise ValueError("the weights do not fit")
    return (memory - weights - workspace) // (kv * tokens)


RIGHT = {
    "7.0-two-phases": [widths_by_loop, widths_generated],
    "7.0-what-the-cache-saves": [computed_by_passes, computed_by_gauss],
    "7.0-kv-bytes": [kv_by_group, kv_by_layers],
    "7.0-how-many-fit": [fit_by_filling, fit_in_tokens],
    "7.0-step-time": [step_by_search, step_by_fractions],
}

WRONG = {
    "7.0-two-phases": [
        (lambda p, n: [5, 1, 1], "prompt_tokens=4, output_tokens=1: expected [4], got [5, 1, 1]"),
        (lambda p, n: p + n - 1, "expected a list, got 7"),
        (lambda p, n: [p] + [1.0] * (n - 1), "expected a whole number, got 1.0"),
        (lambda p, n: [p, 1], "expected [5, 1, 1], got [5, 1]"),
    ],
    "7.0-what-the-cache-saves": [
        (lambda p, n: (7, 18), "with a cache: expected 4, got 7"),
        (lambda p, n: p + n - 1, "expected 2 values"),
        (lambda p, n: (p + n - 1, n * p + n * (n - 1) / 2), "expected a whole number, got 18.0"),
    ],
    "7.0-kv-bytes": [
        (lambda n, h, k, d, b: 48, "expected 10, got 48"),
        (lambda n, h, k, d, b: 2 * n * h * d * b / (h / k), "expected a whole number, got 48.0"),
        (lambda n, h, k, d, b: None, "expected a whole number, got None"),
    ],
    "7.0-how-many-fit": [
        (lambda m, w, s, kv, t: 2, "memory_bytes=30"),
        (raises_where_nothing_fits, "memory_bytes=10, weight_bytes=20"),
        (lambda m, w, s, kv, t: max(1, (m - w - s) // (kv * t)), "expected 0, got 1"),
        (lambda m, w, s, kv, t: max(0, (m - w - s - 1) // (kv * t)), "memory_bytes=37"),
    ],
    "7.0-step-time": [
        (lambda *a: (8.0, 12), "seconds: expected 6, got 8"),
        (lambda b, w, c, f, bw, r: max((w + b * c) / bw, b * f / r), "expected 2 values"),
        (lambda b, w, c, f, bw, r: (max((w + b * c) / bw, b * f / r), 12.5), "expected a whole number, got 12.5"),
        (lambda b, w, c, f, bw, r: ("8", 12), "expected a number, got '8'"),
    ],
}
