"""The log of a program, on stderr: text, or one JSON object a line (surface 9, services 7.1)."""

from __future__ import annotations

import json
import logging
import time


class _JsonLines(logging.Formatter):
    """{timestamp, level, component, message, data}; `data` is the traceback, where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "component": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["data"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def log_to_stderr(level: str, form: str) -> None:
    """`form` is "text" or "json"."""
    handler = logging.StreamHandler()
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s")
    handler.setFormatter(_JsonLines() if form == "json" else text)
    logging.basicConfig(level=level.upper(), handlers=[handler])
