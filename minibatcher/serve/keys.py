"""API keys: who may ask, how much, and how urgently. What is kept of a secret is its digest."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ..errors import InvalidParameter
from ..limits import OTHERS, Limits, TenantLimit
from ..request import PRIORITIES
from ..tomlfile import read_toml

LIMITS = tuple(f.name for f in fields(TenantLimit))
FIELDS = ("key", "key_sha256", "priority", *LIMITS)


@dataclass(frozen=True)
class ApiKey:
    """Who asks. name: the tenant in limits and ordering. priority: the most urgent class that it may ask for, and what
    its requests have that name none."""

    name: str
    priority: int = 0
    limit: TenantLimit = field(default_factory=TenantLimit)


class ApiKeys:
    """All the keys of a server, found by their secrets.

    keys: each with the SHA-256 digest of its secret. Raises InvalidParameter where there is none, or two have one
    secret.
    """

    def __init__(self, keys: Iterable[tuple[bytes, ApiKey]]) -> None:
        self._keys = tuple(keys)
        owners: dict[bytes, str] = {}
        for digest, key in self._keys:
            if digest in owners:
                raise InvalidParameter(f"the keys {owners[digest]!r} and {key.name!r} have the same secret")
            owners[digest] = key.name
        if not owners:
            raise InvalidParameter("no API key is named; give at least one")

    @classmethod
    def single(cls, secret: str) -> ApiKeys:
        """One key without limits. Raises InvalidParameter for a secret that no header can carry."""
        return cls([(_digest("the API key", secret), ApiKey("default"))])

    @classmethod
    def from_file(cls, path: str | Path) -> ApiKeys:
        """Read TOML: a table [keys.NAME] for each key, with `key` (the secret) or `key_sha256` (64 hex digits), and
        any of `priority` and TenantLimit's fields.

        Raises InvalidParameter with what is wrong with the file; no sentence tells a secret.
        """
        tables = _tables(path)
        try:
            return cls(_entry(f"keys.{name}", name, table) for name, table in tables.items())
        except InvalidParameter as error:
            raise InvalidParameter(f"{path}: {error}") from None

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def names(self) -> list[str]:
        return [key.name for _, key in self._keys]

    @property
    def has_priorities(self) -> bool:
        """Some key is not of the most urgent class."""
        return any(key.priority for _, key in self._keys)

    def find(self, bearer: str | None) -> ApiKey | None:
        """Whose secret this is. However wrong it is, the time that it takes is the same."""
        digest, found = _sha256(bearer or ""), None
        for theirs, key in self._keys:
            if hmac.compare_digest(theirs, digest):
                found = key
        return found if bearer else None

    def limits(self, max_waiting_requests: int | None, max_waiting_tokens: int | None) -> Limits:
        """Bounds of the queue, and of each key. One that names no `max_waiting_requests` has an equal share of it, so
        that nobody's flood fills the queue of all."""
        tenants = {}
        for _, key in self._keys:
            own = {name: getattr(key.limit, name) for name in LIMITS}
            if own["max_waiting_requests"] is None and max_waiting_requests is not None:
                own["max_waiting_requests"] = max(1, max_waiting_requests // len(self))
            tenants[key.name] = TenantLimit(**own)
        return Limits(max_waiting_requests, max_waiting_tokens, tenants)


def secrets_of(path: str | Path) -> dict[str, str]:
    """The secrets of a key file by name, for a client that speaks for several tenants; digests tell none.

    Raises InvalidParameter.
    """
    ApiKeys.from_file(path)
    return {name: table["key"] for name, table in _tables(path).items() if "key" in table}


def _tables(path: str | Path) -> dict[str, Any]:
    try:
        data = read_toml(Path(path))
    except OSError as error:
        raise InvalidParameter(f"can't read the key file {str(path)!r}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InvalidParameter(f"the key file {str(path)!r} is not UTF-8; save it as UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise InvalidParameter(f"the key file {str(path)!r} is not TOML: {error}") from None
    tables = data.pop("keys", None)
    if data or not isinstance(tables, dict):
        raise InvalidParameter(f"{path}: a key file has a table [keys.NAME] for each key, and nothing else")
    return tables


def _entry(where: str, name: str, table: Any) -> tuple[bytes, ApiKey]:
    if not isinstance(table, dict):
        raise InvalidParameter('each key is a table: [keys.NAME], and below it key = "…"')
    if not name.strip() or name == OTHERS:
        raise InvalidParameter(f"{name!r} can't be the name of a key; take another")
    if unknown := sorted(set(table) - set(FIELDS)):
        raise InvalidParameter(f"[{where}] has a field {unknown[0]!r}; known: {', '.join(FIELDS)}")
    if ("key" in table) == ("key_sha256" in table):
        raise InvalidParameter(f"[{where}] must have one of key and key_sha256")
    digest = _digest(f"key of [{where}]", table["key"]) if "key" in table else _hex(where, table["key_sha256"])
    priority = table.get("priority", 0)
    if type(priority) is not int or priority not in PRIORITIES:
        raise InvalidParameter(f"priority of [{where}] must be a whole number (0 is served first), not {priority!r}")
    try:
        limit = TenantLimit(**{name: table[name] for name in LIMITS if name in table})
    except InvalidParameter as error:
        raise InvalidParameter(f"[{where}]: {error}") from None
    return digest, ApiKey(name, priority, limit)


def _digest(what: str, secret: Any) -> bytes:
    if not isinstance(secret, str) or not re.fullmatch(r"[!-~]+", secret):
        raise InvalidParameter(f"{what} must be a text of printable ASCII characters without spaces, and not empty")
    return _sha256(secret)


def _hex(where: str, digits: Any) -> bytes:
    if not isinstance(digits, str) or not re.fullmatch(r"[0-9a-fA-F]{64}", digits):
        raise InvalidParameter(f"key_sha256 of [{where}] must be 64 hex digits: printf %s SECRET | sha256sum")
    digest = bytes.fromhex(digits)
    if digest == _sha256(""):
        raise InvalidParameter(f"key_sha256 of [{where}] is that of an empty secret; give it a real one")
    return digest


def _sha256(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()
