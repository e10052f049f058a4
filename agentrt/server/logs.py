"""How the server logs: one line an event, as text or as JSON, to standard error."""

from __future__ import annotations

import json
import logging
import time
from typing import Any


class JsonLines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def log_config(form: str) -> dict[str, Any]:
    """A `logging.config.dictConfig` for "text" or "json"."""
    text = {"format": "%(asctime)s %(levelname)s %(message)s"}
    formatter: dict[str, Any] = {"()": JsonLines} if form == "json" else text
    names = ("agentrt.server", "uvicorn", "uvicorn.error", "uvicorn.access")
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": formatter},
        "handlers": {"err": {"class": "logging.StreamHandler", "formatter": "line", "stream": "ext://sys.stderr"}},
        "loggers": {name: {"handlers": ["err"], "level": "INFO", "propagate": False} for name in names},
    }
