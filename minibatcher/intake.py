"""What a request must be to be let in: refused at the door, with numbers, rather than lost inside."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from .errors import InvalidParameter, RequestRefused
from .kv.blocks import BlockKV
from .request import Request


def check_limits(request: Request, max_model_len: int, kv: BlockKV) -> None:
    """Raise RequestRefused for a request that context or KV pool could never hold: need, have, what to change."""
    name, prompt, total = request.request_id, request.num_prompt_tokens, request.max_total_tokens
    if prompt >= max_model_len:
        raise RequestRefused(
            f"the prompt of request {name!r} leaves no room in the context",
            need=prompt + 1,
            have=max_model_len,
            unit="tokens",
            hint="shorten the prompt or use a model with a longer context",
        )
    if total > max_model_len:
        raise RequestRefused(
            f"request {name!r} could outgrow the context ({prompt} prompt, {request.params.max_tokens} max_tokens)",
            need=total,
            have=max_model_len,
            unit="tokens",
            hint=f"lower max_tokens to {max_model_len - prompt}",
        )
    if kv.blocks_for(total) > kv.num_blocks:
        raise RequestRefused(
            f"request {name!r} can never fit the KV pool ({total} tokens at most)",
            need=kv.blocks_for(total),
            have=kv.num_blocks,
            unit="blocks",
            hint="lower max_tokens, shorten the prompt or raise kv_cache_tokens",
        )


def check_token_ids(request: Request, vocab_size: int, eos_token_ids: Collection[int]) -> None:
    """Raise InvalidParameter for token ids that the model does not know, or stop tokens that ban all others."""
    _known(f"the prompt of request {request.request_id!r}", request.prompt_token_ids, vocab_size)
    stops = request.params.stop_token_ids
    _known(f"stop_token_ids of request {request.request_id!r}", stops, vocab_size)
    if request.params.min_tokens and len({*eos_token_ids, *stops}) >= vocab_size:
        raise InvalidParameter(
            f"request {request.request_id!r} bans every token until min_tokens; name fewer stop_token_ids"
        )


def _known(what: str, ids: Sequence[int], vocab_size: int) -> None:
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise InvalidParameter(f"{what}: {token_id!r} is no token id; this model knows 0 to {vocab_size - 1}")
