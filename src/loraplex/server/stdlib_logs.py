"""What Python's own logging, its warnings and failing threads have to say, as JSON lines of the server's log.

uvicorn, asyncio and other libraries log through `logging`. Their lines may quote exceptions, and these may quote
prompts: so of an exception its class and where it was raised are kept, of a message its first line, and of what is put
into a message only numbers and what is marked as ours (`OwnText`).
"""

import logging
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from structlog.typing import FilteringBoundLogger

from loraplex.core.own_text import OwnText

_WARNINGS = "py.warnings"


def where(error: BaseException) -> list[str]:
    """The frames of an error, without its message and without what stands in the lines."""
    frames = traceback.extract_tb(error.__traceback__)
    return [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]


class JsonLines(logging.Handler):
    """Writes records of WARNING and above as `log_record` events."""

    def __init__(self, log: FilteringBoundLogger) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        fields: dict[str, object] = {"logger": record.name, "message": _message(record)}
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            fields |= {"error": type(error).__qualname__, "frames": where(error)}
        tell = self._log.error if record.levelno >= logging.ERROR else self._log.warning
        tell("log_record", **fields)


def _message(record: logging.LogRecord) -> str:
    text = str(record.msg)
    args = record.args if isinstance(record.args, tuple) else ()
    if args and (record.name == _WARNINGS or all(isinstance(arg, int | float | OwnText) for arg in args)):
        text = record.getMessage()
    return text.splitlines()[0] if text else ""


@contextmanager
def logs_as_json(log: FilteringBoundLogger) -> Iterator[None]:
    """All of this while the block runs; what others installed is put back at its end."""
    handler, root, thread_hook = JsonLines(log), logging.getLogger(), threading.excepthook

    def tell(args: threading.ExceptHookArgs) -> None:
        error = args.exc_value
        frames = where(error) if error is not None else []
        name = args.thread.name if args.thread else None
        log.error("thread_failed", thread=name, error=args.exc_type.__qualname__, frames=frames)

    root.addHandler(handler)
    logging.captureWarnings(True)
    threading.excepthook = tell
    try:
        yield
    finally:
        threading.excepthook = thread_hook
        logging.captureWarnings(False)
        root.removeHandler(handler)
