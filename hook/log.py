"""Logs as KubeVirt does, one JSON object a line, so that both can be read together; must not decide what to log."""

import json
import logging
import sys
import traceback
from datetime import UTC, datetime

COMPONENT = "pcie-numa-hook"


class JsonFormatter(logging.Formatter):
    """KubeVirt's keys: component, level, msg, pos, timestamp; and `vm`, `trace` where they are known.

    Source: kubevirt.io/client-go/log (FilteredLogger), v1.0-v1.9.
    """

    def format(self, record: logging.LogRecord) -> str:
        """One line; a traceback is in `trace`."""
        fields = {
            "component": COMPONENT,
            "level": record.levelname.lower(),
            "msg": record.getMessage(),
            "pos": f"{record.filename}:{record.lineno}",
            "timestamp": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds")[:-6] + "Z",
        }
        if (vm := getattr(record, "vm", None)) is not None:
            fields["vm"] = vm
        if record.exc_info and record.exc_info[0] is not None:
            fields["trace"] = "".join(traceback.format_exception(*record.exc_info))
        return json.dumps(fields, ensure_ascii=False)


def start() -> logging.Logger:
    """Send everything to standard error as JSON and return the hook's logger."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    return logging.getLogger(COMPONENT)
