"""The routes of OpenAI's interface, and a router to the engine of the model that a body names."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import FastAPI

from .host import EngineHost
from .settings import ServeSettings


def create_app(hosts: Mapping[str, EngineHost], settings: ServeSettings) -> FastAPI:
    """An application that serves `hosts` by name; start them before it answers, and stop them after."""
    return FastAPI()
