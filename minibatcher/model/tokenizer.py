"""Text to token ids and back, and what each token is alone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from ..errors import InvalidParameter, MissingDependency, ModelError
from .config import ModelConfig
from .detokenizer import IncrementalDetokenizer


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

        Raises InvalidParameter if the model has no template or its template refuses the messages, MissingDependency
        without jinja2.
        """
        if self.chat_template is None:
            raise InvalidParameter("this model has no chat template; give it plain text")
        try:
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError:
            raise MissingDependency("chat templates need jinja2: pip install jinja2") from None
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse  # by this name templates say what they don't take
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


def _byte_characters() -> dict[str, int]:
    """GPT-2's spelling of bytes as printable characters, reversed. Source: Radford et al., 2019, encoder.py."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_characters()
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")  # how tokenizers with byte fallback name the tokens of single bytes


def _refuse(message: str) -> None:
    raise InvalidParameter(message)


def _chat_template(folder: Path) -> str | None:
    separate, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    if separate.exists():
        return separate.read_text(encoding="utf-8")
    try:
        template: Any = json.loads(config.read_text(encoding="utf-8")).get("chat_template")
    except (OSError, ValueError):
        return None
    return template if isinstance(template, str) else None
