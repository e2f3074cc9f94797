"""The engine behind event loops: streams, cancelling, death, threads."""

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from loraplex.adapters import AdapterLimits
from loraplex.core import (
    AdapterRef,
    EngineDead,
    FinishReason,
    InvalidRequest,
    ModelNotFound,
    Request,
    RequestId,
    RequestOutput,
    SamplingParams,
)
from loraplex.engine import AsyncEngine, Engine, EngineConfig, ServedModels, load_base

from ..conftest import MakeAdapter, MakeBase
from ..oracle import GREEDY, Harness, random_prompt

LONG = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
_IDS = itertools.count()


def ask(
    prompt: tuple[int, ...] = (1, 2, 3), params: SamplingParams = GREEDY, adapter: AdapterRef | None = None
) -> Request:
    return Request(RequestId(f"q{next(_IDS)}"), prompt, params, adapter)


MakeEngine = Callable[..., AsyncEngine]


@pytest.fixture
def make_engine(tiny_base: MakeBase) -> Iterator[MakeEngine]:
    """Started engines, stopped at the end."""
    started: list[AsyncEngine] = []

    def make(base: Path | None = None, **settings: Any) -> AsyncEngine:
        settings = {"dtype": "float32", "memory_bytes": 2**23, "num_threads": 1} | settings
        engine = AsyncEngine(Engine(load_base(base or tiny_base("llama"), EngineConfig(**settings))))
        engine.start()
        started.append(engine)
        return engine

    yield make
    for engine in started:
        engine.stop()


async def collect(engine: AsyncEngine, request: Request) -> list[RequestOutput]:
    return [output async for output in engine.generate(request)]


async def tokens(engine: AsyncEngine, request: Request) -> list[int]:
    return [t for output in await collect(engine, request) for delta in output.deltas for t in delta.token_ids]


def within(coroutine: Coroutine[Any, Any, Any], seconds: float = 60.0) -> Any:
    """Run it; a hang fails the test instead of stopping the suite."""
    return asyncio.run(asyncio.wait_for(coroutine, seconds))


def settle(engine: AsyncEngine, condition: Callable[[], bool]) -> None:
    """Wait until the engine's thread has done what it was asked."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_stream_gives_every_token_once_and_then_ends(make_engine: MakeEngine, tiny_base: MakeBase) -> None:
    engine, prompt = make_engine(), random_prompt(20)
    outputs = within(collect(engine, ask(prompt)))
    assert [output.finished for output in outputs] == [False] * 7 + [True]
    assert outputs[-1].deltas[0].finish_reason is FinishReason.LENGTH
    got = [token for output in outputs for delta in output.deltas for token in delta.token_ids]
    assert got == Harness(tiny_base("llama")).answer(prompt).tokens


def test_many_requests_at_once_get_what_each_gets_alone(
    make_engine: MakeEngine, tiny_base: MakeBase, tiny_adapter: MakeAdapter
) -> None:
    base = tiny_base("llama")
    engine, alone = make_engine(kv_pages=60, max_num_batched_tokens=24, max_num_seqs=6), Harness(base)
    models = ServedModels(engine.engine, AdapterLimits())
    paths = [tiny_adapter(base, rank=rank, seed=rank) for rank in (1, 4, 8)]
    refs = [models.load(f"a{i}", path, created=0.0) for i, path in enumerate(paths)]
    for i, path in enumerate(paths):
        alone.load(f"a{i}", path)
    asks = [
        ask(random_prompt(3 * i + 1, seed=i), SamplingParams(max_tokens=12, seed=i, top_p=0.9), ([*refs, None])[i % 4])
        for i in range(16)
    ]

    async def all_of_them() -> list[list[int]]:
        return await asyncio.gather(*(tokens(engine, one) for one in asks))

    expected = [alone.answer(one.prompt_token_ids, one.params, one.adapter).tokens for one in asks]
    assert within(all_of_them()) == expected


def test_closing_the_generator_cancels(make_engine: MakeEngine) -> None:
    engine = make_engine()

    async def leave_early() -> None:
        stream = engine.generate(ask(params=LONG))
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]

    within(leave_early())
    settle(engine, lambda: not engine.engine.has_work)
    assert engine.engine.stats().num_output_tokens < 150
    assert not engine._streams
    assert within(tokens(engine, ask()))


def test_cancelled_task_cancels_its_request(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_seqs=1)

    async def cancel() -> list[int]:
        running = asyncio.create_task(tokens(engine, ask(params=LONG)))
        queued = asyncio.create_task(tokens(engine, ask(params=LONG)))
        other = asyncio.create_task(tokens(engine, ask()))
        await asyncio.sleep(0.05)
        running.cancel()
        queued.cancel()
        return await other

    assert len(within(cancel())) == GREEDY.max_tokens
    settle(engine, lambda: not engine.engine.has_work)
    scheduler = engine.engine.scheduler
    assert scheduler.pool.num_free == scheduler.pool.num_pages


def test_bad_requests_raise_at_the_first_step_of_the_stream(make_engine: MakeEngine) -> None:
    engine = make_engine(max_waiting=2)
    for bad, error in (
        (ask((-1,)), InvalidRequest),
        (ask(()), InvalidRequest),
        (ask(adapter=AdapterRef("ghost", 1, "0" * 64)), ModelNotFound),  # type: ignore[arg-type]
        (ask(params=SamplingParams(n=3)), InvalidRequest),  # more than the queue ever holds
    ):
        with pytest.raises(error):
            within(collect(engine, bad))
    assert within(tokens(engine, ask()))
    assert engine.is_alive


def test_second_request_of_a_running_id_fails_alone(make_engine: MakeEngine) -> None:
    engine = make_engine()
    request = ask(params=LONG)

    async def twice() -> tuple[Any, ...]:
        return tuple(await asyncio.gather(tokens(engine, request), tokens(engine, request), return_exceptions=True))

    first, second = within(twice())
    assert len(first) == 200
    assert isinstance(second, InvalidRequest)


def test_cancelling_a_second_request_of_a_running_id_spares_the_first(make_engine: MakeEngine) -> None:
    engine = make_engine()
    request = ask(params=LONG)

    async def cancel_second() -> list[int]:
        first = asyncio.create_task(tokens(engine, request))
        second = asyncio.create_task(tokens(engine, request))
        await asyncio.sleep(0)
        second.cancel()
        return await first

    assert len(within(cancel_second())) == 200


def test_several_event_loops_and_threads_at_once(make_engine: MakeEngine, tiny_base: MakeBase) -> None:
    engine, alone = make_engine(), Harness(tiny_base("llama"))
    prompts = [random_prompt(i + 1, seed=i) for i in range(12)]
    expected = [alone.answer(prompt).tokens for prompt in prompts]
    got: dict[int, list[list[int]]] = {}

    def client(number: int) -> None:
        async def run() -> list[list[int]]:
            return list(await asyncio.gather(*(tokens(engine, ask(prompt)) for prompt in prompts)))

        got[number] = within(run())

    threads = [threading.Thread(target=client, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == dict.fromkeys(range(4), expected)


def test_loop_that_closed_meanwhile_harms_nobody(make_engine: MakeEngine) -> None:
    engine = make_engine()
    loop = asyncio.new_event_loop()
    stream = engine.generate(ask(params=LONG))
    loop.run_until_complete(stream.__anext__())
    loop.close()
    assert len(within(tokens(engine, ask()))) == GREEDY.max_tokens
    settle(engine, lambda: not engine.engine.has_work)
    assert engine.is_alive
    with pytest.raises(StopAsyncIteration):
        within(_drain(stream))


async def _drain(stream: Any) -> None:
    await stream.aclose()
    await stream.__anext__()


def test_adapters_come_and_go_while_serving(
    make_engine: MakeEngine, tiny_base: MakeBase, tiny_adapter: MakeAdapter
) -> None:
    base = tiny_base("llama")
    engine, alone = make_engine(kv_pages=40), Harness(base)
    models = ServedModels(engine.engine, AdapterLimits())
    paths = [tiny_adapter(base, rank=rank, seed=rank) for rank in (1, 4, 8)]
    expected = [alone.answer((7, 8), adapter=alone.load(f"a{i}", path)).tokens for i, path in enumerate(paths)]
    plain = alone.answer((7, 8)).tokens

    async def tenant(number: int) -> None:
        for turn in range(8):
            name, which = f"tenant{number}", (number + turn) % 3
            ref = await asyncio.to_thread(models.load, name, paths[which], created=0.0, replace=True)
            stream = engine.generate(ask((7, 8), adapter=ref))
            first = await anext(stream)
            await asyncio.to_thread(models.unload, name)  # the request runs on
            rest = [output async for output in stream]
            got = [t for output in (first, *rest) for delta in output.deltas for t in delta.token_ids]
            assert got == expected[which]
            assert first.served_by.adapter == ref
            assert await tokens(engine, ask((7, 8))) == plain

    async def all_tenants() -> None:
        await asyncio.gather(*(tenant(number) for number in range(4)))

    within(all_tenants())
    settle(engine, lambda: not engine.engine.shelf.packed)
    assert engine.is_alive


def test_retiring_adapters_from_other_threads_never_kills_the_engine(
    make_engine: MakeEngine, tiny_base: MakeBase, tiny_adapter: MakeAdapter
) -> None:
    base = tiny_base("llama")
    engine = make_engine()
    path = tiny_adapter(base, rank=1)
    models = ServedModels(engine.engine, AdapterLimits())

    def churn(number: int) -> None:
        for _ in range(40):
            ref = models.load(f"name{number}", path, created=0.0)
            engine.engine.shelf.pages_of(ask(adapter=ref))  # a name that was given must be servable
            models.unload(ref.name)

    threads = [threading.Thread(target=churn, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    assert len(within(tokens(engine, ask(params=LONG)))) == 200
    for thread in threads:
        thread.join()
    assert engine.is_alive


# ---------------------------------------------------------------------- the end
def break_forward(engine: AsyncEngine, after: int = 0) -> None:
    forward, calls = engine.engine._decoder.forward, itertools.count()

    def failing(batch: Any) -> Any:
        if next(calls) >= after:
            raise RuntimeError("the device is gone")
        return forward(batch)

    engine.engine._decoder.forward = failing  # type: ignore[method-assign]


def test_engine_failure_fails_everyone(make_engine: MakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(max_num_seqs=2)
    break_forward(engine, after=3)

    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*(tokens(engine, ask(params=LONG)) for _ in range(5)), return_exceptions=True)

    assert {type(result) for result in within(all_of_them())} == {EngineDead}
    assert not engine.is_alive
    with pytest.raises(EngineDead):
        within(tokens(engine, ask()))
    (record,) = [one for one in caplog.records if one.levelname == "ERROR"]
    assert record.getMessage().startswith(f"the engine stopped: {type(engine.failure).__qualname__} at ")
    assert str(engine.failure) not in record.getMessage()  # which may quote a prompt
    assert record.exc_info is None


def test_failure_while_queueing_a_request_fails_it_and_everyone(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug in add_request must not leave its own caller waiting for ever."""
    engine = make_engine()
    add = engine.engine.scheduler.add

    def failing(request: Request, *args: Any) -> Any:
        if len(request.prompt_token_ids) == 1:
            raise RuntimeError("a bug")
        return add(request, *args)

    monkeypatch.setattr(type(engine.engine.scheduler), "add", lambda self, *args: failing(*args))

    async def both() -> list[Any]:
        running = asyncio.create_task(tokens(engine, ask((1, 2), LONG)))
        await asyncio.sleep(0.05)
        return await asyncio.gather(running, tokens(engine, ask((1,))), return_exceptions=True)

    assert [type(result) for result in within(both())] == [EngineDead, EngineDead]
    assert not engine.is_alive


def test_requests_that_race_with_the_end_never_hang(make_engine: MakeEngine) -> None:
    for after in (1, 2, 5):
        engine = make_engine()
        break_forward(engine, after=after)

        async def hammer(engine: AsyncEngine = engine) -> None:
            while True:
                await asyncio.gather(*(tokens(engine, ask(params=LONG)) for _ in range(3)))

        with pytest.raises(EngineDead):
            within(hammer())


def test_request_put_after_the_last_command_was_taken_is_dead(make_engine: MakeEngine) -> None:
    """The check at the top of `generate` passed, then the engine ended."""
    engine = make_engine()
    check = engine.engine.check

    def slow_check(request: Request) -> None:
        check(request)
        engine.stop()

    engine.engine.check = slow_check  # type: ignore[method-assign]
    with pytest.raises(EngineDead):
        within(tokens(engine, ask()), 10)


def test_stop_fails_what_runs_and_may_be_called_again(make_engine: MakeEngine) -> None:
    engine = make_engine()

    async def stop_early() -> None:
        stream = engine.generate(ask(params=LONG))
        await anext(stream)
        await asyncio.to_thread(engine.stop)
        async for _ in stream:
            pass

    with pytest.raises(EngineDead):
        within(stop_early())
    assert not engine.is_alive
    engine.stop()


def test_engine_that_was_not_started_is_dead(tiny_base: MakeBase) -> None:
    engine = AsyncEngine(Engine(load_base(tiny_base("llama"), EngineConfig(num_threads=1))))
    assert not engine.is_alive
    with pytest.raises(EngineDead):
        within(tokens(engine, ask()))


def test_hung_step_shows_as_not_alive(tiny_base: MakeBase) -> None:
    now = [0.0]
    engine = AsyncEngine(Engine(load_base(tiny_base("llama"), EngineConfig(num_threads=1))), clock=lambda: now[0])
    release = threading.Event()
    engine.engine.step = lambda _: (release.wait(30) and []) or []  # type: ignore[method-assign, assignment]
    engine.start()
    engine._commands.put(lambda: None)
    assert engine.is_alive
    now[0] = 11.0
    assert not engine.is_alive
    release.set()
    engine.stop()


def test_client_surface(make_engine: MakeEngine) -> None:
    engine = make_engine(max_model_len=99)
    assert engine.max_model_len == 99
    assert engine.encode("t5 t6") == (5, 6)
    assert engine.decode((5, 6)) == "t5 t6"
    assert engine.base.model_type == "llama"
    with pytest.raises(InvalidRequest):
        engine.encode_chat([])
    assert engine.stats().num_pages > 0
