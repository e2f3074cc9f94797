"""Merging, cancelling and sending, without a network."""

import asyncio
from collections.abc import AsyncGenerator

import pytest
from starlette.requests import ClientDisconnect

from loraplex.server.streams import EventStream, event, merge, until_disconnect

pytestmark = pytest.mark.anyio


async def numbers(count: int, closed: list[int], fail: bool = False) -> AsyncGenerator[int, None]:
    try:
        for number in range(count):
            await asyncio.sleep(0)
            yield number
        if fail:
            raise ValueError("failed")
    finally:
        closed.append(count)


@pytest.mark.parametrize("counts", [[3], [3, 0, 2]])
async def test_merge_keeps_every_item_in_order(counts: list[int]) -> None:
    closed: list[int] = []
    got: dict[int, list[int]] = {idx: [] for idx in range(len(counts))}
    async for tagged in merge([numbers(count, closed) for count in counts]):
        got[tagged.source_idx].append(tagged.item)
    assert got == {idx: list(range(count)) for idx, count in enumerate(counts)}
    assert sorted(closed) == sorted(counts)


async def test_merge_ends_at_the_first_error() -> None:
    closed: list[int] = []
    merged = merge([numbers(10**6, closed), numbers(1, closed, fail=True)])
    with pytest.raises(ValueError, match="failed"):
        async for _ in merged:
            pass
    assert sorted(closed) == [1, 10**6]


@pytest.mark.parametrize("count", [1, 2])
async def test_closing_a_merge_closes_its_sources(count: int) -> None:
    closed: list[int] = []
    merged = merge([numbers(10**6, closed) for _ in range(count)])
    await anext(merged)
    await merged.aclose()
    assert len(closed) == count


async def test_work_is_cancelled_when_the_client_goes() -> None:
    cancelled = asyncio.Event()

    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def work() -> None:
        try:
            await asyncio.sleep(10)
        finally:
            cancelled.set()

    with pytest.raises(ClientDisconnect):
        await until_disconnect(receive, work())
    assert cancelled.is_set()


async def test_reader_that_stalls_is_dropped() -> None:
    closed: list[int] = []

    async def events() -> AsyncGenerator[bytes, None]:
        async for number in numbers(10**6, closed):
            yield event({"number": number})

    async def receive() -> dict[str, str]:
        await asyncio.sleep(10)
        return {"type": "http.disconnect"}

    async def send(message: object) -> None:
        if message["type"] == "http.response.body":  # type: ignore[index]
            await asyncio.sleep(10)

    with pytest.raises(ClientDisconnect):
        await EventStream(events(), {}, stall_timeout_s=0.02)({}, receive, send)  # type: ignore[arg-type]
    assert closed == [10**6]


async def test_shutdown_tells_the_reader() -> None:
    sent: list[bytes] = []

    async def events() -> AsyncGenerator[bytes, None]:
        yield event({"number": 1})
        await asyncio.sleep(10)

    async def receive() -> dict[str, str]:
        await asyncio.sleep(10)
        return {"type": "http.disconnect"}

    async def send(message: object) -> None:
        sent.append(message.get("body", b""))  # type: ignore[attr-defined]

    task = asyncio.create_task(EventStream(events(), {}, 1.0)({}, receive, send))  # type: ignore[arg-type]
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert b'"code":"engine_dead"' in sent[-1]


def test_events_are_one_ascii_line() -> None:
    data = event({"text": "a\nb\u2028c\x85"})
    assert data.isascii()
    assert data.count(b"\n") == 2
