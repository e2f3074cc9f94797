"""The engine behind an event loop: one thread steps it, requests stream their outputs to coroutines."""

import asyncio
import logging
import queue
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from loraplex.adapters import Adapter
from loraplex.core import (
    AdapterComparison,
    AdapterDigest,
    AdapterResidence,
    BaseDescription,
    ChatMessage,
    EngineDead,
    EngineStats,
    LoraplexError,
    Request,
    RequestId,
    RequestOutput,
)
from loraplex.core.host_memory import Restored
from loraplex.engine.engine import Engine, StepResult
from loraplex.engine.outputs import RequestFailed
from loraplex.engine.probes import Probe, ProbeRun

HEARTBEAT_S = 10.0
_IDLE_TICK_S = 1.0
_PROBE_TICK_S = 0.02
_STOPPED = "The engine has stopped."

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Stream:
    """Where the outputs of one request go."""

    loop: asyncio.AbstractEventLoop
    outputs: "asyncio.Queue[RequestOutput | LoraplexError]"


_Addressed = tuple[_Stream, RequestOutput | LoraplexError]


class AsyncEngine:
    """An EngineClient. `start` it before use; `stop` ends the thread and fails what still runs.

    `failure` is what ended the thread, if anything did; `on_failure` is then called, from that thread.
    """

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        self.engine = engine
        self.failure: BaseException | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self._clock = clock
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._streams: dict[RequestId, _Stream] = {}
        self._thread = threading.Thread(target=self._run, name="loraplex-engine", daemon=True)
        self._stopping = False
        self._closed = False  # no command is taken any more
        self._submit_lock = threading.Lock()
        self._beat_s = clock()
        engine.on_layer = self._beat

    # ------------------------------------------------------------------ EngineClient
    @property
    def base(self) -> BaseDescription:
        return self.engine.base

    @property
    def max_model_len(self) -> int:
        return self.engine.scheduler.config.max_model_len

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and not self._stopping and self._clock() - self._beat_s < HEARTBEAT_S

    def encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        return tuple(self.engine.tokenizer.encode(text, add_special_tokens))

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.engine.tokenizer.decode(token_ids, skip_special_tokens=False)

    def encode_chat(self, messages: Sequence[ChatMessage], add_generation_prompt: bool = True) -> tuple[int, ...]:
        return tuple(self.engine.tokenizer.encode_chat(messages, add_generation_prompt))

    def check_queue(self, tenant: str, num_sequences: int, num_before: int, num_own: int) -> None:
        self.engine.queue_bounds.check_sequences(tenant, num_sequences, num_before, num_own)

    def stats(self) -> EngineStats:
        return self.engine.stats()

    def residency(self) -> tuple[AdapterResidence, ...]:
        return self.engine.residency()

    def add_adapter(self, adapter: Adapter) -> None:
        """Keep an adapter in host memory, ready for requests; also one that was retired. Raises AdapterRefused."""
        self.engine.add_adapter(adapter)

    def restore_adapter(self, digest: AdapterDigest) -> Restored | None:
        """As `add_adapter`, of what is here or from its packed file; None if there is none to use. Blocks."""
        return self.engine.restore_adapter(digest)

    def store_adapter(self, digest: AdapterDigest) -> None:
        """Keep an adapter that was added packed on disk, if there is a place for that. Blocks."""
        self.engine.store_adapter(digest)

    def host_bytes(self, digest: AdapterDigest) -> int:
        packed = self.engine.shelf.packed.get(digest)
        return 0 if packed is None else packed.num_pages * self.engine.arena.page_bytes

    def is_in_pool(self, digest: AdapterDigest) -> bool:
        return self.engine.scheduler.residency.is_placed(digest)

    def set_tenant_weight(self, tenant: str, weight: float) -> None:
        self.engine.set_tenant_weight(tenant, weight)

    def retire_adapter(self, digest: AdapterDigest, *, for_room: bool = False) -> None:
        """No new requests for it; its memory goes once those that run have ended, at once if none does."""
        self.engine.retire_adapter(digest, for_room=for_room)
        self._submit(lambda: None)  # an engine that rests would look only at its next tick

    def pin_adapter(self, digest: AdapterDigest) -> None:
        """As `Engine.pin_adapter`, between two steps. Blocks until then, so not from the event loop."""
        self._between_steps(partial(self.engine.pin_adapter, digest))

    def unpin_adapter(self, digest: AdapterDigest) -> None:
        """As `Engine.unpin_adapter`, between two steps. Blocks until then."""
        self._between_steps(partial(self.engine.unpin_adapter, digest))

    def preload_adapter(self, digest: AdapterDigest, *, only_free: bool = False) -> None:
        """As `Engine.preload_adapter`, between two steps. Blocks until then, not until it is loaded."""
        self._between_steps(partial(self.engine.preload_adapter, digest, only_free=only_free))

    def take_dropped_preloads(self) -> tuple[AdapterDigest, ...]:
        """As `Preloads.take_dropped`, between two steps. Blocks until then."""
        return self._between_steps(self.engine.scheduler.preloads.take_dropped)

    def compare(self, adapter: Adapter) -> AdapterComparison:
        """Compare an adapter with its merged reference (`Engine.compare`) while requests go on.

        Blocks for seconds: call it from a worker thread, any but the engine's. Raises AdapterRefused if the adapter
        cannot be brought into the pool, and EngineDead.
        """
        return self.engine.verifier.compare(adapter, self._run_probes, self._between_steps)

    def _run_probes(self, probes: Iterable[Probe], adapter: Adapter | None) -> ProbeRun:
        """Have the engine's thread queue the probes, and wait until they have ended."""
        run = self._between_steps(partial(self.engine.start_probes, probes, adapter))
        while not run.done.wait(_PROBE_TICK_S):
            self._check_alive()
        return run

    def _between_steps(self, call: Callable[[], _T]) -> _T:
        """What `call` returns in the engine's thread, between two steps. Raises what it raises, and EngineDead."""
        answer: Future[_T] = Future()

        def run() -> None:
            try:
                answer.set_result(call())
            except Exception as error:  # the one who asked gets it; the engine goes on
                answer.set_exception(error)

        self._check_alive()
        if not self._submit(run):
            raise EngineDead(_STOPPED)
        while True:
            try:
                return answer.result(_PROBE_TICK_S)
            except TimeoutError:
                if answer.done():
                    raise
                self._check_alive()

    def _check_alive(self) -> None:
        if not self._thread.is_alive() or self._stopping:
            raise EngineDead(_STOPPED)

    async def generate(self, request: Request) -> AsyncIterator[RequestOutput]:
        self._check_alive()
        self.engine.check(request)
        stream = _Stream(asyncio.get_running_loop(), asyncio.Queue())
        is_finished = False
        if not self._submit(lambda: self._add(request, stream)):
            raise EngineDead(_STOPPED)
        try:
            while not is_finished:
                output = await stream.outputs.get()
                is_finished = isinstance(output, LoraplexError) or output.finished
                if isinstance(output, LoraplexError):
                    raise output
                yield output
        finally:
            if not is_finished:
                self._submit(lambda: self._abort(request.request_id, stream))

    def _submit(self, command: Callable[[], None]) -> bool:
        """Hand a command to the engine's thread. False, and it will never run, once that takes no more."""
        with self._submit_lock:
            if not self._closed:
                self._commands.put(command)
            return not self._closed

    # ------------------------------------------------------------------ life cycle
    def start(self) -> None:
        """Start stepping."""
        self._thread.start()

    def stop(self) -> None:
        """Finish the step at hand, fail what is left with EngineDead, end the thread."""
        self._stopping = True
        self._commands.put(lambda: None)
        self._thread.join()

    # ------------------------------------------------------------------ the engine's thread
    def _beat(self) -> None:
        self._beat_s = self._clock()

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._take_commands()
                self._beat()
                self._dispatch(self.engine.step(self._clock()))
        except BaseException as error:
            self.failure = error
            line = f"the engine stopped: {_described(error)}"  # whole, as loggers that distrust arguments drop them
            _log.error(line)
        finally:
            self._stopping = True
            self._fail_all()
        if self.failure is not None:
            self.on_failure()

    def _take_commands(self) -> None:
        """Run what was asked since the last step; wait for a command when there is nothing to step."""
        try:
            if not self.engine.has_work:
                self._commands.get(timeout=_IDLE_TICK_S)()
            while True:
                self._commands.get_nowait()()
        except queue.Empty:
            return

    def _add(self, request: Request, stream: _Stream) -> None:
        try:
            if self._closed:
                raise EngineDead(_STOPPED)
            self.engine.add_request(request, self._clock())
        except LoraplexError as error:
            _call_soon(stream.loop, [(stream, error)])
        except BaseException:
            _call_soon(stream.loop, [(stream, EngineDead(_STOPPED))])
            raise
        else:
            self._streams[request.request_id] = stream

    def _abort(self, request_id: RequestId, stream: _Stream) -> None:
        if self._streams.get(request_id) is stream and not self._closed:
            del self._streams[request_id]
            self.engine.abort(request_id)

    def _dispatch(self, results: list[StepResult]) -> None:
        """Hand a step's outputs over, with one wake-up for each event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[_Addressed]] = {}
        for result in results:
            is_last = isinstance(result, RequestFailed) or result.finished
            take = self._streams.pop if is_last else self._streams.get
            stream = take(result.request_id, None)
            if stream is not None:
                output = result.error if isinstance(result, RequestFailed) else result
                by_loop.setdefault(stream.loop, []).append((stream, output))
        for loop, outputs in by_loop.items():
            _call_soon(loop, outputs)

    def _fail_all(self) -> None:
        with self._submit_lock:
            self._closed = True
        while not self._commands.empty():
            self._commands.get_nowait()()
        for stream in self._streams.values():
            _call_soon(stream.loop, [(stream, EngineDead("The engine stopped while the request ran."))])
        self._streams.clear()


def _described(error: BaseException) -> str:
    """The class of an error and where it came from; not its message, which may quote a prompt."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__qualname__} at " + ", ".join(f"{frame.filename}:{frame.lineno}" for frame in frames)


def _deliver(outputs: list[_Addressed]) -> None:
    for stream, output in outputs:
        stream.outputs.put_nowait(output)


def _call_soon(loop: asyncio.AbstractEventLoop, outputs: list[_Addressed]) -> None:
    """Deliver on the loop that waits, unless it has closed meanwhile: then nobody waits."""
    try:
        loop.call_soon_threadsafe(_deliver, outputs)
    except RuntimeError:
        _log.debug("an event loop closed before its outputs came")
