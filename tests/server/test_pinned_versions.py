"""Every answer comes from the version that was pinned, whatever is activated meanwhile (RELIABILITY.md, T18)."""

import asyncio
import random
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.core import AdapterRef
from loraplex.registry import Registry
from loraplex.server import ServerConfig, generation
from loraplex.testing import fake_text
from tests.registry.helpers import OPERATOR

from .helpers import chunks
from .registry_world import Site, ask, fake_engine

pytestmark = pytest.mark.anyio

NUM_VERSIONS = 4
NUM_CLIENTS = 12
NUM_MOVES = 60
# After these moves, to these versions, the pointer rests for longer than anything may be out of date: so each of the
# versions is asked for, however slow the machine is.
PAUSES = {10: 1, 20: 2, 40: 3, NUM_MOVES - 1: 4}
MAX_STALE_S = 0.5  # another process's move is noticed within 0.25 s; the rest is for a slow machine
HELLO = (256, *b"Hello")


@dataclass
class History:
    """Which version was active when, as the mover saw it; times from one monotonic clock."""

    moves: list[tuple[float, float, int]] = field(default_factory=list)  # began, ended, version

    def could_be_active(self, version: int, since: float, until: float) -> bool:
        """Whether the version may have been active at some moment of an interval."""
        for index, (began, _, target) in enumerate(self.moves):
            gone = self.moves[index + 1][1] if index + 1 < len(self.moves) else float("inf")
            if target == version and began <= until and gone >= since:
                return True
        return False


@dataclass(frozen=True)
class Answer:
    """One answer, and when it was asked for."""

    asked: float
    ended: float
    status: int
    version: int
    digest: str
    text: str
    num_tokens: int
    model: str


def move_about(registry: Registry, history: History, stop: threading.Event) -> None:
    """Activate and roll back at random, as another process would."""
    rng = random.Random(7)
    for number in range(NUM_MOVES):
        active = registry.adapters.show(OPERATOR, "acme", "one").info.alias.active
        began = time.monotonic()
        if rng.random() < 0.3 and len(history.moves) > 2 and number not in PAUSES:
            registry.adapters.rollback(OPERATOR, "acme", "one", expected=active)
        else:
            target = PAUSES.get(number) or rng.choice([n for n in range(1, NUM_VERSIONS + 1) if n != active])
            registry.adapters.activate(OPERATOR, "acme", "one", target, expected=active)
        now = registry.adapters.show(OPERATOR, "acme", "one").info.alias.active
        assert now is not None
        history.moves.append((began, time.monotonic(), now))
        time.sleep(MAX_STALE_S + 0.3 if number in PAUSES else rng.random() * 0.03)
    stop.set()


async def ask_once(client: httpx.AsyncClient, rng: random.Random) -> Answer:
    num_tokens, stream, asked = rng.randint(1, 12), rng.random() < 0.3, time.monotonic()
    response = await client.post("/v1/completions", json=ask("one", max_tokens=num_tokens, stream=stream))
    ended = time.monotonic()
    if response.status_code != 200:
        return Answer(asked, ended, response.status_code, 0, "", response.text, num_tokens, "")
    if stream:
        events = chunks(response)
        last, text = events[-1], "".join(event["choices"][0]["text"] for event in events)
        if len({event["model"] for event in events}) != 1:
            return Answer(asked, ended, 599, 0, "", "mixed", num_tokens, "")
    else:
        last = response.json()
        text = last["choices"][0]["text"]
    adapter = last["x_loraplex"]["adapter"]
    header = response.headers["x-loraplex-adapter"]
    assert header == f"name=one; version={adapter['version']}; digest={adapter['digest']}"
    return Answer(asked, ended, 200, adapter["version"], adapter["digest"], text, num_tokens, last["model"])


async def run(site: Site) -> tuple[list[Answer], History, dict[int, str]]:
    """Clients ask while the pointer moves."""
    key = site.tenant("acme", "one")
    for seed in range(2, NUM_VERSIONS + 1):
        site.world.verified("acme", "one", seed)
    digests = {number: site.digest("acme", "one", number) for number in range(1, NUM_VERSIONS + 1)}
    mover, stop = site.world.reopen(), threading.Event()
    history, answers = History([(0.0, 0.0, 1)]), []

    async def keep_asking(seed: int) -> None:
        rng = random.Random(seed)
        async with site.client(key) as client:
            while not stop.is_set():
                answers.append(await ask_once(client, rng))

    moving = asyncio.create_task(asyncio.to_thread(move_about, mover, history, stop))
    try:
        await asyncio.gather(moving, *(keep_asking(seed) for seed in range(NUM_CLIENTS)))
    finally:
        mover.close()
    return answers, history, digests


def problems(answers: list[Answer], history: History, digests: dict[int, str]) -> list[str]:
    """What contradicts the rule: an answer is one version's alone, and of one that was active when it was asked for."""
    found = []
    for answer in answers:
        if answer.status != 200:
            found.append(f"status {answer.status}: {answer.text}")
        elif answer.digest != digests[answer.version] or answer.model != f"one@{answer.version}":
            found.append(f"version {answer.version} came with the digest {answer.digest}")
        elif answer.text != fake_text(answer.digest, HELLO, answer.num_tokens):  # type: ignore[arg-type]
            found.append(f"version {answer.version} did not make this text")
        elif not history.could_be_active(answer.version, answer.asked - MAX_STALE_S, answer.ended):
            found.append(f"version {answer.version} was not active then")
    return found


async def test_every_answer_is_of_a_version_that_was_active(tmp_path: Path) -> None:
    site = Site(tmp_path, engine=fake_engine(delay_s=0.001))
    answers, history, digests = await run(site)
    assert problems(answers, history, digests) == []
    assert len(history.moves) == NUM_MOVES + 1
    assert len(answers) >= 300
    assert {answer.version for answer in answers} == set(digests)
    logged = [line for line in site.lines() if line["event"] == "request"]
    assert len(logged) == len(answers)
    assert all(line["adapter_digest"] == digests[line["version"]] for line in logged)
    site.close()


async def test_it_holds_while_adapters_fall_out_of_host_memory(tmp_path: Path) -> None:
    site = Site(tmp_path, engine=fake_engine(delay_s=0.001), config=ServerConfig(max_host_adapters=NUM_VERSIONS - 1))
    answers, history, digests = await run(site)
    told_to_wait = [answer for answer in answers if answer.status == 503 and "--max-cpu-loras" in answer.text]
    served = [answer for answer in answers if answer not in told_to_wait]
    assert problems(served, history, digests) == []
    assert len(served) >= 300
    assert site.engine.retired
    site.close()


async def test_without_the_check_of_what_ran_a_mix_up_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: an engine that says it ran other weights, and a server that does not look."""
    monkeypatch.setattr(generation, "_check_output", lambda request, output: None)
    site = Site(tmp_path, engine=fake_engine(delay_s=0.001))
    site.engine.serve_other = AdapterRef("one", 1, "f" * 64)  # type: ignore[arg-type]
    assert problems(*await run(site)) != []
    site.close()


async def test_with_the_name_resolved_late_a_mix_up_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: weights by name, as the engine last saw it, and not by the digest that was pinned."""
    site = Site(tmp_path, engine=fake_engine(delay_s=0.001))
    latest: dict[str, AdapterRef] = {}
    real = generation.Job.requests

    def by_name(job: generation.Job) -> Any:
        requests = real(job)
        for request in requests:
            if request.adapter is not None:
                stale = latest.setdefault(request.adapter.name, request.adapter)
                object.__setattr__(request, "adapter", stale)
        return requests

    monkeypatch.setattr(generation.Job, "requests", by_name)
    assert problems(*await run(site)) != []
    site.close()
