"""Responses that may be asked for again, or continued; bounded in number and in bytes, the oldest go first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from agentrt.server.asks import Message
from agentrt.server.call import Call


@dataclass(slots=True)
class Stored:
    """One response.

    Attributes:
        body: As it was, or is now.
        messages: The chat up to and with its answer, instructions left out.
        call: While it is being answered.
        size: Bytes that it counts for.
    """

    body: dict[str, Any]
    messages: Sequence[Message]
    call: Call | None = None
    size: int = 0


class ResponseStore:
    """The responses of one server."""

    def __init__(self, max_count: int, max_bytes: int) -> None:
        """Makes an empty store."""
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._bytes = 0
        self._stored: OrderedDict[str, Stored] = OrderedDict()

    def __len__(self) -> int:
        return len(self._stored)

    def get(self, response_id: str) -> Stored | None:
        """The response of that id, if it is still kept."""
        return self._stored.get(response_id)

    def put(self, stored: Stored) -> None:
        """Keeps a response, in the place of an older state of it."""
        response_id = stored.body["id"]
        self.drop(response_id)
        stored.size = len(orjson.dumps(stored.body)) + len(orjson.dumps(list(stored.messages)))
        self._stored[response_id] = stored
        self._bytes += stored.size
        while len(self._stored) > self._max_count or (self._bytes > self._max_bytes and self._stored):
            self.drop(next(iter(self._stored)))

    def drop(self, response_id: str) -> bool:
        """Forgets a response; False if it was not kept."""
        stored = self._stored.pop(response_id, None)
        if stored is not None:
            self._bytes -= stored.size
        return stored is not None
