"""Which server answers at an address: what it serves, and which of OpenAI's extensions it takes."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import dataclass, field
from typing import Any, NoReturn
from urllib.parse import urlsplit

import aiohttp

from ..errors import InvalidParameter, MinibatcherError

ASK_S = 30  # longest wait for an answer about the server itself
MOST_BYTES = 16 << 20  # of such an answer
LARGEST_VOCABULARY = 2**24  # tokens; the largest models have a quarter of a million

# Beyond OpenAI's own fields, by the owner that a server names for its models. Servers that nobody here knows are only
# asked to go on after the end of sequence, and only if they don't mind (client.warm_up).
EXTENSIONS: dict[str, dict[str, Any]] = {
    "minibatcher": {"ignore_eos": True, "return_token_ids": True},
    "vllm": {"ignore_eos": True, "return_token_ids": True},
    "sglang": {"ignore_eos": True},
    "tensorrt_llm": {"ignore_eos": True},
    "llamacpp": {"ignore_eos": True, "timings_per_token": True},
    "": {"ignore_eos": True},
}
COUNTS_EACH_EVENT = ("minibatcher", "vllm", "sglang", "tensorrt_llm")  # take stream_options.continuous_usage_stats
TAKES_PRIORITY = ("minibatcher", "vllm")


class NoServer(MinibatcherError):
    """Nothing there that could be asked; the sentence says what was tried."""


@dataclass(frozen=True)
class Server:
    """url: with /v1, or whatever stands for it. kind: a key of EXTENSIONS. What a server does not tell is None."""

    url: str
    model: str
    kind: str
    owned_by: str | None = None
    version: str | None = None
    vocab_size: int | None = None
    special_token_ids: tuple[int, ...] = ()
    max_model_len: int | None = None
    extensions: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What a column of a table may be called."""
        known = {"llamacpp": "llama.cpp", "tensorrt_llm": "TensorRT-LLM", "sglang": "SGLang", "vllm": "vLLM"}
        return known.get(self.kind) or self.kind or urlsplit(self.url).netloc


async def find_server(
    session: aiohttp.ClientSession, base_url: str, model: str | None, headers: dict[str, str]
) -> Server:
    """Ask for the models. Raises InvalidParameter for what is no address, NoServer."""
    parts = urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise InvalidParameter(f"--base-url must be an address such as http://127.0.0.1:8000/v1, not {base_url!r}")
    base_url = base_url.rstrip("/")
    urls = [base_url] if parts.path.strip("/") else [base_url + "/v1"]
    if not base_url.endswith("/v1") and parts.path.strip("/"):
        urls.append(base_url + "/v1")
    for url in urls:
        status, told = await _get(session, url + "/models", headers)
        if status == 200:
            return await _describe(session, url, told, model, headers)
        if status in (401, 403):
            raise NoServer(f"{url} wants a key, or another one (status {status}{_words(told)}); give --api-key")
    if model is None:
        raise NoServer(
            f"{urls[0]}/models answers with status {status}{_words(told)}; correct --base-url, "
            "which ends in /v1 as a rule, or name the model with --model if this server has no list of models"
        )
    return Server(urls[0], model, "", extensions=EXTENSIONS[""])


async def _describe(
    session: aiohttp.ClientSession, url: str, told: Any, model: str | None, headers: dict[str, str]
) -> Server:
    listed = told.get("data") if isinstance(told, dict) else None
    entries = [one for one in listed or () if isinstance(one, dict) and isinstance(one.get("id"), str)]
    names = [plain(one["id"]) for one in entries]
    if model is None and len(entries) != 1:
        raise NoServer(f"{url} serves {', '.join(names) or 'no model'}; name one with --model")
    entry = next((one for one in entries if model in (None, one["id"])), None)
    if entry is None:
        raise NoServer(f"{url} does not serve {model!r}; it serves {', '.join(names)}")
    told_meta = entry.get("meta")
    meta: dict[str, Any] = told_meta if isinstance(told_meta, dict) else {}
    owner = str(entry.get("owned_by") or "")
    kind = owner.lower() if owner.lower() in EXTENSIONS else ""
    vocab_size = _count(entry.get("vocab_size")) or _count(meta.get("n_vocab"))
    special = special_ids(entry.get("special_token_ids"), vocab_size)
    if vocab_size is not None and (vocab_size > LARGEST_VOCABULARY or len(special) >= vocab_size):
        raise NoServer(
            f"{url} tells of {vocab_size:,} tokens of which {len(special):,} are special: that is no vocabulary to "
            "make prompts of; is this the right address?"
        )
    length = _count(entry.get("max_model_len")) or _count(meta.get("n_ctx"))
    version = None
    root = url.removesuffix("/v1")
    if kind == "llamacpp":
        _, props = await _get(session, root + "/props", headers)
        if isinstance(props, dict):
            settings = props.get("default_generation_settings")
            length = _count(settings.get("n_ctx")) if isinstance(settings, dict) else length
            version = props.get("build_info")
    elif kind:
        _, about = await _get(session, root + "/version", headers)
        version = about.get("version") if isinstance(about, dict) else None
    return Server(
        url,
        entry["id"],
        kind,
        owned_by=owner or None,
        version=version if isinstance(version, str) else None,
        vocab_size=vocab_size,
        special_token_ids=special,
        max_model_len=length,
        extensions=EXTENSIONS[kind],
    )


async def _get(session: aiohttp.ClientSession, url: str, headers: dict[str, str]) -> tuple[int, Any]:
    """Status and JSON (else None). Raises NoServer."""
    try:
        async with session.get(url, headers=headers, timeout=aiohttp.ClientTimeout(total=ASK_S)) as response:
            body = await read_body(response, MOST_BYTES)
            try:
                return response.status, parse(body)
            except ValueError:
                return response.status, None
    except asyncio.TimeoutError:
        raise NoServer(f"{url} has not answered within {ASK_S} s; is this the server's address?") from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise NoServer(f"no server answers at {url}: {reason(error)}; start it, or correct --base-url") from None


async def read_body(response: aiohttp.ClientResponse, most: int) -> bytes:
    """All of it. Raises ValueError if it is longer than `most` bytes."""
    pieces, size = [], 0
    async for piece in response.content.iter_any():
        pieces.append(piece)
        size += len(piece)
        if size > most:
            raise ValueError(f"the answer is longer than {most:,} bytes")
    return b"".join(pieces)


def parse(text: bytes) -> Any:
    """JSON of a stranger. Raises ValueError for what is none: Python's own reader takes NaN, and breaks on depth."""

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is no JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError:
        raise ValueError("JSON too deeply nested") from None


def reason(error: BaseException) -> str:
    """What went wrong on the way to a server, in few words."""
    if isinstance(error, asyncio.TimeoutError):
        return "no answer in time"
    cause = getattr(error, "os_error", error)  # asyncio's own words hide the reason
    if isinstance(cause, OSError) and cause.errno is not None and cause.errno > 0:
        return os.strerror(cause.errno)
    words = getattr(cause, "strerror", None) or str(cause) or type(error).__name__
    return plain(words)


def plain(words: Any) -> str:
    """A stranger's words in one short line, without what could steer a terminal."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(str(words).split())[:300])


def message_of(told: Any) -> str:
    """The server's own words in an error's body; "" if there are none."""
    if isinstance(told, dict):
        told = told.get("error", told)
        if isinstance(told, dict):
            told = told.get("message") or told.get("detail") or told.get("error_type") or ""
    return plain(told or "")


def _words(told: Any) -> str:
    words = message_of(told)
    return f": {words}" if words else ""


def special_ids(told: Any, vocab_size: int | None) -> tuple[int, ...]:
    """Those that are ids of the vocabulary."""
    listed = {i for i in told if type(i) is int} if isinstance(told, list) else set()
    return tuple(sorted(i for i in listed if 0 <= i < (vocab_size or 0)))


def _count(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None
