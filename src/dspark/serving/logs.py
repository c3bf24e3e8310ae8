"""Log lines: text for people, or one JSON object a line. It knows no request."""

import json
import logging
import sys
import time
from typing import Any

from dspark.errors import InputError

_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}


class JsonLines(logging.Formatter):
    """Time, level, logger and message, then whatever else the record carries."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        values: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_extra(record),
        }
        if record.exc_info:
            values["exception"] = self.formatException(record.exc_info)
        return json.dumps(values, ensure_ascii=False, separators=(",", ":"), default=str)


class TextLines(logging.Formatter):
    """The same for people."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, or more with a traceback."""
        extra = " ".join(f"{name}={value}" for name, value in _extra(record).items())
        line = f"{_time(record)} {record.levelname.lower()} {record.getMessage()} {extra}".rstrip()
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def set_up(*, form: str, level: str) -> None:
    """Send log lines to the error output. Raises `InputError` for an unknown form or level."""
    if form not in ("text", "json"):
        raise InputError(f"log-format is {form!r}, but it must be text or json.")
    if level not in ("debug", "info", "warning", "error"):
        raise InputError(f"log-level is {level!r}, but it must be debug, info, warning or error.")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    for name in ("dspark", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level.upper())
    # uvicorn tells of its own start and end; ours says it in one line
    logging.getLogger("uvicorn").setLevel("WARNING")


def _time(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + (
        f".{int(record.msecs):03d}Z"
    )


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in _OWN}
