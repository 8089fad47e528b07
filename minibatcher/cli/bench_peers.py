"""Which engines `minibatcher bench` runs, read from its options."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from ..errors import InvalidParameter, UnknownName

VARIANTS = ("compiled", "prepacked", "plain", "auto")  # of minibatcher: what carries a step on a CPU
OTHERS = ("transformers_generate", "transformers_continuous", "llama_cpp", "vllm", "nano_vllm")
DEFAULT_PEERS = ("minibatcher:compiled", "minibatcher:plain", *OTHERS)


def pair(text: str) -> tuple[str, str]:
    """An option's type: PEER=PATH."""
    name, _, path = text.partition("=")
    if not name or not path:
        raise argparse.ArgumentTypeError(f"{text!r} must be PEER=PATH")
    return name, path


def setting(text: str) -> tuple[str, str, Any]:
    """An option's type: PEER.KEY=VALUE; the value is JSON where it can be read as such, else text."""
    left, equals, right = text.partition("=")
    peer, _, key = left.rpartition(".")
    if not (equals and peer and key):
        raise argparse.ArgumentTypeError(f"{text!r} must be PEER.KEY=VALUE")
    try:
        return peer, key, json.loads(right)
    except ValueError:
        return peer, key, right


def chosen(args: argparse.Namespace) -> list[Any]:
    """The peers that the options name. Raises UnknownName, InvalidParameter."""
    from ..bench.run import Peer

    names = list(dict.fromkeys(args.peers or DEFAULT_PEERS))
    pythons = dict(args.python or ())
    for path in pythons.values():
        if not os.access(path, os.X_OK) or os.path.isdir(path):
            raise InvalidParameter(f"--python: {path!r} is no program that can be run")
    peers = []
    for name in names:
        module, colon, variant = name.partition(":")
        if ("." not in module and module not in ("minibatcher", *OTHERS)) or (colon and variant not in VARIANTS):
            raise UnknownName("peer", name, [f"minibatcher:{v}" for v in VARIANTS] + [*OTHERS])
        if colon and module != "minibatcher":
            raise InvalidParameter(f"{name!r}: only minibatcher has variants")
        settings: dict[str, Any] = {"cpu_path": variant} if variant else {}
        if module == "llama_cpp" and args.llama_server:
            settings["server"] = args.llama_server
        for peer, key, value in args.set or ():
            if peer in (name, module):
                settings[key] = value
        peers.append(Peer(name, module, name, settings, pythons.get(name, pythons.get(module))))
    known = {peer.name for peer in peers} | {peer.module for peer in peers}
    for option, given in (("--python", pythons), ("--set", [peer for peer, _, _ in args.set or ()])):
        if unused := next((peer for peer in given if peer not in known), None):
            raise InvalidParameter(f"{option} names {unused!r}, which is not among the peers: {', '.join(names)}")
    return peers


def sorted_out(peers: list[Any]) -> tuple[list[Any], dict[str, str], dict[str, str]]:
    """Those that can run, by name why others can't, and by name what went wrong with asking."""
    from ..bench.process import ProcessFailed
    from ..bench.run import about

    able, missing, broken = [], {}, {}
    for peer in peers:
        try:
            peer, why = about(peer)
        except ProcessFailed as problem:
            broken[peer.name] = str(problem)
            continue
        if why is None:
            able.append(peer)
        else:
            missing[peer.name] = why
    return able, missing, broken
