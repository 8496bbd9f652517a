"""Messages of chats, and the error of templates that refuse them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Message = Mapping[str, Any]
"""A message, with at least {"role": ..., "content": ...}."""


class ChatTemplateError(ValueError):
    """The template is invalid, refuses the messages, or exceeds a limit on time or size (`decodax.io.sandbox`)."""
