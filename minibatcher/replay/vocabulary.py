"""Which token ids a synthetic prompt may hold: told by the server, or read from a tokenizer's files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..model.config import ModelConfig
from ..model.loader import find_model, read_json
from ..model.tokenizer import Tokenizer
from ..prompts import special_token_ids
from .server import Server


@dataclass(frozen=True)
class Vocabulary:
    """size: None where nobody tells. special: ids that no prompt may hold. tokenizer: None without its files."""

    size: int | None
    special: tuple[int, ...] = ()
    tokenizer: Tokenizer | None = None

    @classmethod
    def of_server(cls, server: Server) -> Vocabulary:
        return cls(server.vocab_size, server.special_token_ids)

    @classmethod
    def of_files(cls, name: str) -> Vocabulary:
        """name: bard, a folder with config.json and tokenizer.json, a tokenizer.json, a .gguf file or a hub id.

        Raises ModelError, MissingDependency.
        """
        if name.endswith(".json"):
            tokenizer = Tokenizer.from_file(Path(name).expanduser())
            return cls(tokenizer.vocab_size, tuple(sorted(tokenizer.special_ids)), tokenizer)
        folder = find_model(name)
        generation = folder / "generation_config.json"
        config = ModelConfig.from_hf(
            read_json(folder / "config.json"), read_json(generation) if generation.exists() else None
        )
        file = folder / "tokenizer.json"
        read = Tokenizer.from_file(file, config) if file.exists() else None
        return cls(config.vocab_size, special_token_ids(config, read), read)

    def count_tokens(self, text: str) -> int:
        """Tokens of a prompt, as `compare` counts them. Only with a tokenizer."""
        assert self.tokenizer is not None
        return len(self.tokenizer.encode(text, add_special_tokens=True))
