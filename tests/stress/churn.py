"""Operators who change what names stand for, delete, publish again and pin, while clients ask."""

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from loraplex.core import ModelNotFound

from .ledger import Name
from .traffic import Traffic
from .wire import Wire, request_bytes

_MAX_PINS = 2
_MAX_USABLE = 4  # versions of a name


@dataclass(eq=False)
class Churn:
    """Makes a change after every so many requests of a traffic, until that has ended."""

    traffic: Traffic
    rng: random.Random
    every: int  # requests

    def __post_init__(self) -> None:
        self.site, self.counts = self.traffic.site, self.traffic.counts
        self._names = [name for name in self.site.names if name.kind == "healthy"]
        self._pinned: set[str] = set()

    async def run(self) -> None:
        """Change one thing after the other on one connection; at the end nothing is pinned."""
        wire, next_at = await Wire.open(self.site.server.port), 0
        moves = self._activate, self._roll_back, self._publish, self._delete_version, self._delete
        changes = *moves, self._pin, self._preload
        try:
            while self.counts["requests"] < self.traffic.mix.num_requests:
                if self.counts["requests"] < next_at:
                    await asyncio.sleep(0.005)
                    continue
                next_at = self.counts["requests"] + self.every
                (change,) = self.rng.choices(changes, (8, 3, 2, 2, 1, 3, 2))
                await self._change(change, wire, self.rng.choice(self._names))
            for label in list(self._pinned):
                await self._unpin(wire, label)
        finally:
            wire.close()

    async def _change(self, change: Callable[[Wire, Name], Awaitable[str]], wire: Wire, name: Name) -> None:
        async with name.lock:
            done = await change(wire, name)
        self.counts[f"change {done}"] += 1

    async def _call(self, wire: Wire, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        """Status and body of an answer."""
        await wire.send(request_bytes(method, f"/admin/v1/tenants/{path}", self.site.operator_key, body))
        head = await wire.head()
        return head.status, json.loads(await wire.body(head))

    def _check(self, status: int, answer: Any, *allowed: int) -> None:
        if status not in (200, *allowed):
            self.traffic.tell(f"a change was answered by {status} {answer}")

    # ------------------------------------------------------------------ changes; each returns what it was
    async def _activate(self, wire: Wire, name: Name) -> str:
        others = sorted(name.usable - {name.active})
        if not others:
            return "none"
        await self._move(wire, name, self.rng.choice(others))
        return "activate"

    async def _move(self, wire: Wire, name: Name, version: int) -> None:
        expected = name.active
        name.moves(version, time.monotonic())
        path = f"{name.tenant}/adapters/{name.name}/activate"
        self._check(*await self._call(wire, "POST", path, {"version": version, "expected": expected}))
        name.moved()

    async def _roll_back(self, wire: Wire, name: Name) -> str:
        begin_s, path = time.monotonic(), f"{name.tenant}/adapters/{name.name}/rollback"
        status, answer = await self._call(wire, "POST", path, {"expected": name.active})
        self._check(status, answer, 409)
        if status != 200:
            return "none"
        name.moves(answer["active"], begin_s)
        name.moved()
        return "rollback"

    async def _publish(self, wire: Wire, name: Name) -> str:
        """A new version under the old name, or again after it was deleted."""
        oldest = sorted(name.usable - {name.active})
        if len(name.usable) >= _MAX_USABLE and oldest:
            await self._delete_one(wire, name, oldest[0])
        version = await asyncio.to_thread(self.site.publish, name, self.rng.choice(self.site.artifacts))
        await self._move(wire, name, version)
        return "publish"

    async def _delete_version(self, wire: Wire, name: Name) -> str:
        others = sorted(name.usable - {name.active})
        if not others:
            return "none"
        await self._delete_one(wire, name, self.rng.choice(others))
        return "delete version"

    async def _delete_one(self, wire: Wire, name: Name, version: int) -> None:
        name.delete({version}, time.monotonic())
        path = f"{name.tenant}/adapters/{name.name}/versions/{version}"
        self._check(*await self._call(wire, "DELETE", path))
        name.deleted({version})

    async def _delete(self, wire: Wire, name: Name) -> str:
        """Retract a name, and after a while publish it again."""
        versions, begin_s = set(name.usable), time.monotonic()
        name.delete(versions, begin_s)
        name.moves(None, begin_s)
        self._check(*await self._call(wire, "DELETE", f"{name.tenant}/adapters/{name.name}"))
        name.deleted(versions)
        name.moved()
        await asyncio.sleep(0.05)
        for _ in range(2):
            await self._publish(wire, name)
        return "delete"

    async def _pin(self, wire: Wire, name: Name) -> str:
        """Pin a name, or first unpin another. What cannot be pinned now is refused."""
        if len(self._pinned) >= _MAX_PINS:
            await self._unpin(wire, sorted(self._pinned)[0])
        label = f"{name.tenant}/adapters/{name.name}"
        self._pinned.add(label)
        status, answer = await self._call(wire, "PUT", f"{label}/pin")
        self._check(status, answer, 400, 404, 429, 503)
        return f"pin {status}"

    async def _unpin(self, wire: Wire, label: str) -> None:
        self._check(*await self._call(wire, "DELETE", f"{label}/pin"), 404)
        self._pinned.discard(label)

    async def _preload(self, wire: Wire, name: Name) -> str:
        """Bring an adapter of host memory into the pool without a request."""
        there = sorted(one.digest for one in self.site.engine.residency() if one.in_host_memory)
        if not there:
            return "none"
        try:
            await asyncio.to_thread(self.site.client.preload_adapter, self.rng.choice(there))
        except ModelNotFound:
            return "none"  # it has just left
        return "preload"
