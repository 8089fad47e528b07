"""Text to token ids and back, and the text of a growing output, piece by piece."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from ..errors import InvalidParameter, MissingDependency, ModelError
from .config import ModelConfig


class Tokenizer:
    """A tokenizer.json, through the `tokenizers` library."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None = None,
        eos_token_ids: tuple[int, ...] = (),
        chat_template: str | None = None,
    ) -> None:
        self.backend = backend
        self.bos_token_id, self.eos_token_ids, self.chat_template = bos_token_id, eos_token_ids, chat_template

    @classmethod
    def from_file(cls, path: str | Path, config: ModelConfig | None = None) -> Tokenizer:
        """From a tokenizer.json; the chat template from beside it, if there is one. Raises ModelError if damaged."""
        path = Path(path)
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises a bare Exception
            raise ModelError(f"cannot read the tokenizer {str(path)!r}: {error}") from None
        bos, eos = (config.bos_token_id, config.eos_token_ids) if config else (None, ())
        return cls(backend, bos_token_id=bos, eos_token_ids=eos, chat_template=_chat_template(path.parent))

    @property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids. Special tokens written in the text are recognised; none are added unless asked for."""
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text, special tokens left out; U+FFFD stands for bytes that are no UTF-8."""
        return self.backend.decode(list(ids), skip_special_tokens=True)

    def detokenizer(self, stop: tuple[str, ...] = (), min_tokens: int = 0) -> IncrementalDetokenizer:
        """One for each request, since it keeps the text so far."""
        return IncrementalDetokenizer(self, stop, min_tokens)

    def apply_chat_template(self, messages: list[dict[str, str]], *, add_generation_prompt: bool = True) -> str:
        """The prompt text of a conversation, [{"role": "user", "content": "…"}, …], as the model was trained on it.

        Raises InvalidParameter if the model has no template, MissingDependency without jinja2.
        """
        if self.chat_template is None:
            raise InvalidParameter("this model has no chat template; give it plain text")
        try:
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError:
            raise MissingDependency("chat templates need jinja2: pip install jinja2") from None
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        special = {
            "bos_token": self._token(self.bos_token_id),
            "eos_token": self._token(self.eos_token_ids[0] if self.eos_token_ids else None),
        }
        template = environment.from_string(self.chat_template)
        return template.render(messages=messages, add_generation_prompt=add_generation_prompt, **special)

    def _token(self, token_id: int | None) -> str:
        return "" if token_id is None else self.backend.id_to_token(token_id) or ""

    @cached_property
    def _decoders(self) -> list[str]:
        """What its decoder does, one after the other."""
        decoder = json.loads(self.backend.to_str()).get("decoder") or {}
        return [step.get("type") for step in decoder.get("decoders", [decoder])]

    @cached_property
    def is_byte_level(self) -> bool:
        """The tokens of GPT-2's kind (Llama 3, Qwen, SmolLM …): each stands for bytes, and decoding joins these."""
        return self._decoders == ["ByteLevel"]

    @cached_property
    def special_ids(self) -> frozenset[int]:
        return frozenset(i for i, token in self.backend.get_added_tokens_decoder().items() if token.special)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text, b"" if it is special or unknown.

        Known for byte-level tokenizers and for the byte tokens of others (Llama 2); else those of its text.
        """
        token = None if token_id in self.special_ids else self.backend.id_to_token(token_id)
        if token is None:
            return b""
        if self.is_byte_level:
            try:
                return bytes(_BYTE_OF_CHARACTER[character] for character in token)
            except KeyError:  # an added token, kept as plain text
                return token.encode()
        if "ByteFallback" in self._decoders and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(byte[1])
        return self._within_a_text(token_id).encode()

    def token_text(self, token_id: int) -> str:
        """How one token is shown alone: U+FFFD for bytes that are no character, a special token by its name."""
        if token_id in self.special_ids:
            return self.backend.id_to_token(token_id) or ""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def _within_a_text(self, token_id: int) -> str:
        """What it adds after another: some decoders leave out the space before the first token."""
        before, known = self._letter
        text = self.decode([*before, token_id])
        return text[len(known) :] if text.startswith(known) else self.decode([token_id])

    @cached_property
    def _letter(self) -> tuple[list[int], str]:
        """A token to stand before others, and its text."""
        token_ids = self.encode("a")[-1:]
        return token_ids, self.decode(token_ids)


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


def _byte_characters() -> dict[str, int]:
    """GPT-2's spelling of bytes as printable characters, reversed. Source: Radford et al., 2019, encoder.py."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_characters()
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")  # how tokenizers with byte fallback name the tokens of single bytes


def _chat_template(folder: Path) -> str | None:
    separate, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    if separate.exists():
        return separate.read_text(encoding="utf-8")
    try:
        template: Any = json.loads(config.read_text(encoding="utf-8")).get("chat_template")
    except (OSError, ValueError):
        return None
    return template if isinstance(template, str) else None
