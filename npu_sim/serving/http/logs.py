"""Logs: one JSON object per line on stderr. They contain no text of prompts or replies, and no API keys."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

from npu_sim.serving.http.errors import shortened

LOGGER = logging.getLogger("npu_sim.serving.http")


class JSONLines(logging.Formatter):
    """Formats a log record as JSON: time, level, event, and the fields given as `extra={"fields": ...}`."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            entry["error"] = f"{type(error).__name__}: {error}"
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


def log(event: str, *, level: int = logging.INFO, **fields: Any) -> None:
    """Log an event with fields; long texts in them are cut."""
    short = {name: shortened(value) if isinstance(value, str) else value for name, value in fields.items()}
    LOGGER.log(level, event, extra={"fields": short})


def start_logging(level: str) -> None:
    """Send the logs of this server and the errors of uvicorn to stderr.

    Args:
        level: `debug`, `info`, `warning` or `error`.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JSONLines())
    for name, lowest in ((LOGGER.name, level.upper()), ("uvicorn.error", "ERROR")):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(lowest)
        logger.propagate = False
