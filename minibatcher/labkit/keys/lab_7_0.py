"""Right answers to lab 7.0, and wrong ones."""

from __future__ import annotations

from ..judging import Key, Mistake


def _step_widths(prompt_tokens: int, output_tokens: int) -> list[int]:
    return [prompt_tokens] + [1] * (output_tokens - 1)


TWO_PHASES = Key(
    answer=_step_widths,
    mistakes=(
        Mistake(
            lambda p, n: [p] + [1] * n,
            "One pass too many: the prefill makes the first token, so the decode steps make one token less.",
        ),
        Mistake(
            lambda p, n: [1] * (p + n - 1),
            "You compute the prompt token by token. All of it is there at the start, so one pass takes it at once.",
        ),
        Mistake(
            lambda p, n: [p, n - 1] if n > 1 else [p],
            "You decode all tokens in one pass. Each must wait for the one before it, so each has a pass of its own.",
        ),
        Mistake(
            lambda p, n: [p + i for i in range(n)],
            "You compute all earlier tokens again in each pass. The KV cache holds them: a decode step computes one.",
        ),
        Mistake(lambda p, n: [1] * n, "The first pass has to compute the whole prompt, not one token."),
        Mistake(
            lambda p, n: [p + 1] + [1] * (n - 1),
            "You count the token that the prefill makes. It is computed in the next pass, where it goes in.",
        ),
    ),
)


def _tokens_computed(prompt_tokens: int, output_tokens: int) -> tuple[int, int]:
    p, n = prompt_tokens, output_tokens
    return p + n - 1, n * p + n * (n - 1) // 2


CACHE_SAVES = Key(
    answer=_tokens_computed,
    mistakes=(
        Mistake(
            lambda p, n: (p + n, _tokens_computed(p, n)[1]),
            "With a cache you count the last token of the answer. It is made, but never goes through the model.",
        ),
        Mistake(
            lambda p, n: (p + n - 1, sum(p + i for i in range(1, n + 1))),
            "Without a cache each of your passes has one token too many: the first one has the prompt alone.",
        ),
        Mistake(
            lambda p, n: (p + n, sum(p + i for i in range(1, n + 1))),
            "In both counts you let the last token go through the model. It is made, and the request is over.",
        ),
        Mistake(
            lambda p, n: (p + n - 1, n * (p + n - 1)),
            "Without a cache you give each pass the length of the last one. The request grows by one token a pass.",
        ),
        Mistake(
            lambda p, n: (p + n - 1, n * p),
            "Without a cache the tokens of the answer are computed again too, not the prompt alone.",
        ),
        Mistake(
            lambda p, n: (p + n - 1, p + n * (n - 1) // 2),
            "Without a cache the prompt is computed again in every pass, not the tokens of the answer alone.",
        ),
        Mistake(
            lambda p, n: (n, _tokens_computed(p, n)[1]),
            "With a cache you count passes. The first pass computes all tokens of the prompt.",
        ),
        Mistake(lambda p, n: _tokens_computed(p, n)[::-1], "The two numbers are swapped: with a cache comes first."),
    ),
)


def _kv_bytes(num_layers: int, num_heads: int, num_kv_heads: int, head_size: int, bytes_per_value: int) -> int:
    return sum(num_kv_heads * head_size * bytes_per_value for _ in range(num_layers) for _ in ("keys", "values"))


KV_BYTES = Key(
    answer=_kv_bytes,
    mistakes=(
        Mistake(
            lambda n, h, k, d, b: 2 * n * h * d * b,
            "You count the heads of queries. Only keys and values are kept, and with GQA these have fewer heads.",
        ),
        Mistake(
            lambda n, h, k, d, b: n * k * d * b,
            "That is half of it: a token leaves keys and values, two lists in every layer.",
        ),
        Mistake(lambda n, h, k, d, b: 2 * k * d * b, "That is one layer. Each layer keeps keys and values of its own."),
        Mistake(lambda n, h, k, d, b: 2 * n * k * d, "These are numbers, not bytes: each takes bytes_per_value bytes."),
        Mistake(
            lambda n, h, k, d, b: 2 * n * (h // k) * d * b,
            "h // k is how many heads of queries share one of keys and values. Count those of keys and values.",
        ),
        Mistake(
            lambda n, h, k, d, b: n * (h + k) * d * b,
            "You count keys for each head of queries. Keys have as few heads as values: num_kv_heads.",
        ),
        Mistake(
            lambda n, h, k, d, b: n * (h + 2 * k) * d * b,
            "You keep the queries too. No later token looks at them, so the cache has keys and values only.",
        ),
        Mistake(lambda n, h, k, d, b: 2 * n * k * b, "Each head has head_size numbers, not one."),
    ),
)


def _fit(memory: int, weights: int, workspace: int, kv: int, tokens: int) -> int:
    return max(0, (memory - weights - workspace) // (kv * tokens))


HOW_MANY_FIT = Key(
    answer=_fit,
    mistakes=(
        Mistake(
            lambda m, w, s, kv, t: (m - w - s) // (kv * t),
            "Where the weights do not fit, what is left is negative. A number of requests is not: it is 0.",
        ),
        Mistake(
            lambda m, w, s, kv, t: max(0, -(-(m - w - s) // (kv * t))),
            "You round up. The last request has only a part of the room that it needs: round down.",
        ),
        Mistake(
            lambda m, w, s, kv, t: max(0, round((m - w - s) / (kv * t))),
            "You round to the nearest. A request that fits by more than half still does not fit: round down.",
        ),
        Mistake(
            lambda m, w, s, kv, t: max(0, m - w - s) / (kv * t),
            "A part of a request can't run. Divide by // to get a whole number.",
        ),
        Mistake(
            lambda m, w, s, kv, t: max(0, (m - w) // (kv * t)),
            "You give the workspace to the requests. It is taken before they come, as the weights are.",
        ),
        Mistake(
            lambda m, w, s, kv, t: (m - s) // (kv * t) if m >= w + s else 0,
            "The weights stay in memory too: the requests share what they leave.",
        ),
        Mistake(
            lambda m, w, s, kv, t: max(0, (m - w - s) // kv),
            "That is how many tokens fit. A request has tokens_per_request of them.",
        ),
        Mistake(
            lambda m, w, s, kv, t: m // (w + s + kv * t),
            "You give each request weights of its own. All requests share one copy, and one workspace.",
        ),
        Mistake(
            lambda m, w, s, kv, t: max(0, (m - w) // (s + kv * t)),
            "You give each request a workspace of its own. It is there once, whatever the number of requests.",
        ),
    ),
)


def _seconds(batch: int, weights: int, cache: int, flops: int, bandwidth: int, rate: int) -> float:
    return max((weights + batch * cache) / bandwidth, batch * flops / rate)


def _ridge(weights: int, cache: int, flops: int, bandwidth: int, rate: int) -> int:
    """The smallest batch with batch · flops · bandwidth ≥ (weights + batch · cache) · rate."""
    gained = flops * bandwidth - cache * rate
    return -(-weights * rate // gained) if gained > 0 else 0


def _step_time(batch: int, *rest: int) -> tuple[float, int]:
    return _seconds(batch, *rest), _ridge(*rest)


def _floor_ridge(weights: int, cache: int, flops: int, bandwidth: int, rate: int, more: int = 0) -> int:
    gained = flops * bandwidth - cache * rate
    return weights * rate // gained + more if gained > 0 else 0


def _ridge_or_less(weights: int, cache: int, flops: int, bandwidth: int, rate: int) -> int:
    gained = flops * bandwidth - cache * rate
    return -(-weights * rate // gained) if gained else 0


STEP_TIME = Key(
    answer=_step_time,
    mistakes=(
        Mistake(
            lambda b, w, c, f, bw, r: ((w + b * c) / bw + b * f / r, _ridge(w, c, f, bw, r)),
            "You add the two times. Fetching and calculating go on at once: the longer of the two is the step's.",
        ),
        Mistake(
            lambda b, w, c, f, bw, r: (min((w + b * c) / bw, b * f / r), _ridge(w, c, f, bw, r)),
            "You take the faster of the two. The step is over when the slower one is done.",
        ),
        Mistake(
            lambda b, w, c, f, bw, r: (max(b * (w + c) / bw, b * f / r), _ridge(w, c, f, bw, r)),
            "You fetch the weights once a request. They are fetched once a step, and that is why batching pays.",
        ),
        Mistake(
            lambda b, w, c, f, bw, r: (_seconds(b, w, 0, f, bw, r), _ridge(w, 0, f, bw, r)),
            "The caches are missing: each request has its own, and the step fetches them all.",
        ),
        Mistake(
            lambda b, w, c, f, bw, r: (max((w + c) / bw, b * f / r), _ridge(w, c, f, bw, r)),
            "You fetch one cache. Each request of the batch brings its own.",
        ),
        Mistake(
            lambda b, w, c, f, bw, r: (max((w + b * c) / bw, f / r), _ridge(w, c, f, bw, r)),
            "You count the FLOPs of one request. Each of the batch brings as many.",
        ),
        Mistake(
            lambda b, w, c, f, bw, r: (_seconds(b, w, c, f, bw, r), _ridge(w, 0, f, bw, r)),
            "The seconds are right. The smallest batch forgets the caches, which grow with the batch too.",
        ),
        Mistake(
            lambda b, *rest: (_seconds(b, *rest), _floor_ridge(*rest)),
            "The seconds are right. You round the batch down, where memory still takes longer: round up.",
        ),
        Mistake(
            lambda b, *rest: (_seconds(b, *rest), _floor_ridge(*rest, more=1)),
            "The seconds are right. Where both take equally long, that batch counts already: at least as long.",
        ),
        Mistake(
            lambda b, *rest: (_seconds(b, *rest), _ridge_or_less(*rest)),
            "The seconds are right. A batch can't be negative: where a cache takes longer than its FLOPs, answer 0.",
        ),
        Mistake(lambda *a: _step_time(*a)[::-1], "The two are swapped: the seconds come first, then the batch."),
    ),
)

KEYS = {
    "7.0-two-phases": TWO_PHASES,
    "7.0-what-the-cache-saves": CACHE_SAVES,
    "7.0-kv-bytes": KV_BYTES,
    "7.0-how-many-fit": HOW_MANY_FIT,
    "7.0-step-time": STEP_TIME,
}
