"""How probable the chosen tokens were, and which others the model held most probable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..request import TokenLogprob
from ..transfer import to_device


@dataclass(slots=True)
class Logprobs:
    """Log-probabilities of the M rows that ask for them, on their way to the host.

    Read them once something later on the same stream has been waited for, such as the tokens. rows: which of the step's
    rows they are. counts: how many of the most probable tokens each wants. chosen: float32 [M], of the row's token.
    top: float32 [M, k], the largest, in falling order; top_ids: int64 [M, k], their tokens. k: the largest count.
    """

    rows: list[int]
    counts: list[int]
    chosen: Tensor
    top: Tensor
    top_ids: Tensor

    def read(self, token_ids: Sequence[int]) -> list[tuple[int, TokenLogprob]]:
        """Each row that asks and what it gets; token_ids: the token of each of the step's rows."""
        parts = zip(self.rows, self.counts, self.chosen.tolist(), self.top_ids.tolist(), self.top.tolist())
        return [
            (row, TokenLogprob(token_ids[row], logprob, tuple(zip(ids[:count], values))))
            for row, count, logprob, ids, values in parts
        ]


def log_probabilities(logits: Tensor, token_ids: Tensor, counts: Sequence[int | None]) -> Logprobs | None:
    """Log-softmax of the rows of logits [N, vocab_size], float32, that ask for it; None if none does.

    token_ids: int64 [N], the token chosen for each row. counts: for each row how many of the most probable tokens it
    wants beside that one, or None. Waits for no device.
    """
    rows = [row for row, count in enumerate(counts) if count is not None]
    if not rows:
        return None
    if len(rows) < len(counts):
        (index,) = to_device([np.array(rows, dtype=np.int64)], logits.device)
        logits, token_ids = logits[index], token_ids[index]
    wanted = [count for count in counts if count is not None]
    logprobs = torch.log_softmax(logits, dim=-1)
    top_ids = most_probable(logits, min(max(wanted), logits.shape[-1]))
    parts = logprobs.gather(1, token_ids[:, None])[:, 0], logprobs.gather(1, top_ids), top_ids
    chosen, top, top_ids = (part.to("cpu", non_blocking=True) for part in parts)  # from a GPU to pinned memory
    return Logprobs(rows, wanted, chosen, top, top_ids)


def most_probable(logits: Tensor, k: int) -> Tensor:
    """The tokens of each row's k largest logits, int64 [N, k], the lowest ids first of equal ones.

    Which of equal ones topk takes is left open, and in bfloat16 many are equal; so it is given whole numbers of which
    no two are: the bits of the logit, turned so that they rise with it, and then the id.
    """
    bits = (logits + 0.0).view(torch.int32)  # the sum makes +0.0 of -0.0
    rising = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # of negative numbers, larger bits mean a smaller number
    ids = torch.arange(logits.shape[-1], device=logits.device)
    return rising.long().mul_(2**32).sub_(ids).topk(k, dim=-1).indices
