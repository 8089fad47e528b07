"""The text of a growing output, piece by piece."""

from __future__ import annotations

import codecs
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .tokenizer import Tokenizer


class IncrementalDetokenizer:
    """The text of one request's output, token by token.

    `add` and `finish` return text that will never be taken back: no half characters, and nothing that might still turn
    out to begin a stop string. All of it joined is `tokenizer.decode(ids)`, cut before the stop string if one came.
    The stop string that is complete first wins; of two complete at the same character, the longer one.
    min_tokens: a stop string that is complete before this many tokens is ordinary text. Cost per token does not grow.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = (), min_tokens: int = 0) -> None:
        self._stop, self._min_tokens = stop, min_tokens
        self._pieces = _byte_pieces(tokenizer) if tokenizer.is_byte_level else _window_pieces(tokenizer)
        self._num_tokens = 0
        self._held = ""
        self._emitted: list[str] = []
        self.stopped: str | None = None

    @property
    def text(self) -> str:
        """All that has been emitted."""
        return "".join(self._emitted)

    def add(self, token_id: int) -> str:
        """Take the next token; returns the text that is now certain. Returns "" once a stop string was found."""
        if self.stopped is not None:
            return ""
        self._num_tokens += 1
        return self._take(self._pieces(token_id))

    def finish(self) -> str:
        """The output ends here: returns what was held back."""
        if self.stopped is not None:
            return ""
        certain = self._take(self._pieces(None))
        if self.stopped is None:
            certain += self._emit(self._held)
            self._held = ""
        return certain

    def _take(self, new: str) -> str:
        if not new:
            return ""
        text, seen = self._held + new, len(self._held)
        if self._num_tokens >= self._min_tokens:
            found = [(at + len(stop), at, stop) for stop in self._stop if (at := _find(text, stop, seen)) >= 0]
            if found:
                _, at, self.stopped = min(found)
                self._held = ""
                return self._emit(text[:at])
        certain = len(text) - max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[certain:]
        return self._emit(text[:certain])

    def _emit(self, text: str) -> str:
        if text:
            self._emitted.append(text)
        return text


def _find(text: str, stop: str, seen: int) -> int:
    """Where `stop` first stands in `text`, its end beyond the `seen` characters already searched; -1 if nowhere."""
    return text.find(stop, max(0, seen - len(stop) + 1))


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, but not all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


# Takes a token and returns the characters that are complete with it; None ends the text and returns the rest.
_Pieces = Callable[["int | None"], str]


def _byte_pieces(tokenizer: Tokenizer) -> _Pieces:
    """For byte-level tokens: an incremental UTF-8 decoder is all it takes."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def piece(token_id: int | None) -> str:
        if token_id is None:
            return decoder.decode(b"", final=True)
        return decoder.decode(tokenizer.token_bytes(token_id))

    return piece


def _window_pieces(tokenizer: Tokenizer, longest: int = 32) -> _Pieces:
    """For other tokens: decode the newest together, and wait while their text ends in a broken character.

    The tokens of the piece before give the decoder its context (some write a space only between two words). After
    `longest` tokens without a whole character it is garbage, not UTF-8, and passes as U+FFFD.
    """
    context: list[int] = []
    fresh: list[int] = []
    known = ""  # the text of the context

    def piece(token_id: int | None) -> str:
        nonlocal context, fresh, known
        if token_id is not None:
            fresh.append(token_id)
        text = tokenizer.decode(context + fresh)
        if token_id is not None and text.endswith("\ufffd") and len(fresh) < longest:
            return ""
        new = text[len(known) :]
        if new:
            context, fresh = fresh, []
            known = tokenizer.decode(context)
        return new

    return piece
