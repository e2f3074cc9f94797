"""The whole stack but for the model: HTTP on a socket, a registry, both tiers of adapters, the engine, and faults."""

import asyncio
import io
import os
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from loraplex.adapters import AdapterLimits, load_adapter
from loraplex.core import AdapterDigest, RequestId
from loraplex.core.registry_errors import StoreUnavailable
from loraplex.engine import AsyncEngine, Engine, EngineConfig, load_base
from loraplex.engine.host_arena import HostArena
from loraplex.engine.packed_files import PackedFiles, packing_stamp
from loraplex.engine.packing import pack_adapter
from loraplex.registry import Registry, RegistryConfig, Role
from loraplex.registry.registry import CheckFiles
from loraplex.registry.types import ResolvedVersion, VersionInfo
from loraplex.scheduler import SequenceStatus
from loraplex.scheduler.sequence import WaitReason
from loraplex.server import ServerConfig, create_app
from loraplex.server.host_adapters import HostAdapters
from tests.adapters.factories import make_config, make_tensors, write_adapter
from tests.registry.helpers import OPERATOR, PASSED, check_here
from tests.server.helpers import LiveServer

from .hash_runner import Faults, HashRunner, first_crc, image_crc
from .ledger import Name

BROKEN_KINDS = ("corrupt", "missing", "nan", "stuck")
_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class SiteConfig:
    """Sizes and shares of faults. The tiers hold a part of the adapters: pages of the pool, bytes of host memory.

    A server without `flaky` reads and copies fails for broken adapters alone.
    """

    seed: int = 0
    num_tenants: int = 4
    names_per_tenant: int = 8
    broken_per_tenant: int = 4
    num_adapters: int = 40
    kv_pages: int = 40
    host_bytes: int = 192 * 1024
    packed_bytes: int = 256 * 1024
    max_waiting: int = 64
    overlaps: bool = True
    flaky: bool = True


class FlakyRegistry(Registry):
    """A registry whose store is slow or away now and then."""

    def __init__(self, config: RegistryConfig, rng: random.Random, *, flaky: bool) -> None:
        super().__init__(config, validate=check_here)
        self.rng = rng
        self.flaky = flaky
        self.counts: Counter[str] = Counter()

    def read(self, version: ResolvedVersion | VersionInfo) -> CheckFiles:
        self.counts["reads"] += 1
        luck = self.rng.random()
        if luck < 0.1:
            time.sleep(0.01 + 0.05 * self.rng.random())
        elif self.flaky and luck < 0.12:
            self.counts["failed reads"] += 1
            raise StoreUnavailable("the store is away, as the test wants it")
        return super().read(version)


class ErrorLog(io.StringIO):
    """Keeps the lines of the log that tell of a bug."""

    def write(self, text: str) -> int:
        is_bug = '"event": "request"' not in text and '"level": "error"' in text
        return super().write(text) if is_bug else len(text)


@dataclass
class Site:
    """Build it, use it, `close` it. `names` are all names of all tenants; `keys` open them."""

    folder: Path
    base: Path
    config: SiteConfig
    names: list[Name] = field(default_factory=list)
    keys: dict[str, str] = field(default_factory=dict)
    stages: Counter[str] = field(default_factory=Counter)  # where requests were cancelled
    log: ErrorLog = field(default_factory=ErrorLog)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.config.seed)
        settings = EngineConfig(
            dtype="float32",
            num_threads=1,
            kv_pages=self.config.kv_pages,
            max_num_seqs=14,
            max_num_batched_tokens=40,
            max_model_len=128,
            max_waiting=self.config.max_waiting,
        )
        loaded = load_base(self.base, settings, name="base")
        self.description, self.geometry = loaded.description, loaded.geometry
        stamp = packing_stamp(self.description.sites, loaded.geometry, loaded.decoder.dtype, None)
        self.files = PackedFiles(self.folder / "packed", self.config.packed_bytes, stamp)
        self.engine = Engine(loaded, max_host_bytes=self.config.host_bytes, packed_files=self.files)
        self._known: dict[int, AdapterDigest] = {}
        self._first: dict[AdapterDigest, int] = {}
        self.artifacts = [self._make_adapter(number) for number in range(self.config.num_adapters)]
        self._open_registry()
        self._put_runner()
        self._serve()

    def close(self) -> None:
        self.server.stop()
        self.client.stop()
        self.registry.close()

    # ------------------------------------------------------------------ adapters
    def _make_adapter(self, number: int) -> Path:
        """An adapter directory, whose image is known from here on."""
        rank, modules = self.rng.choice((1, 1, 2, 3, 4, 8)), self.rng.choice((_MODULES, _MODULES[:3], _MODULES[4:]))
        tensors = make_tensors(self.description, modules, rank)
        tensors = {
            name: (dtype, shape, np.random.default_rng([number, at]).standard_normal(shape).astype("<f4").tobytes())
            for at, (name, (dtype, shape, _)) in enumerate(tensors.items())
        }
        config = make_config(r=rank, target_modules=list(modules))
        directory = write_adapter(self.folder / f"adapter-{number}", config, tensors)
        adapter = load_adapter(directory, self.description, AdapterLimits())
        arena = HostArena(self.geometry.page_elems, self.engine.arena.dtype)
        image = pack_adapter(adapter, self.description.sites, self.geometry, arena.allocate).image.stacked().numpy()
        assert image_crc(image) not in self._known, "two adapters that cannot be told apart"
        self._known[image_crc(image)] = adapter.digest
        self._first[adapter.digest] = first_crc(image[0])
        return directory

    def _open_registry(self) -> None:
        self.registry = FlakyRegistry(
            RegistryConfig(self.folder / "data"), random.Random(self.config.seed + 1), flaky=self.config.flaky
        )
        for number in range(self.config.num_tenants):
            tenant = f"tenant{number}"
            self.registry.tenants.create(OPERATOR, tenant)
            self.keys[tenant] = self.registry.keys.create(OPERATOR, tenant, Role.TENANT).key.reveal()
            for index in range(self.config.names_per_tenant):
                self._fill(Name(tenant, f"a{index}"))
            for index in range(self.config.broken_per_tenant):
                self._break(Name(tenant, f"b{index}", BROKEN_KINDS[index % len(BROKEN_KINDS)]))
        self.registry.tenants.change_limits(OPERATOR, "tenant0", {"max_requests": 10})
        self.operator_key = self.registry.keys.create(OPERATOR, "tenant0", Role.OPERATOR).key.reveal()

    def _fill(self, name: Name) -> None:
        for directory in self.rng.sample(self.artifacts, 2):
            self._activate(name, self.publish(name, directory))
        self.names.append(name)

    def _activate(self, name: Name, version: int) -> None:
        self.registry.adapters.activate(OPERATOR, name.tenant, name.name, version, expected=name.active)
        name.moves(version, time.monotonic())
        name.moved()

    def publish(self, name: Name, directory: Path) -> int:
        """A verified version that is not active; blocks."""
        where = OPERATOR, name.tenant, name.name
        fingerprint = self.description.fingerprint
        version = self.registry.publish(*where, directory, self.description, base_fingerprint=fingerprint)
        self.registry.adapters.record_verification(*where, version.number, PASSED)
        assert version.facts is not None
        name.digests[version.number] = version.facts.digest
        name.usable.add(version.number)
        return version.number

    def _break(self, name: Name) -> None:
        """A name of its own weights, which are damaged after they were checked."""
        directory = self._make_adapter(1000 + len(self.names))
        version = self.publish(name, directory)
        self._activate(name, version)
        self.names.append(name)
        artifact = self.registry.adapters.version(OPERATOR, name.tenant, name.name, version).artifact
        assert artifact is not None
        blob = self.folder / "data" / "artifacts" / "blobs" / artifact.weights.key
        if name.kind == "missing":
            blob.unlink()
        elif name.kind == "corrupt":
            data = bytearray(blob.read_bytes())
            data[-3] ^= 4
            blob.chmod(0o600)
            blob.write_bytes(data)

    # ------------------------------------------------------------------ the stack
    def _put_runner(self) -> None:
        """Put the hashing model in the place of the real one."""
        digests = {name.kind: set[str]() for name in self.names}
        for name in self.names:
            digests[name.kind] |= set(name.digests.values())
        scheduler = self.engine.scheduler
        self.runner = HashRunner(
            self.engine._buffer,
            self._known,
            lambda: tuple(scheduler.pool._free),
            scheduler.check_invariants,
            random.Random(self.config.seed + 2),
            overlaps=self.config.overlaps,
            faults=Faults(
                0.01 if self.config.flaky else 0.0,
                frozenset(self._first[AdapterDigest(one)] for one in digests.get("stuck", ())),
                frozenset(map(AdapterDigest, digests.get("nan", ()))),
            ),
        )
        self.engine._runner = self.engine.shelf._loader._runner = self.runner
        self._watch_aborts()

    def _watch_aborts(self) -> None:
        """Note how far a request was that is cancelled, and that it holds nothing any more."""
        engine, abort = self.engine, self.engine.abort

        def watched(request_id: RequestId) -> None:
            state = engine._requests.get(request_id)
            seq_ids = list(state.sequences) if state is not None else []
            for seq_id in seq_ids:
                sequence = engine.scheduler.sequences.get(seq_id)
                if sequence is None:
                    self.stages["ended"] += 1
                elif sequence.status is SequenceStatus.WAITING:
                    self.stages["load" if sequence.wait is WaitReason.LOAD else "queue"] += 1
                else:
                    self.stages["decode" if sequence.num_output_tokens else "prefill"] += 1
            abort(request_id)
            if any(seq_id in engine.scheduler.sequences for seq_id in seq_ids):
                self.runner.tell(f"request {request_id} was cancelled and is still scheduled")

        engine.abort = watched  # type: ignore[method-assign]

    def _serve(self) -> None:
        settings = ServerConfig(
            host_adapter_bytes=self.config.host_bytes, host_patience_s=0.3, adapter_read_timeout_s=5.0
        )
        self.client = AsyncEngine(self.engine)
        app = create_app(self.client, self.registry, settings, self.log)
        self.service = app.state.service
        self._watch_acquires()
        self.client.start()
        self.server = LiveServer(app)

    def _watch_acquires(self) -> None:
        """Note in which stage before the engine a request was cancelled."""
        catalog: Any = self.service.catalog
        acquire = catalog.acquire

        async def watched(caller: Any, model: Any, on_resolved: Any, waiter: Any) -> Any:
            try:
                return await acquire(caller, model, on_resolved, waiter)
            except asyncio.CancelledError:
                self.stages[f"host {waiter.progress.stage.value}"] += 1
                raise

        catalog.acquire = watched

    # ------------------------------------------------------------------ what is left
    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The server's."""
        loop = self.server.server._loop
        assert loop is not None
        return loop

    def held(self) -> dict[str, Any]:
        """What a resting server has open: tasks by coroutine, sockets and other files, threads that come and go."""
        tasks = Counter(getattr(task.get_coro(), "__qualname__", "?") for task in asyncio.all_tasks(self.loop))
        kinds = Counter(_kind(target) for target in _open_files())
        pools = ("loraplex-", "asyncio_")
        threads = Counter(one.name for one in threading.enumerate() if not one.name.startswith(pools))
        return {"tasks": dict(tasks), "files": dict(kinds), "threads": dict(threads)}

    def leaks(self) -> dict[str, object]:
        """What a resting server should not have; nothing where all is well."""
        scheduler, host, shelf = self.engine.scheduler, self.service.catalog._host, self.engine.shelf
        scheduler.check_invariants()
        pages = sum(len(one.image) for one in shelf.packed.values())
        pool = scheduler.pool.num_free + scheduler.residency.num_pages + scheduler.cache.num_pages
        stats = self.engine.stats()
        found: dict[str, object] = {
            "sequences": len(scheduler.sequences),
            "requests": len(self.engine._requests) + len(self.engine._owner) + len(self.engine._seeds),
            "streams": len(self.client._streams),
            "host leases": {str(d)[:12]: dict(e.leases) for d, e in host._entries.items() if e.leases},
            "host loads": sum(len(entry.loads) for entry in host._entries.values()),
            "host room in use": dict(host._room._adapters_used) | dict(host._room._bytes_used),
            "host entries unlike the shelf": set(host._entries) ^ set(shelf.packed),
            "host room unlike its entries": _room_error(host),
            "idle host entries unlike the unused": {d for d, e in host._entries.items() if e.is_ready and e.is_idle}
            ^ set(host._unused),
            "waiters": len(self.service.waiters._waiting),
            "tenant places": sum(meter.num_requests for meter in self.service.tenants._meters._meters.values()),
            "body bytes": self.service.bodies.budget.num_bytes,
            "arena pages unlike packed": self.engine.arena.num_leased - pages,
            "holds": dict(shelf.held),
            "retired": len(shelf._retired),
            "pool pages lost": scheduler.pool.num_pages - pool,
            "pool pages in use": scheduler.pool.num_pages - stats.num_free_pages - stats.num_idle_pages,
            "loads": len(shelf._loader),
            "connections": len(self.server.server.server_state.connections),
            "server tasks": len(self.server.server.server_state.tasks),
        }
        return {name: value for name, value in found.items() if value}


def _room_error(host: HostAdapters) -> tuple[int, int] | None:
    """How many adapters and bytes the books of host memory have more than are there; None where they are right."""
    room, entries = host._room, host._entries.values()
    error = room._num_adapters - len(entries), room._num_bytes - sum(entry.num_bytes for entry in entries)
    return error if any(error) else None


def _open_files() -> list[str]:
    targets = []
    for one in Path("/proc/self/fd").iterdir():
        try:
            targets.append(str(one.readlink()))
        except OSError:
            continue  # the directory's own
    return targets


def _kind(target: str) -> str:
    """Registry connections come and go with a pool of threads, up to its size."""
    if "registry.db" in target:
        return "database"
    return target.split(":")[0] if not target.startswith(os.sep) else "file"
