"""Clients that know the right answer to everything they ask, and leave at any moment."""

import asyncio
import json
import math
import random
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from .hash_runner import MAX_TOLD, VOCAB, continuation
from .ledger import Name
from .site import Site
from .wire import Gone, Head, Wire, request_bytes

_WORD = re.compile(r"t(\d+)")
_IDENTITY = re.compile(r"name=([^;]+); version=(\d+); digest=([0-9a-f]{64})")
_OVERLOADS = frozenset({"overloaded", "caller_limit"})
_BROKEN_CODES = {
    "corrupt": frozenset({"artifact_corrupt"}),
    "missing": frozenset({"artifact_missing"}),
    "nan": frozenset({"non_finite_output"}),
    "stuck": frozenset[str](),
}
CUTS = ("in the head", "after sending", "while waiting", "half-close", "mid-stream", "last token")


@dataclass(frozen=True, slots=True)
class Mix:
    """What the clients do: shares of requests."""

    num_requests: int
    num_clients: int = 40
    cut_share: float = 0.1
    broken_share: float = 0.05
    deadline_share: float = 0.03
    pause_s: float = 0.02  # after an answer that says to come again


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, and what may come of it. `version` None asks for what the name stands for."""

    name: Name | None  # None: the base
    tenant: str
    version: int | None
    prompt: tuple[int, ...]
    body: dict[str, Any]
    cut: str | None
    begin_s: float

    @property
    def is_foreign(self) -> bool:
        """Whether the name is another tenant's."""
        return self.name is not None and self.name.tenant != self.tenant


@dataclass(slots=True, eq=False)
class Got:
    """What came of a request. `is_whole` is false where the client left or the server closed before the end."""

    head: Head | None = None
    head_s: float = 0.0
    texts: dict[int, str] = field(default_factory=dict)
    finishes: dict[int, tuple[str, Any]] = field(default_factory=dict)
    identities: list[Any] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    is_whole: bool = False

    def take(self, piece: dict[str, Any]) -> None:
        """Add an answer, or a part of a streamed one."""
        if "error" in piece:
            self.error = piece["error"]
            return
        for choice in piece["choices"]:
            index = choice["index"]
            self.texts[index] = self.texts.get(index, "") + choice["text"]
            if choice["finish_reason"] is not None:
                self.finishes[index] = choice["finish_reason"], choice["stop_reason"]
        if "x_loraplex" in piece:
            self.identities.append(piece["x_loraplex"])
        self.usage = piece.get("usage") or self.usage


@dataclass(eq=False)
class Traffic:
    """Runs a mix against a site. `violations` tells what was wrong. The seed fixes what is asked, not when."""

    site: Site
    mix: Mix
    rng: random.Random
    violations: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    num_asked: int = 0

    def __post_init__(self) -> None:
        self._leaving = random.Random(self.rng.random())  # apart, so that the requests do not depend on the answers
        self._healthy = [name for name in self.site.names if name.kind == "healthy"]
        self._broken = [name for name in self.site.names if name.kind != "healthy"]
        self._weights = [1.0 / (1 + at % self.site.config.names_per_tenant) for at in range(len(self._healthy))]
        self._prefixes = [self._tokens(48) for _ in range(4)]  # that all tenants use

    async def run(self) -> None:
        """Ask everything."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self.mix.num_clients):
                group.create_task(self._client())

    def tell(self, what: str) -> None:
        """Note that something is wrong."""
        self.counts["violations"] += 1
        if len(self.violations) < MAX_TOLD:
            self.violations.append(what)

    # ------------------------------------------------------------------ asking
    def _tokens(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(self.rng.choices(range(VOCAB), k=num_tokens))

    def _draw(self) -> Asked:
        rng, mix = self.rng, self.mix
        luck = rng.random()
        name: Name | None = None
        if luck < mix.broken_share and self._broken:
            name = rng.choice(self._broken)
        elif luck < 0.97:
            (name,) = rng.choices(self._healthy, self._weights)
        tenant = name.tenant if name is not None and luck < 0.94 else rng.choice(list(self.site.keys))
        version, which = None, rng.random()
        if name is not None and which < 0.15:
            version = sorted(name.digests)[int(which / 0.15 * len(name.digests))]
        cut = rng.choice(CUTS) if rng.random() < mix.cut_share else None
        prefix = rng.choice(self._prefixes)[: rng.choice((0, 0, 16, 32, 48))]
        prompt = (*prefix, *self._tokens(4), *self._tokens(rng.choice((0, 5, 12, 30))))
        model = "base" if name is None else name.name + ("" if version is None else f"@{version}")
        if name is not None and name.tenant != tenant:
            model = f"{name.tenant}/{model}"
        body = self._body(model, prompt, is_stream=cut in CUTS[-2:] or rng.random() < 0.4)
        return Asked(name, tenant, version, prompt, body, cut, time.monotonic())

    def _body(self, model: str, prompt: tuple[int, ...], *, is_stream: bool) -> dict[str, Any]:
        rng = self.rng
        body: dict[str, Any] = {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": rng.choice((1, 1, 2, 4, 4, 8, 16, 46)),
        }
        if is_stream:
            body |= {"stream": True, "stream_options": {"include_usage": rng.random() < 0.5}}
        if rng.random() < 0.1:
            body["n"] = 2
        if rng.random() < 0.1:
            body["echo"] = True
        if rng.random() < 0.2:
            body["priority"] = rng.choice((0, 1, 5))
        if rng.random() < 0.1:
            body["stop_token_ids"] = rng.sample(range(VOCAB), 40)
        if rng.random() < self.mix.deadline_share:
            body["deadline_s"] = rng.choice((0.005, 0.03, 0.1))
        return body

    async def _client(self) -> None:
        """Ask one after the other, on one connection as long as it lasts."""
        wire: Wire | None = None
        while self.num_asked < self.mix.num_requests:
            self.num_asked += 1
            asked, got = self._draw(), Got()
            try:
                wire = wire or await Wire.open(self.site.server.port)
                async with asyncio.timeout(60):
                    await self._ask(wire, asked, got)
            except Gone:
                if asked.cut is None:
                    self.tell(f"the server closed the connection of {asked.body}")
            except TimeoutError:
                self.tell(f"no answer within a minute to {asked.body}")
            is_closing = got.head is not None and got.head.headers.get("connection") == "close"
            if wire is not None and (asked.cut is not None or not got.is_whole or is_closing):
                wire.close(reset=self._leaving.random() < 0.5)
                wire = None
            await self._judge(asked, got)
        if wire is not None:
            wire.close()

    async def _ask(self, wire: Wire, asked: Asked, got: Got) -> None:
        """Send a request and read as much of the answer as it is meant to. Raises Gone."""
        data = request_bytes("POST", "/v1/completions", self.site.keys[asked.tenant], asked.body)
        if asked.cut == "in the head":
            await wire.send(data[: self._leaving.randrange(1, len(data))])
            return
        await wire.send(data)
        if asked.cut == "after sending":
            return
        if asked.cut == "while waiting":
            await asyncio.sleep(0.12 * self._leaving.random() ** 2)
            return
        if asked.cut == "half-close":
            wire.half_close()
        got.head, got.head_s = await wire.head(), time.monotonic()
        if got.head.headers.get("content-type", "").startswith("text/event-stream"):
            await self._read_events(wire, asked, got)
        else:
            got.take(json.loads(await wire.body(got.head)))
            got.is_whole = True

    async def _read_events(self, wire: Wire, asked: Asked, got: Got) -> None:
        num_events = self._leaving.randint(1, 6) if asked.cut == "mid-stream" else -1
        num_choices, data, is_done = asked.body.get("n", 1), b"", False
        async for chunk in wire.chunks():
            data += chunk
            *events, data = data.split(b"\n\n")
            for one in events:
                num_events -= 1
                if one == b"data: [DONE]":
                    is_done = True
                else:
                    got.take(json.loads(one.removeprefix(b"data: ")))
            if num_events == 0 or (asked.cut == "last token" and len(got.finishes) == num_choices):
                return
        got.is_whole = True
        if is_done == (got.error is not None):
            self.tell(f"a stream ended with an error and [DONE], or without either: {asked.body}")

    # ------------------------------------------------------------------ judging
    async def _judge(self, asked: Asked, got: Got) -> None:
        self.counts["requests"] += 1
        if asked.cut is not None:
            self.counts[f"cut {asked.cut}"] += 1
        if got.head is None:
            return
        self.counts[f"status {got.head.status}"] += 1
        if got.error is not None:
            await self._judge_error(asked, got, got.error)
        if got.head.status == 200:
            await self._judge_answer(asked, got)

    async def _judge_error(self, asked: Asked, got: Got, error: dict[str, Any]) -> None:
        assert got.head is not None
        code, reason, status = error["code"], error.get("reason"), got.head.status
        self.counts[f"error {code} {reason or ''}".strip()] += 1
        if status in (429, 503):
            if not 1 <= int(got.head.headers.get("retry-after", 0)) <= 600:
                self.tell(f"{status} {code} without Retry-After")
            await asyncio.sleep(self.mix.pause_s)
        kind = asked.name.kind if asked.name is not None else "healthy"
        if code == "deadline_exceeded":
            fits = "deadline_s" in asked.body
        elif code in _OVERLOADS:
            is_blamed = reason == "ADAPTER_LOAD" and kind in ("healthy", "nan") and not self.site.config.flaky
            fits = not is_blamed and reason != "CONNECTIONS"
        elif code == "store_unavailable":
            fits = self.site.config.flaky
        elif asked.is_foreign:
            fits = status == 404
        elif status == 404 or code == "adapter_not_active":
            fits = await self._may_be_gone(asked, got)
        else:
            fits = code in _BROKEN_CODES.get(kind, ())
        if not fits:
            self.tell(f"{status} {error} to {asked.body} of {asked.tenant}, whose adapter is {kind}")

    async def _may_be_gone(self, asked: Asked, got: Got) -> bool:
        name = asked.name
        if name is None:
            return False
        if asked.version is not None:
            return name.deleted_s.get(asked.version, math.inf) <= got.head_s
        if name.may_be(None, asked.begin_s, got.head_s):
            return True
        async with name.lock:  # a change that was under way has been answered
            return name.may_be(None, asked.begin_s, got.head_s)

    async def _judge_answer(self, asked: Asked, got: Got) -> None:
        """Compare an answer, or what there is of it, with what the weights that it names give."""
        assert got.head is not None
        if asked.is_foreign:
            self.tell(f"{asked.tenant} was answered on another tenant's adapter: {asked.body}")
        digest = await self._judge_identity(asked, got)
        if asked.name is not None and asked.name.kind != "healthy":
            if got.error is None and got.is_whole:
                self.tell(f"a broken adapter ({asked.name.kind}) answered {asked.body}")
            return
        max_tokens, stops = asked.body["max_tokens"], asked.body.get("stop_token_ids", ())
        wanted = list[int]()
        finish: tuple[str, int | None] = ("length", None)
        drawn = continuation(digest, asked.prompt, max_tokens)
        for token in drawn:
            if token in stops:
                finish = ("stop", token)
                break
            wanted.append(token)
        shown = [*asked.prompt, *wanted] if asked.body.get("echo") else wanted
        is_whole = got.is_whole and got.error is None
        for index in range(asked.body.get("n", 1)):
            tokens = [int(one) for one in _WORD.findall(got.texts.get(index, ""))]
            if tokens != (shown if is_whole else shown[: len(tokens)]):
                self.tell(f"WRONG TOKENS {tokens}, wanted {shown} of {digest} for {asked.body}")
            if (is_whole or index in got.finishes) and got.finishes.get(index) != finish:
                self.tell(f"finished by {got.finishes.get(index)}, not {finish}: {asked.body}")
        if is_whole:
            self._judge_whole(asked, got, len(wanted) + (finish[0] == "stop"))

    def _judge_whole(self, asked: Asked, got: Got, num_tokens: int) -> None:
        self.counts["whole answers"] += 1
        num_tokens *= asked.body.get("n", 1)
        usage = got.usage
        if usage is not None and (usage["prompt_tokens"], usage["completion_tokens"]) != (
            len(asked.prompt),
            num_tokens,
        ):
            self.tell(f"usage {usage} for {len(asked.prompt)} and {num_tokens} tokens")
        if usage is not None and usage["prompt_tokens_details"]["cached_tokens"]:
            self.counts["with cached tokens"] += 1

    async def _judge_identity(self, asked: Asked, got: Got) -> str | None:
        """The digest that an answer names, which must be one that its name stood for while it ran."""
        assert got.head is not None
        header = got.head.headers["x-loraplex-adapter"]
        bodies = [one["adapter"] for one in got.identities]
        if asked.name is None:
            if header != "none" or any(one is not None for one in bodies):
                self.tell(f"the base was asked for and {header} {bodies} ran")
            return None
        found = _IDENTITY.fullmatch(header)
        if found is None:
            self.tell(f"the identity {header!r} for {asked.body}")
            return ""
        label, version, digest = found[1], int(found[2]), found[3]
        if any((one["name"], one["version"], one["digest"]) != (label, version, digest) for one in bodies):
            self.tell(f"the header says {header} and the body {bodies}")
        name = asked.name
        fits = label == name.name and await self._may_have_run(asked, version, got.head_s)
        if not fits or name.digests[version] != digest:
            self.tell(f"STALE {header}, {asked.version or name.active} wanted, to {asked.body}")
        return digest

    async def _may_have_run(self, asked: Asked, version: int, head_s: float) -> bool:
        name = asked.name
        assert name is not None
        if asked.version is not None:
            return version == asked.version and name.gone_s.get(version, math.inf) >= asked.begin_s
        if name.may_be(version, asked.begin_s, head_s):
            return True
        async with name.lock:  # a change that was under way has been answered
            return name.may_be(version, asked.begin_s, head_s)
