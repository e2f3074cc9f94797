"""Adapters that are brought into the pool without a request: pinned, asked for at start, or popular.

One background task of the event loop. It moves weights only: every request still resolves its name for its caller.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from structlog.typing import FilteringBoundLogger

from loraplex.core import AdapterDigest, ClientError, ConfigError, InvalidRequest, LoraplexError
from loraplex.server.adapter_names import AdapterNames, NamedLease
from loraplex.server.catalog import NamesOf
from loraplex.server.engine_port import ServingEngine
from loraplex.server.popularity import Popularity, Starts, read_scores, write_text
from loraplex.server.threads import WorkerThreads

READY_WAIT_S = 30.0  # for which /ready may be held up
TURN_WAIT_S = 15.0  # for which pins that are read wait at start for those named before them
MAX_AT_ONCE = 8  # names that are resolved and read
TICK_S = 1.0  # between looks whether a pinned name stands for other weights
_NOTE_S = 60.0  # between notes of what is popular
_REFILL_S = 10.0  # between looks whether popular adapters were pushed out
_MAX_REFILLS = 8
_MAX_SHOWN = 8  # names, in a line of the log
_NO_ROOM_LEFT = (
    "There was no room in the pool (--kv-pages, --memory), or host memory was too small until their turn came "
    "(--cpu-lora-memory, --max-cpu-loras)."
)

Reading = AbstractAsyncContextManager[None]
"""Held while weights are read, which may have to wait for it."""
_AT_ONCE: Reading = nullcontext()
Turn = Callable[[], Awaitable[None]]
"""Awaited once weights are read, before the engine is asked to bring them in."""


async def _no_turn() -> None:
    """Nobody comes before."""


@dataclass(frozen=True, slots=True)
class PreloadConfig:
    """Names as operators write them. `pin` and `preload` must exist at start; `num_recent` come from the last run.

    Those of `pin` have no version, as a pin follows its name: ConfigError for one that has.
    `recent_path` is the file that says what was used; None: that is not kept.
    """

    pin: tuple[str, ...] = ()
    preload: tuple[str, ...] = ()
    num_recent: int = 0
    recent_path: Path | None = None

    def __post_init__(self) -> None:
        for name in self.pin:
            if "@" in name:
                raise ConfigError(f"A pin follows the name: --pin {name!r:.200} has a version.")
        if self.num_recent < 0:
            raise ConfigError(f"--preload-recent must be at least 0, got {self.num_recent}.")
        if self.num_recent and self.recent_path is None:
            raise ConfigError("--preload-recent needs --data-dir, where it is kept what was used.")


@dataclass(slots=True, eq=False)
class _Pin:
    """A pinned name, and the weights that are pinned for it now. `trouble` was logged last, and why is in `message`."""

    lease: NamedLease | None = None
    trouble: str | None = None
    message: str | None = None


@dataclass(slots=True, eq=False)
class _PinCall:
    """A pin that is under way, and whether the name was unpinned meanwhile."""

    name: str
    is_taken_back: bool = False


class Preloader:
    """Belongs to one event loop. `start` it there; `close` it before the loop ends.

    The lock is held for what is pinned and the engine's answer alone, never while weights are looked for or read, and
    each pinned name has a task of its own: a store that hangs holds up those names alone whose weights it has.
    """

    def __init__(
        self,
        engine: ServingEngine,
        names: AdapterNames,
        names_of: NamesOf,
        config: PreloadConfig,
        log: FilteringBoundLogger,
    ) -> None:
        self._engine = engine
        self._names = names
        self._names_of = names_of
        self._config = config
        self._log = log
        self._threads = WorkerThreads(1, "loraplex-preload")
        self._pins = {name: _Pin() for name in config.pin}
        self._num_pins: Counter[AdapterDigest] = Counter()  # names that each is pinned for
        self._calls: set[_PinCall] = set()
        self._lock = asyncio.Lock()  # over changes of pins, their leases and counts
        self._places = asyncio.Semaphore(MAX_AT_ONCE)  # each for as long as reading takes, which has its timeout
        self._handed: dict[AdapterDigest, str] = {}  # preloads that the engine was asked for and that have not come
        self._followed: set[str] = set()  # pinned names that are looked at now
        self._popularity = Popularity()
        self._starts = Starts()
        self._task: asyncio.Task[None] | None = None
        self._ready_at_s = 0.0  # at the latest
        self._in_turn_until_s = 0.0
        self._is_done = True
        self._coming: dict[str, None] = {}  # names that were asked for at start and have not come or failed
        self._late: asyncio.TimerHandle | None = None
        self._noted_s = 0.0

    # ------------------------------------------------------------------ life
    def check_start(self) -> None:
        """Raise ConfigError for a name that was asked for at start and cannot be served. Blocks."""
        for flag, names in (("--pin", self._config.pin), ("--preload", self._config.preload)):
            for name in names:
                try:
                    self._names.check(name)
                except LoraplexError as error:
                    raise ConfigError(f"{flag} {name:.200}: {error.message}") from error

    @property
    def is_ready(self) -> bool:
        """Whether what was asked for at start is there, or has had its time."""
        return self._is_done or time.monotonic() >= self._ready_at_s

    def start(self) -> None:
        """Begin, in the running loop."""
        self._is_done, self._noted_s = False, time.monotonic()
        self._ready_at_s = self._noted_s + READY_WAIT_S
        self._in_turn_until_s = self._noted_s + TURN_WAIT_S
        self._coming = dict.fromkeys((*self._config.pin, *self._config.preload))
        self._late = asyncio.get_running_loop().call_later(READY_WAIT_S, self._tell_late)
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._ended)

    async def close(self) -> None:
        """End, and keep what is popular."""
        task, self._task = self._task, None
        if task is None:
            return
        if self._late is not None:
            self._late.cancel()
        task.cancel()
        await asyncio.wait({task})
        await self._guarded("popularity", self._note)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        """A bug must not pass in silence."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._is_done = True
            self._log.error("preloading_stopped", error=type(error).__name__)

    def _tell_late(self) -> None:
        """The time is up for which /ready was held up."""
        if not self._is_done:
            names = list(self._coming)
            self._log.warning("preloads_late", after_s=READY_WAIT_S, num_missing=len(names), names=names[:_MAX_SHOWN])

    async def _run(self) -> None:
        await self._guarded("preload_recent", self._load_scores)
        refilled = time.monotonic()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._start_all())
            while True:
                await asyncio.sleep(TICK_S)
                for name in self._pins:
                    if name not in self._followed and name not in self._coming:
                        self._followed.add(name)
                        group.create_task(self._follow_up(name))
                now = time.monotonic()
                if self._is_done and now - refilled >= _REFILL_S:
                    refilled = now
                    await self._guarded("preload", self._tell_dropped)
                    await self._guarded("refill", self._refill)
                if now - self._noted_s >= _NOTE_S:
                    await self._guarded("popularity", self._note)

    async def _follow_up(self, name: str) -> None:
        try:
            await self._guarded("pin", partial(self._keep, reading=self._places), name)
        finally:
            self._followed.discard(name)

    async def _start_all(self) -> None:
        """Bring what was asked for at start: pins begin first, then preloads, then what the last run used."""
        recent = self._popularity.top(self._config.num_recent)
        wanted = dict.fromkeys((*self._config.preload, *recent))
        pins, preloads = tuple(self._pins), [name for name in wanted if name not in self._pins]
        self._coming = dict.fromkeys((*pins, *preloads))
        async with asyncio.TaskGroup() as group:
            before: asyncio.Task[None] | None = None
            for name in pins:
                before = group.create_task(self._bring_pin(name, before))
            for name in preloads:
                group.create_task(self._bring_preload(name, before))
        self._tell_unpinned(pins)
        self._is_done = True

    async def _bring_pin(self, name: str, before: "asyncio.Task[None] | None") -> None:
        """Pin a name of the flag: read as soon as there is a place, pinned after those that were named before it.

        So it is the flag's order that says who has the room. A slow store holds up others for TURN_WAIT_S at most.
        """
        async with AsyncExitStack() as place:
            await place.enter_async_context(self._places)  # in the order in which they were begun

            async def turn() -> None:
                await place.aclose()
                await self._after(before)

            await self._guarded("pin", partial(self._keep, turn=turn), name)
        self._coming.pop(name, None)

    async def _bring_preload(self, name: str, pins: "asyncio.Task[None] | None") -> None:
        """Read as soon as there is a place, which is held until the pins are taken: they would push it out again."""
        async with self._places:
            await self._guarded("preload", partial(self._preload, turn=partial(self._after, pins)), name)
        self._coming.pop(name, None)

    async def _after(self, before: "asyncio.Task[None] | None") -> None:
        """Wait for those who come before, but not beyond TURN_WAIT_S after the start."""
        if before is not None:
            await asyncio.wait({before}, timeout=max(0.0, self._in_turn_until_s - time.monotonic()))

    def _tell_unpinned(self, names: Collection[str]) -> None:
        """One line for all names of --pin that are not pinned once each was tried."""
        pins = {name: self._pins[name] for name in names if name in self._pins}  # without those unpinned since
        missing = {name: pin.message for name, pin in pins.items() if pin.lease is None}
        if missing:
            shown, message = list(missing)[:_MAX_SHOWN], next(filter(None, missing.values()), None)
            num_pinned = len(pins) - len(missing)
            self._log.error(
                "pins_missing", num_missing=len(missing), num_pinned=num_pinned, names=shown, message=message
            )

    async def _guarded(self, what: str, call: Callable[..., Awaitable[None]], *name: str) -> None:
        """Do a part of the work, of a name or of none; what goes wrong is logged, and the rest goes on."""
        fields = dict(zip(("name",), name, strict=False))
        try:
            await call(*name)
        except (LoraplexError, OSError) as error:
            self._log.warning("preloading_failed", what=what, error=type(error).__name__, message=str(error), **fields)
        except Exception as error:  # a bug must neither end the rest nor pass in silence
            self._log.error("preloading_bug", what=what, error=type(error).__name__, **fields)

    # ------------------------------------------------------------------ pins
    @property
    def pinned(self) -> tuple[str, ...]:
        """Names that are pinned, or are to be as soon as that can be."""
        return tuple(self._pins)

    def is_pinned(self, name: str) -> bool:
        """Whether a name is pinned or about to be: what `unpin` would undo."""
        return name in self._pins or any(call.name == name for call in self._calls)

    async def pin(self, name: str) -> AdapterDigest | None:
        """Pin what a name stands for, now and later; None if it was unpinned before that was done.

        Raises what resolving, reading and `pin_adapter` raise.
        """
        call = _PinCall(name)
        self._calls.add(call)
        try:
            return await self._follow(name, lambda: not call.is_taken_back)
        finally:
            self._calls.discard(call)

    async def unpin(self, name: str) -> bool:
        """Undo it, also what is under way. False if the name is neither pinned nor about to be."""
        async with self._lock:
            calls = [call for call in self._calls if call.name == name]
            for call in calls:
                call.is_taken_back = True
            pin = self._pins.pop(name, None)
            if pin is not None:
                await self._let_go(pin)
            return pin is not None or bool(calls)

    async def _keep(self, name: str, reading: Reading = _AT_ONCE, turn: Turn = _no_turn) -> None:
        """See that a pinned name's weights are pinned; log what keeps them from it, once. Reads hold `reading`."""
        pin = self._pins.get(name)
        if pin is None:
            return
        try:
            await self._follow(name, lambda: self._pins.get(name) is pin, reading, turn)
            pin.trouble = None
        except LoraplexError as error:
            if pin.trouble != error.code:
                self._log.warning("pin_failed", name=name, error=error.code, message=error.message)
            pin.trouble, pin.message = error.code, error.message

    async def _follow(
        self, name: str, is_wanted: Callable[[], bool], reading: Reading = _AT_ONCE, turn: Turn = _no_turn
    ) -> AdapterDigest | None:
        """Have what a name stands for pinned; None if that is not wanted any more once it could be."""
        try:
            digest = await self._names.find(name)
        except ClientError:  # it stands for nothing any more
            async with self._lock:
                if name in self._pins:
                    await self._let_go(self._pins[name])
            raise
        pin = self._pins.get(name)
        if pin is not None and pin.lease is not None and pin.lease.digest == digest:
            return digest
        async with reading:
            lease, is_kept = await self._names.lease(name), False
        try:
            await turn()
            is_kept = await self._put(name, lease, is_wanted)
        finally:
            if not is_kept:
                lease.release()
        return lease.digest if is_wanted() else None

    async def _put(self, name: str, lease: NamedLease, is_wanted: Callable[[], bool]) -> bool:
        """Pin leased weights for a name in place of those before. False if they need not be: the lease is not kept."""
        async with self._lock:
            pin = self._pins.get(name) or _Pin()
            if not is_wanted() or (pin.lease is not None and pin.lease.digest == lease.digest):
                return False
            await self._take(lease.digest, pin)
            await self._let_go(pin)
            pin.lease = lease
            self._pins[name] = pin
            return True

    async def _take(self, digest: AdapterDigest, pin: _Pin) -> None:
        """Pin new weights. The old ones go first only if both are too many pages."""
        if not self._num_pins[digest]:
            try:
                await self._threads.run(self._engine.pin_adapter, digest)
            except InvalidRequest:
                if pin.lease is None:
                    raise
                await self._let_go(pin)
                await self._threads.run(self._engine.pin_adapter, digest)
        self._num_pins[digest] += 1

    async def _let_go(self, pin: _Pin) -> None:
        lease, pin.lease = pin.lease, None
        if lease is None:
            return
        self._num_pins[lease.digest] -= 1
        try:
            if not self._num_pins[lease.digest]:
                del self._num_pins[lease.digest]
                await self._threads.run(self._engine.unpin_adapter, lease.digest)
        finally:
            lease.release()

    # ------------------------------------------------------------------ preloads
    async def _preload(self, name: str, turn: Turn) -> None:
        lease = await self._names.lease(name)
        try:
            await turn()
            await self._threads.run(self._engine.preload_adapter, lease.digest)
            self._handed[lease.digest] = name
        finally:
            lease.release()

    async def _tell_dropped(self) -> None:
        """One line for the preloads that the engine has given up for want of room since the last look."""
        self._handed = {one: name for one, name in self._handed.items() if not self._engine.is_in_pool(one)}
        dropped = await self._threads.run(self._engine.take_dropped_preloads) if self._handed else ()
        names = [self._handed.pop(digest) for digest in dropped if digest in self._handed]
        if names:
            self._log.warning(
                "preloads_not_kept", num_missing=len(names), names=names[:_MAX_SHOWN], message=_NO_ROOM_LEFT
            )

    async def _refill(self) -> None:
        """Bring popular adapters back that host memory has and the pool has not, into free pages."""
        wanted = self._popularity.top(self._config.num_recent)
        free = self._engine.stats().num_free_pages if wanted else 0
        if not free:
            return
        found = await self._threads.run(self._engine.residency)
        absent = {one.digest: one.num_pages for one in found if one.in_host_memory and one.state == "absent"}
        digests = self._by_name(absent)
        for name in [name for name in wanted if name in digests][:_MAX_REFILLS]:
            if absent[digests[name]] <= free:
                free -= absent[digests[name]]
                await self._threads.run(partial(self._engine.preload_adapter, digests[name], only_free=True))

    def _by_name(self, digests: Collection[AdapterDigest]) -> dict[str, AdapterDigest]:
        """Names without versions, as far as they are known."""
        known = self._names_of(digests)
        return {_unversioned(label): digest for digest, labels in known.items() for label in labels}

    # ------------------------------------------------------------------ popularity
    async def _load_scores(self) -> None:
        path = self._config.recent_path
        if path is None:
            return
        try:
            self._popularity = Popularity(await self._threads.run(read_scores, path))
        except ValueError as error:
            self._log.warning("recent_adapters_damaged", path=str(path), message=f"{error}; it is ignored")

    def note_start(self, digest: AdapterDigest) -> None:
        """A request on an adapter was started; its name was asked for shortly before."""
        if self._config.recent_path is not None:  # else nobody would ever drain it
            self._starts.note(digest)

    async def _note(self) -> None:
        """Book what was started since the last time, and keep it."""
        before, self._noted_s = self._noted_s, time.monotonic()
        elapsed_s = self._noted_s - before
        if self._config.recent_path is None:
            return
        starts, by_name = self._starts.drain(), Counter[str]()
        for digest, labels in self._names_of(starts).items():
            by_name.update(dict.fromkeys(map(_unversioned, labels), starts[digest]))
        self._popularity.note(by_name, elapsed_s)
        await self._save()

    async def _save(self) -> None:
        path = self._config.recent_path
        if path is not None:
            try:
                await self._threads.run(write_text, path, self._popularity.text())
            except OSError as error:
                self._log.warning("recent_adapters_not_written", path=str(path), message=str(error))


def _unversioned(label: str) -> str:
    """The name of `name@version`."""
    return label.partition("@")[0]
