"""An upload: a multipart form whose two files go to a directory of ours as they arrive, under names of ours.

The names that a client gives its files are never looked at. Each part has a hard limit, counted while it streams.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from starlette.exceptions import HTTPException
from starlette.requests import Request

from loraplex.adapters import AdapterLimits
from loraplex.adapters.artifact import CONFIG_FILE, WEIGHTS_FILE
from loraplex.adapters.limits import DEFAULT_MAX_BYTES, MAX_CONFIG_BYTES
from loraplex.core import AdapterRefused, InvalidRequest, RefusalReason
from loraplex.registry.uploads import write_failures
from loraplex.server.admin_operations import BaseClaim
from loraplex.server.threads import WorkerThreads

MAX_UPLOAD_BYTES = DEFAULT_MAX_BYTES + MAX_CONFIG_BYTES + 2**20  # of a whole form, before the registry's own limit
MAX_UPLOAD_S = 3600.0
MIN_BYTES_PER_S = 16 * 2**10  # over any stretch of `idle_s` seconds of waiting for the client
FIELDS = ("base_fingerprint", "base_unverified", "source")
_MAX_FIELD_BYTES = 2_000
_WRITE_BYTES = 2**20
_MAX_BOUNDARY_CHARS = 70


class UploadForm:
    """A form while it arrives. Give it to a `with` block, which closes its files; `write` blocks."""

    __slots__ = (
        "_directory",
        "_field",
        "_fields",
        "_file",
        "_files",
        "_header",
        "_is_complete",
        "_limits",
        "_name",
        "_parser",
        "_room",
    )

    def __init__(self, boundary: bytes, directory: Path, limits: AdapterLimits) -> None:
        from python_multipart.multipart import MultipartParser

        self._directory = directory
        self._limits = {"config": (CONFIG_FILE, MAX_CONFIG_BYTES), "weights": (WEIGHTS_FILE, limits.max_bytes)}
        self._files = ExitStack()
        self._fields: dict[str, bytearray | None] = {}  # None for files
        self._header: tuple[bytearray, bytearray] = (bytearray(), bytearray())
        self._name = ""  # of the part that is arriving
        self._is_complete = False
        self._file: IO[bytes] | None = None
        self._field = bytearray()
        self._room = 0
        callbacks: Any = {
            "on_part_begin": self._begin_part,
            "on_header_begin": self._begin_header,
            "on_header_field": lambda data, start, end: self._header[0].extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._header[1].extend(data[start:end]),
            "on_header_end": self._end_header,
            "on_headers_finished": self._open_part,
            "on_part_data": self._take,
            "on_end": self._end,
        }
        self._parser = MultipartParser(boundary, callbacks)

    def __enter__(self) -> "UploadForm":
        return self

    def __exit__(self, *exc: object) -> None:
        self._files.close()

    def write(self, data: bytes) -> None:
        """Take in the next bytes. Raises InvalidRequest, AdapterRefused (TOO_LARGE), StoreFull, StoreUnavailable."""
        from python_multipart.exceptions import FormParserError

        try:
            with write_failures():
                self._parser.write(data)
        except FormParserError:
            raise InvalidRequest("The multipart form is not well-formed.") from None

    def finish(self) -> BaseClaim:
        """What the form says beside its files. Raises InvalidRequest if a part is missing or the form was cut."""
        if not self._is_complete:
            raise InvalidRequest("The multipart form ends before its last boundary.")
        for name in self._limits:
            if name not in self._fields:
                raise InvalidRequest(f"The part {name!r} is missing.", name)
        with write_failures():
            self._files.close()
        texts = {name: _text(name, value) for name, value in self._fields.items() if value is not None}
        unverified = texts.get("base_unverified", "false")
        if unverified not in ("true", "false"):
            raise InvalidRequest(f"base_unverified must be true or false, got {unverified!r:.80}.", "base_unverified")
        if unverified == "true" and "base_fingerprint" in texts:
            raise InvalidRequest("Give base_fingerprint or base_unverified, not both.", "base_unverified")
        return BaseClaim(texts.get("base_fingerprint"), unverified == "true", texts.get("source"))

    # ------------------------------------------------------------------ what the parser calls
    def _begin_part(self) -> None:
        self._name = ""

    def _begin_header(self) -> None:
        self._header = (bytearray(), bytearray())

    def _end_header(self) -> None:
        from python_multipart.multipart import parse_options_header

        field, value = self._header
        if bytes(field).lower() == b"content-disposition":
            kind, options = parse_options_header(bytes(value))
            if kind == b"form-data" and b"name" in options:
                self._name = options[b"name"].decode("utf-8", "replace")

    def _open_part(self) -> None:
        name = self._name
        if name not in (*self._limits, *FIELDS):
            raise InvalidRequest(f"Unknown part {name!r:.80} of the form.", name[:80] or None)
        if name in self._fields:
            raise InvalidRequest(f"The part {name!r} is there twice.", name)
        self._file = None
        if name in self._limits:
            file_name, self._room = self._limits[name]
            self._file = self._files.enter_context((self._directory / file_name).open("xb"))
            self._fields[name] = None
        else:
            self._room = _MAX_FIELD_BYTES
            self._field = self._fields[name] = bytearray()

    def _take(self, data: bytes, start: int, end: int) -> None:
        self._room -= end - start
        if self._room < 0:
            raise self._too_large()
        if self._file is not None:
            self._file.write(memoryview(data)[start:end])
        else:
            self._field += data[start:end]

    def _end(self) -> None:
        self._is_complete = True

    def _too_large(self) -> AdapterRefused | InvalidRequest:
        name = self._name
        if name not in self._limits:
            return InvalidRequest(f"The part {name!r} has more than {_MAX_FIELD_BYTES} bytes.", name)
        file_name, limit = self._limits[name]
        message = f"{file_name} has more bytes than the limit of {limit}."
        return AdapterRefused(RefusalReason.TOO_LARGE, message, file_name)


def boundary_of(http: Request) -> bytes:
    """The boundary of a multipart request. Raises HTTPException (415) for other content."""
    from python_multipart.multipart import parse_options_header

    kind, options = parse_options_header(http.headers.get("content-type", ""))
    boundary: bytes = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not 0 < len(boundary) <= _MAX_BOUNDARY_CHARS:
        shown = kind.decode("latin-1")
        raise HTTPException(415, f"Content-Type must be multipart/form-data with a boundary, got {shown!r:.80}.")
    if http.headers.get("content-encoding", "identity").lower() != "identity":
        raise HTTPException(415, "Content-Encoding is not supported; send the body as it is.")
    return boundary


async def receive_form(http: Request, form: UploadForm, threads: WorkerThreads, idle_s: float) -> BaseClaim:
    """Take in a whole form; its files are written in `threads`.

    Raises what the form raises, and HTTPException (408) where nothing came for `idle_s`, less than MIN_BYTES_PER_S came
    over as many seconds, or it took MAX_UPLOAD_S.
    """
    buffer = bytearray()
    with form:
        try:
            async with asyncio.timeout(MAX_UPLOAD_S):
                async for chunk in _chunks(http, idle_s):
                    buffer += chunk
                    if len(buffer) >= _WRITE_BYTES:
                        await threads.run(form.write, bytes(buffer))
                        buffer.clear()
                await threads.run(form.write, bytes(buffer))
                return await threads.run(form.finish)
        except TimeoutError:
            message = (
                f"The upload stood still for {idle_s:g} s, brought less than {MIN_BYTES_PER_S} bytes per second over "
                f"that time, or took more than {MAX_UPLOAD_S:g} s."
            )
            raise HTTPException(408, message, {"Connection": "close"}) from None


async def _chunks(http: Request, idle_s: float) -> AsyncIterator[bytes]:
    """The body as it arrives. Raises TimeoutError. Only waiting counts, so a slow disk of ours is not the client's."""
    stream = aiter(http.stream())
    waited_s, num_bytes = 0.0, 0
    while True:
        started = time.perf_counter()
        async with asyncio.timeout(idle_s):
            try:
                chunk = await anext(stream)
            except StopAsyncIteration:
                return
        waited_s, num_bytes = waited_s + time.perf_counter() - started, num_bytes + len(chunk)
        if waited_s >= idle_s:
            if num_bytes < MIN_BYTES_PER_S * waited_s:
                raise TimeoutError
            waited_s, num_bytes = 0.0, 0
        if chunk:
            yield chunk


def _text(name: str, value: bytearray) -> str:
    try:
        return value.decode("utf-8").strip()
    except UnicodeDecodeError:
        raise InvalidRequest(f"The part {name!r} is not UTF-8 text.", name) from None
