"""The keys that tenants send, from the same file that tells a server who may ask."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from ..errors import InvalidParameter
from ..tomlfile import read_toml
from ..workload import Workload

MOST_NAMED = 5


def tenant_keys(path: Path) -> dict[str, str]:
    """Tenant → key, from the tables [keys.TENANT] of a TOML file. Raises InvalidParameter, MissingDependency."""
    try:
        tables = read_toml(path).get("keys")
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidParameter(f"can't read the keys in {str(path)!r}: {error}") from error
    if not isinstance(tables, dict) or not tables:
        raise InvalidParameter(f'{str(path)!r} holds no keys; write a table [keys.NAME] with key = "…" for each tenant')
    keys = {}
    for tenant, table in tables.items():
        key = table.get("key") if isinstance(table, dict) else None
        if not isinstance(key, str) or not key:
            raise InvalidParameter(
                f"[keys.{tenant}] in {str(path)!r} holds no key that could be sent (a client needs the key itself, not "
                "its digest)"
            )
        keys[tenant] = sendable(key, f"the key of [keys.{tenant}] in {str(path)!r}")
    return keys


def check_keys(keys: Mapping[str, str], workload: Workload) -> None:
    """Each tenant has a key: a server would refuse all that the others send. Raises InvalidParameter."""
    missing = sorted({row.tenant for row in workload} - keys.keys())
    if missing:
        raise InvalidParameter(
            f"the workload {workload.name} has tenants without a key: {_some(missing)}; there are keys for "
            f"{_some(list(keys))}. Call the keys as the tenants are called, or give --api-key for all others"
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:MOST_NAMED]) + (f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else "")


def sendable(key: str, what: str) -> str:
    """The key, less spaces and ends of lines around it. Raises InvalidParameter for one that no header can carry."""
    if not re.fullmatch(r"[!-~]+", key.strip()):
        raise InvalidParameter(f"{what} must be a text of printable ASCII characters without spaces, and not empty")
    return key.strip()
