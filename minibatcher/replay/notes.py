"""What must be said of a replay beside its numbers: sentences for its record, shown under its table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from ..metrics import COMPLETED
from ..timeline import Timeline
from .answer import COUNTED_BY, Answer
from .asks import Ask

LATE_MS = 10.0  # of which an open-loop client may be late without a word
MOST_ERRORS = 3


def notes_of(
    asks: Sequence[Ask], answers: Sequence[Answer], timeline: Timeline, own_keys: bool, special_known: bool
) -> list[str]:
    """own_keys: each tenant sent a key of its own. special_known: the model's special tokens are."""
    return [
        *_special(asks, special_known),
        *_late(asks, answers),
        *_counted(answers),
        *_lengths(asks, answers, timeline),
        *_cached(asks, timeline),
        *_tenants(timeline, own_keys),
        *_errors(answers),
    ]


def _special(asks: Sequence[Ask], known: bool) -> list[str]:
    if known or all(ask.row.prompt is not None for ask in asks):
        return []
    return [
        "nobody told which tokens of the model are special, so prompts may hold some, and are not those of compare; "
        "name the model's tokenizer with --tokenizer"
    ]


def _late(asks: Sequence[Ask], answers: Sequence[Answer]) -> list[str]:
    late = [(a.sent - ask.row.arrival_time) * 1e3 for ask, a in zip(asks, answers) if a.sent is not None]
    if not late or (p99 := float(np.percentile(late, 99))) <= LATE_MS:
        return []
    return [
        f"requests went out late (p50 {np.percentile(late, 50):.1f} ms, p99 {p99:.1f} ms after their time), and TTFT "
        "holds that delay: so long did it take to open connections and write to them"
    ]


def _counted(answers: Sequence[Answer]) -> list[str]:
    ways: Counter[str] = Counter()
    events = several = 0
    for answer in answers:
        counts, how = answer.tokens_of_events()
        if answer.finish_reason in COMPLETED:
            ways[how] += 1
        events += sum(n > 0 for n in counts)
        several += sum(n > 1 for n in counts)
    notes = []
    if any(how != "ids" for how in ways):
        notes.append(f"output tokens are counted by {COUNTED_BY[ways.most_common(1)[0][0]]}; their ids are not told")
    if several:
        notes.append(
            f"{several:,} of {events:,} events brought several tokens, which then have the same time: ITL is longer "
            "between events and 0 within them; TPOT does not mind"
        )
    return notes


def _lengths(asks: Sequence[Ask], answers: Sequence[Answer], timeline: Timeline) -> list[str]:
    records = list(timeline.requests.values())
    ended = [(ask, r) for ask, r in zip(asks, records) if r.finish_reason in COMPLETED]
    other = sum(ask.forced and r.num_output_tokens != ask.max_tokens for ask, r in ended)
    notes = []
    if other:
        notes.append(
            f"{other:,} of {len(ended):,} answers did not have the length that was asked for: this server does not go "
            "on after the end of sequence, or counts otherwise, so the work is not the same"
        )
    pairs = [(ask.num_prompt_tokens, r.num_prompt_tokens) for ask, r in ended if ask.num_prompt_tokens is not None]
    other_prompts = sum(sent != counted for sent, counted in pairs)
    if other_prompts:
        sent, counted = map(sum, zip(*pairs))
        notes.append(
            f"the server counts other prompt lengths than the workload's for {other_prompts:,} of {len(pairs):,} "
            f"requests: in all {counted:,} tokens, not {sent:,}"
        )
    return notes


def _cached(asks: Sequence[Ask], timeline: Timeline) -> list[str]:
    cached = sum(r.num_cached_tokens for r in timeline.requests.values())
    shares = any(ask.row.prefix_hashes or ask.row.prompt for ask in asks)
    if not cached or shares:
        return []
    return [
        f"{cached:,} prompt tokens were found in the server's prefix cache, though no two of these prompts begin "
        "alike: an earlier replay left them there. Use another --seed, or start the server anew"
    ]


def _tenants(timeline: Timeline, own_keys: bool) -> list[str]:
    tenants = {r.tenant for r in timeline.requests.values()}
    if len(tenants) < 2 or own_keys:
        return []
    return [
        f"the {len(tenants):,} tenants were sent with one key, so the server can't tell them apart (see --api-keys)"
    ]


def _errors(answers: Sequence[Answer]) -> list[str]:
    told = Counter(a.error for a in answers if a.finish_reason == "error")
    if not told:
        return []
    most = "; ".join(f"{n:,} × «{words}»" for words, n in told.most_common(MOST_ERRORS))
    return [f"errors: {most}" + ("; …" if len(told) > MOST_ERRORS else "")]
