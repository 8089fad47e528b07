"""Shortest prompt first, with ageing: short questions need not wait for long documents, and these still get there."""

from __future__ import annotations

from ...request import Request
from .base import Ranked


class ShortestPromptFirst(Ranked):
    """Each 1,000 tokens of prompt put a request as far back as if it had arrived `ageing_s` seconds later.

    So a prompt of n tokens can only be overtaken by what arrives within n / 1,000 x ageing_s seconds of it.
    """

    name = "shortest-prompt"

    def __init__(self, ageing_s: float) -> None:
        super().__init__()
        self.ageing_s = ageing_s

    def rank(self, request: Request) -> float:
        return request.arrival_time + request.num_prompt_tokens / 1000 * self.ageing_s
