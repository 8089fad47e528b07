"""The same under a second name."""

from .fake import environment, missing, serve  # noqa: F401

TITLE = "other engine (fake)"
