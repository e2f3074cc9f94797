"""What the server knows about one HTTP request while it runs, and the middleware that owns it."""

import asyncio
import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.typing import FilteringBoundLogger

from loraplex.core import (
    AdapterRef,
    BaseDescription,
    EngineDead,
    NonFiniteOutput,
    Request,
    RequestOutput,
    ServedBy,
    ServerError,
)
from loraplex.core.limits import MAX_MODEL_NAME_CHARS
from loraplex.server.callers import Caller
from loraplex.server.catalog import ModelLease, ToldLoad
from loraplex.server.errors import ErrorReply, http_reply, reply_for
from loraplex.server.identity import Target, identity_headers
from loraplex.server.metrics import Metrics
from loraplex.server.redaction import Redactor
from loraplex.server.stdlib_logs import where
from loraplex.server.tenant_limits import TenantPlace

CLIENT_CLOSED_STATUS = 499  # in logs and metrics only: there is no one left to send it to
MAX_HEADER_BYTES = 64 * 2**10  # names, values and the request's target
UNMATCHED_ROUTE = "unmatched"
_REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_SCOPE_KEY = "loraplex.context"


def shown_s(seconds: float | None, num_places: int = 6) -> float | None:
    """Seconds as answers and log lines have them: in microseconds, unless fewer places are asked for."""
    return None if seconds is None else round(seconds, num_places)


@dataclass(slots=True, eq=False)
class Tally:
    """What has come back from the engine for one HTTP request, over all its prompts."""

    prompt_tokens: dict[int, int] = field(default_factory=dict)  # by prompt index
    output_tokens: dict[int, int] = field(default_factory=dict)
    cached_tokens: dict[int, int] = field(default_factory=dict)
    served_by: ServedBy | None = None
    cold: bool = False
    read_s: float = 0.0  # until the weights were in host memory
    paging_s: float = 0.0  # from there into the pool
    told: ToldLoad | None = None  # in place of these in the answer
    arrived_at: float = 0.0
    prefill_s: float = 0.0  # of the prompt that gave the first token
    first_token_at: float | None = None
    last_token_at: float | None = None
    place: TenantPlace | None = None  # that pays for the tokens
    requests: tuple[Request, ...] = ()  # that the engine was given, by prompt index

    def add(self, prompt_idx: int, output: RequestOutput, now: float) -> None:
        """Book one output. `now` is in the seconds of the context's clock."""
        if self.place is not None:
            self.place.charge(output.num_output_tokens - self.output_tokens.get(prompt_idx, 0))
        self.prompt_tokens[prompt_idx] = output.num_prompt_tokens
        self.output_tokens[prompt_idx] = output.num_output_tokens
        self.cached_tokens[prompt_idx] = output.num_cached_tokens
        self.served_by = output.served_by
        self.cold = self.cold or output.served_by.cold
        self.paging_s = max(self.paging_s, output.served_by.load_s)
        if output.num_output_tokens:
            if self.first_token_at is None:
                self.first_token_at, self.prefill_s = now, output.timings.prefill_s
            self.last_token_at = now

    @property
    def load_s(self) -> float:
        """Seconds that this request waited for its weights."""
        return self.read_s + self.paging_s

    @property
    def shown_load(self) -> ToldLoad:
        """What the answer says of loading."""
        return self.told or ToldLoad(self.cold, self.load_s)

    def queue_s(self, load_s: float) -> float | None:
        """Seconds from the request's arrival to its first step, less those of loading; None before the first token."""
        if self.first_token_at is None:
            return None
        return max(0.0, self.first_token_at - self.prefill_s - self.arrived_at - load_s)

    @property
    def decode_s(self) -> float | None:
        """Seconds from the first token to the last so far; None before the first."""
        if self.first_token_at is None or self.last_token_at is None:
            return None
        return self.last_token_at - self.first_token_at

    @property
    def num_prompt_tokens(self) -> int:
        return sum(self.prompt_tokens.values())

    @property
    def num_begun_tokens(self) -> int:
        """Of the prompts whose computation has begun, whether or not it gave a token."""
        return sum(
            len(request.prompt_token_ids)
            for prompt_idx, request in enumerate(self.requests)
            if request.progress.has_begun or prompt_idx in self.prompt_tokens
        )

    @property
    def num_cached_tokens(self) -> int:
        """Of the prompts, taken from the prefix cache."""
        return sum(self.cached_tokens.values())

    @property
    def num_output_tokens(self) -> int:
        return sum(self.output_tokens.values())


@dataclass(slots=True, eq=False)
class RequestContext:
    """One HTTP request. Handlers fill in what they learn; the middleware logs and counts it at the end."""

    request_id: str  # the client's X-Request-Id where it is sane; not unique, so never an engine id
    started_at: float
    redactor: Redactor
    status: int | None = None
    caller: Caller | None = None  # None on public routes and where authentication failed
    requested_model: str | None = None
    lease: ModelLease | None = None
    resolved: ServedBy | None = None  # what `model` stood for, from when that was known
    target: Target = field(default_factory=Target)
    error_code: str | None = None  # of the error that was answered, also after a stream had begun
    error_reason: str | None = None  # its `reason`, one of a fixed set
    error_detail: str | None = None  # its message, where it quotes nothing that a client sent
    tally: Tally = field(default_factory=Tally)

    def __post_init__(self) -> None:
        self.tally.arrived_at = self.started_at

    @property
    def known_caller(self) -> Caller:
        """The caller, on a route that authenticates. Raises ServerError elsewhere."""
        if self.caller is None:
            raise ServerError("The route does not authenticate its callers.")
        return self.caller

    def note_error(self, error: Exception) -> ErrorReply:
        """Keep what the log shall say of an error; what the client is told of it."""
        reply = self.note_reply(reply_for(error))
        self.error_detail = error.message if isinstance(error, ServerError) else None
        if isinstance(error, NonFiniteOutput) and error.served_by is not None:
            self.tally.served_by = error.served_by
        return reply

    def note_reply(self, reply: ErrorReply) -> ErrorReply:
        """Keep the code and reason of an error; the error as the client may see it."""
        self.error_code, self.error_reason = reply.code, reply.reason
        return reply.without_keys(self.redactor)

    @property
    def weights(self) -> ServedBy | None:
        """The weights that ran, or where none did those that the request was pinned to."""
        return self.tally.served_by or self.resolved

    def identity_headers(self) -> dict[str, str]:
        """What an error's headers say of the weights; nothing where none were found."""
        return identity_headers(self.weights) if self.weights is not None else {}

    def pin(self, base: BaseDescription, adapter: AdapterRef | None) -> None:
        """Note what `model` stands for, before its weights are looked for."""
        self.resolved = ServedBy(base.name, base.fingerprint, adapter)

    def hold(self, lease: ModelLease) -> AdapterRef | None:
        """Keep a lease until the answer has ended; what it is a lease of."""
        self.lease = lease
        self.tally.cold, self.tally.read_s, self.tally.told = lease.is_cold, lease.load_s, lease.told
        return lease.adapter


def context_of(request: HttpRequest) -> RequestContext:
    """The context that the middleware made for this request."""
    return cast("RequestContext", request.scope[_SCOPE_KEY])


def sane_request_id(given: str | None, redactor: Redactor) -> str:
    """The client's id if it can stand in headers and logs, else a fresh one."""
    is_sane = given is not None and _REQUEST_ID.fullmatch(given) is not None and redactor.text(given) == given
    return given if given is not None and is_sane else uuid.uuid4().hex


class ContextMiddleware:
    """Outermost ASGI layer: request id, last-resort errors, metrics and one access log line a request."""

    def __init__(self, app: ASGIApp, metrics: Metrics, log: FilteringBoundLogger, redactor: Redactor) -> None:
        self._app = app
        self._redactor = redactor
        self._metrics = metrics
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = sane_request_id(Headers(scope=scope).get("x-request-id"), self._redactor)
        context = RequestContext(request_id, time.perf_counter(), self._redactor)
        scope[_SCOPE_KEY] = context
        try:
            await self._run(context, scope, receive, send)
        finally:
            self._finish(context, scope)

    async def _run(self, context: RequestContext, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app; whatever escapes it becomes a 5xx in the one error shape, if an answer has not begun."""

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                context.status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = context.request_id
            await send(message)

        try:
            if _num_header_bytes(scope) > MAX_HEADER_BYTES:
                reply = context.note_reply(http_reply(431, f"The headers have more than {MAX_HEADER_BYTES} bytes."))
                await reply.response({"Connection": "close"})(scope, receive, send_with_id)
                return
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            context.status = CLIENT_CLOSED_STATUS
        except asyncio.CancelledError:
            if context.status is None:
                reply = context.note_error(EngineDead("The server shut down before the answer was complete."))
                await reply.response(context.identity_headers())(scope, receive, send_with_id)
            raise
        except Exception as error:
            log_unexpected(self._log, error, context.request_id)
            reply = context.note_error(error)
            if context.status is None:
                await reply.response(context.identity_headers())(scope, receive, send_with_id)

    def _finish(self, context: RequestContext, scope: Scope) -> None:
        if context.lease is not None:
            context.lease.release()
        if context.tally.place is not None:
            context.tally.place.leave(context.tally.num_begun_tokens)
        seconds = time.perf_counter() - context.started_at
        route = getattr(scope.get("route"), "path", UNMATCHED_ROUTE)
        status = context.status or 500
        self._metrics.observe_http(route, status)
        if context.error_code is not None:
            self._metrics.observe_error(context.error_code, context.error_reason)
        tally = context.tally
        complete = status == 200 and context.error_code is None
        if complete and tally.first_token_at is not None and tally.last_token_at is not None:
            decode_s = tally.last_token_at - tally.first_token_at
            ttft_s = tally.first_token_at - context.started_at
            self._metrics.observe_generation(ttft_s, decode_s, tally.num_output_tokens, seconds)
        self._log.info("request", **_log_fields(context, scope), route=route, status=status, seconds=shown_s(seconds))


def _num_header_bytes(scope: Scope) -> int:
    """The parser's own limit is for headers that come in pieces; what comes at once may be larger."""
    target = len(scope.get("raw_path") or b"") + len(scope["query_string"])
    return target + sum(len(name) + len(value) for name, value in scope["headers"])


def log_unexpected(log: FilteringBoundLogger, error: Exception, request_id: str) -> None:
    """Log an error that is not ours: its class and where it came from, not its message, which may quote a prompt."""
    log.error("unexpected_error", request_id=request_id, error=type(error).__qualname__, frames=where(error))


def _log_fields(context: RequestContext, scope: Scope) -> dict[str, object]:
    """Fields of the access log: who called, what ran or should have, never a key and never what was said."""
    tally, caller = context.tally, context.caller
    served = context.weights
    adapter = served.adapter if served else None
    return {
        "request_id": context.request_id,
        "tenant": caller.tenant if caller else None,
        "key_id": caller.key_id if caller else None,
        "requested_model": context.requested_model,
        "model": served.model if served else None,
        "version": adapter.version if adapter else None,
        "adapter_digest": adapter.digest if adapter else None,
        "base_fingerprint": served.base_fingerprint if served else None,
        "ran": tally.served_by is not None,
        **_target_fields(context.target, scope.get("path_params", {})),
        "error_code": context.error_code,
        "error_reason": context.error_reason,
        "error_detail": context.error_detail,
        "cold": tally.cold,
        "load_s": shown_s(tally.load_s),
        "queue_s": shown_s(tally.queue_s(tally.load_s)),
        "prefill_s": shown_s(tally.prefill_s if tally.first_token_at is not None else None),
        "decode_s": shown_s(tally.decode_s),
        "prompt_tokens": tally.num_prompt_tokens,
        "cached_tokens": tally.num_cached_tokens,
        "output_tokens": tally.num_output_tokens,
    }


def _target_fields(target: Target, path: Mapping[str, object]) -> dict[str, object]:
    """What an administrator's request is about: what its handler found, else what the path says."""
    version = str(path.get("version", ""))
    return {
        "target_tenant": target.tenant or _shown(path.get("tenant")),
        "target_adapter": target.adapter or _shown(path.get("name")),
        "target_version": target.version or (int(version) if _is_number(version) else None),
        "target_digest": target.digest,
    }


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 9


def _shown(part: object) -> str | None:
    return None if part is None else str(part)[:MAX_MODEL_NAME_CHARS]
