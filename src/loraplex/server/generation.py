"""Running a parsed request on the engine and answering it, in one piece or as a stream."""

import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from loraplex.core import (
    AdapterRef,
    FinishReason,
    LoraplexError,
    Overloaded,
    OverloadReason,
    Request,
    RequestId,
    RequestOutput,
    SamplingParams,
    SequenceDelta,
    ServedBy,
    ServerError,
)
from loraplex.server.answers import AnswerFormat, Choice, Json, identity_body, usage
from loraplex.server.context import RequestContext, context_of, log_unexpected
from loraplex.server.deadlines import Deadline
from loraplex.server.identity import identity_headers
from loraplex.server.prompts import Prompt
from loraplex.server.service import Service
from loraplex.server.streams import DONE_EVENT, EventStream, Tagged, close, event, merge, until_disconnect


@dataclass(frozen=True, slots=True)
class Job:
    """A parsed request: what to run, for whom, how soon and until when, and how to phrase the answer."""

    prompts: tuple[Prompt, ...]
    params: SamplingParams
    adapter: AdapterRef | None
    tenant: str
    priority: int  # the engine's: higher is earlier
    deadline: Deadline | None
    wording: AnswerFormat
    stream: bool
    include_usage: bool
    echo: bool = False
    job_id: str = field(default_factory=lambda: uuid.uuid4().hex)  # never the client's: engine ids must be unique
    created: int = field(default_factory=lambda: int(time.time()))

    def requests(self) -> tuple[Request, ...]:
        """One engine request a prompt. Raises DeadlinePassed."""
        left_s = self.deadline.left_s() if self.deadline is not None else None
        return tuple(
            Request(
                request_id=RequestId(f"{self.job_id}-{idx}"),
                prompt_token_ids=prompt.token_ids,
                params=self.params,
                adapter=self.adapter,
                tenant=self.tenant,
                priority=self.priority,
                deadline_s=left_s,
                call_id=self.job_id,
            )
            for idx, prompt in enumerate(self.prompts)
        )

    def echo_of(self, choice_idx: int) -> str:
        """What a choice repeats of its prompt."""
        return self.prompts[choice_idx // self.params.n].text if self.echo else ""

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.params.n


async def answer(service: Service, http: HttpRequest, prepare: Callable[[], Awaitable[Job]]) -> Response:
    """Prepare a job and run it, until the client goes: then nothing is waited for, and ClientDisconnect is raised.

    Errors before the first token are raised, so that they become HTTP errors for streams too.
    """
    return await until_disconnect(http.receive, _answer(service, context_of(http), prepare))


async def _answer(service: Service, context: RequestContext, prepare: Callable[[], Awaitable[Job]]) -> Response:
    job = await prepare()
    requests = context.tally.requests = job.requests()
    source = merge([_outputs(service, request, job.deadline) for request in requests])
    if not job.stream:
        return await _whole_answer(job, context, source)
    try:
        first = await anext(source)
    except BaseException:
        await source.aclose()
        raise
    events = _StreamWriter(service, job, context).events(first, source)
    headers = identity_headers(first.item.served_by)
    return EventStream(events, headers, service.config.stall_timeout_s)


async def _outputs(
    service: Service, request: Request, deadline: Deadline | None
) -> AsyncGenerator[RequestOutput, None]:
    """Outputs of one engine request, checked; the first says that it was started. Closing this cancels the request."""
    stream, is_started = service.engine.generate(request), False
    try:
        async for output in stream:
            _check_output(request, output)
            if not is_started and request.adapter is not None:
                service.preloader.note_start(request.adapter.digest)
            is_started = True
            yield output
            if output.finished:
                return
        raise ServerError("The engine ended the answer early.")
    except Overloaded as error:
        if deadline is not None and error.reason is OverloadReason.DEADLINE:
            raise deadline.passed(error.retry_after_s) from error  # the engine knows what was left of it only
        raise
    finally:
        await close(stream)


def _check_output(request: Request, output: RequestOutput) -> None:
    """Raise ServerError if other weights ran than were resolved, or if the engine gave the request up."""
    ran = output.served_by.adapter
    if (ran.digest if ran else None) != (request.adapter.digest if request.adapter else None):
        raise ServerError("The engine ran other weights than this request resolved to; the answer is withheld.")
    if any(delta.finish_reason is FinishReason.ABORT for delta in output.deltas):
        raise ServerError("The engine aborted the request.")


async def _whole_answer(
    job: Job, context: RequestContext, source: AsyncGenerator[Tagged[RequestOutput], None]
) -> Response:
    choices = [Choice(text=job.echo_of(idx)) for idx in range(job.num_choices)]
    async with aclosing(source):
        async for tagged in source:
            context.tally.add(tagged.source_idx, tagged.item, time.perf_counter())
            for delta in tagged.item.deltas:
                choices[tagged.source_idx * job.params.n + delta.index].add(delta)
    served = context.tally.served_by
    if served is None:
        raise ServerError("The engine gave no output.")
    body = _envelope(job, served, job.wording.whole_object)
    body["choices"] = [
        _choice(idx, job.wording.whole(choice), choice.finish_reason, choice.stop_reason)
        for idx, choice in enumerate(choices)
    ]
    body["usage"] = usage(context.tally)
    body["x_loraplex"] = identity_body(served, context.tally, context.request_id)
    return JSONResponse(body, headers=identity_headers(served))


def _envelope(job: Job, served: ServedBy, object_name: str) -> Json:
    """The fields that answers and chunks share."""
    return {
        "id": f"{job.wording.id_prefix}-{job.job_id}",
        "object": object_name,
        "created": job.created,
        "model": served.model,
        "system_fingerprint": served.system_fingerprint,
    }


def _choice(idx: int, content: Json, finish_reason: str | None, stop_reason: str | int | None) -> Json:
    return {"index": idx, **content, "finish_reason": finish_reason, "stop_reason": stop_reason}


class _StreamWriter:
    """Turns the outputs of one job into server-sent events."""

    def __init__(self, service: Service, job: Job, context: RequestContext) -> None:
        self._service = service
        self._job = job
        self._context = context
        self._offsets = [0] * job.num_choices  # of token texts, for text_offset
        self._num_open = job.num_choices
        self._is_first = True

    async def events(
        self, first: Tagged[RequestOutput], source: AsyncGenerator[Tagged[RequestOutput], None]
    ) -> AsyncGenerator[bytes, None]:
        """All events of the answer. An error becomes the last event: after one there is never a `[DONE]`."""
        async with aclosing(source):
            try:
                self._book(first)
                for data in self._opening(first.item.served_by):
                    yield data
                for data in self._chunks(first):
                    yield data
                async for tagged in source:
                    self._book(tagged)
                    for data in self._chunks(tagged):
                        yield data
                if self._job.include_usage:
                    yield self._usage_chunk()
                yield DONE_EVENT
            except Exception as error:
                yield self._failure(error)

    def _failure(self, error: Exception) -> bytes:
        """The error event. An error that is not ours is logged, as the client is told nothing of its cause."""
        reply = self._context.note_error(error)
        if not isinstance(error, LoraplexError):
            log_unexpected(self._service.log, error, self._context.request_id)
        return event(reply.body())

    def _opening(self, served: ServedBy) -> list[bytes]:
        """The role, or the echoed prompt, of each choice."""
        contents = [self._job.wording.opening(self._job.echo_of(idx)) for idx in range(self._job.num_choices)]
        return [
            self._chunk(served, _choice(idx, content, None, None))
            for idx, content in enumerate(contents)
            if content is not None
        ]

    def _book(self, tagged: Tagged[RequestOutput]) -> None:
        """Count an output before anything is said of it, so that every chunk tells what is known by then."""
        self._context.tally.add(tagged.source_idx, tagged.item, time.perf_counter())

    def _chunks(self, tagged: Tagged[RequestOutput]) -> list[bytes]:
        output = tagged.item
        base_idx = tagged.source_idx * self._job.params.n
        return [self._delta_chunk(output.served_by, base_idx + delta.index, delta) for delta in output.deltas]

    def _delta_chunk(self, served: ServedBy, idx: int, delta: SequenceDelta) -> bytes:
        content = self._job.wording.chunk(delta.text, delta.logprobs, self._offsets[idx])
        self._offsets[idx] += sum(len(item.text) for item in delta.logprobs or ())
        finish = delta.finish_reason.value if delta.finish_reason is not None else None
        self._num_open -= finish is not None
        is_last = self._num_open == 0 and not self._job.include_usage
        return self._chunk(served, _choice(idx, content, finish, delta.stop_reason), is_last=is_last)

    def _chunk(self, served: ServedBy, *choices: Json, is_last: bool = False) -> bytes:
        """One chunk; the first and the last say exactly which weights ran."""
        body = _envelope(self._job, served, self._job.wording.chunk_object)
        body["choices"] = list(choices)
        if self._job.include_usage:
            body["usage"] = usage(self._context.tally) if is_last else None
        if self._is_first or is_last:
            body["x_loraplex"] = identity_body(served, self._context.tally, self._context.request_id)
        self._is_first = False
        return event(body)

    def _usage_chunk(self) -> bytes:
        served = self._context.tally.served_by
        if served is None:
            raise ServerError("The engine gave no output.")
        return self._chunk(served, is_last=True)
