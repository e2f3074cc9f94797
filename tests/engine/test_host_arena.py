"""Host memory in pages: within the bound, given back once, and never anybody else's."""

import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loraplex.core import AdapterRefused, OverloadReason, RefusalReason
from loraplex.core.host_memory import HostMemoryFull
from loraplex.engine import host_arena
from loraplex.engine.host_arena import HostArena, HostPages, LeasedPages

ELEMS = 16  # of float32: pages of 64 bytes
BLOCK = 1024  # 16 pages


def make_arena(max_bytes: int | None = None) -> HostArena:
    return HostArena(ELEMS, torch.float32, max_bytes=max_bytes, block_bytes=BLOCK)


def test_blocks_come_as_they_are_needed_and_stay() -> None:
    arena = make_arena()
    assert arena.held_bytes == 0
    leased = [arena.allocate(10), arena.allocate(6)]
    assert (arena.held_bytes, arena.num_leased, arena.num_free) == (BLOCK, 16, 0)
    leased.append(arena.allocate(1))
    assert (arena.held_bytes, arena.num_leased, arena.num_free) == (2 * BLOCK, 17, 15)
    for pages in leased:
        pages.free()
    assert (arena.held_bytes, arena.num_leased, arena.num_free) == (2 * BLOCK, 0, 32)


def test_pages_are_zeros_whatever_was_there() -> None:
    arena = make_arena()
    pages = arena.allocate(4)
    for run in pages.runs:
        run.fill_(float("nan"))
    pages.free()
    assert not bool(arena.allocate(16).stacked().any())


@pytest.mark.parametrize("bound", [63, 64, 1000, BLOCK, BLOCK + 1, 5000, 2**16 - 1])
def test_bound_holds_for_blocks_as_the_allocator_rounds_them(bound: int) -> None:
    arena = make_arena(bound)
    leased: list[LeasedPages] = []
    with pytest.raises((HostMemoryFull, AdapterRefused)):
        while True:
            leased.append(arena.allocate(1))
    assert arena.held_bytes <= bound
    assert len(leased) * arena.page_bytes > bound - 2 * arena.page_bytes or not leased
    assert all(len(block) * arena.page_bytes == 2 ** (len(block) * 64 - 1).bit_length() for block in blocks_of(arena))


def blocks_of(arena: HostArena) -> list[torch.Tensor]:
    return list(arena._blocks.values())


def test_full_says_what_is_missing_and_the_knob_and_leaves_all_as_it_was() -> None:
    arena = make_arena(BLOCK)
    pages = arena.allocate(12)
    with pytest.raises(HostMemoryFull, match=r"--cpu-lora-memory") as caught:
        arena.allocate(10)
    assert (caught.value.missing_bytes, caught.value.reason) == (6 * 64, OverloadReason.HOST_MEMORY)
    assert (arena.num_leased, arena.num_free) == (12, 4)
    pages.free()
    assert len(arena.allocate(16)) == 16


def test_what_can_never_fit_is_refused() -> None:
    arena = make_arena(BLOCK)
    with pytest.raises(AdapterRefused, match=r"1088 bytes.*1024 bytes.*--cpu-lora-memory") as caught:
        arena.allocate(17)
    assert caught.value.reason is RefusalReason.TOO_LARGE


def test_adapter_larger_than_a_block_lies_in_several() -> None:
    pages = make_arena().allocate(100)
    assert len(pages) == 100
    assert len(pages.runs) == 7


def test_comparison_finds_memory_beside_a_full_arena() -> None:
    arena = make_arena(BLOCK)
    arena.allocate(16)
    apart = arena.allocate_apart(3)
    assert len(apart) == 3
    apart.free()
    assert (arena.num_leased, arena.num_free, arena.held_bytes) == (16, 0, BLOCK)


def test_system_without_memory_is_told_and_books_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = make_arena()
    arena.allocate(10)

    def empty(*args: object, **kwargs: object) -> torch.Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(HostMemoryFull, match="system"):
        arena.allocate(7)
    assert (arena.held_bytes, arena.num_leased, arena.num_free) == (BLOCK, 10, 6)
    assert len(arena.allocate(6)) == 6


def test_giving_back_twice_is_an_error() -> None:
    arena = make_arena()
    pages = arena.allocate(3)
    pages.free()
    with pytest.raises(AssertionError, match="twice"):
        pages.free()
    assert arena.num_free == 16


def test_slices_are_views_of_the_same_pages() -> None:
    rows = torch.arange(10.0)[:, None]
    pages = HostPages(torch.split(rows, [4, 1, 5]))
    assert [float(page[0]) for page in pages] == list(range(10))
    for start in range(11):
        for stop in range(start, 11):
            piece = pages[start:stop]
            assert [float(page[0]) for page in piece] == list(range(start, stop))
            assert len(piece) == stop - start
    pages[3:6][1].fill_(50.0)
    assert float(rows[4, 0]) == 50.0


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 24), st.integers(0, 30)), max_size=60), st.booleans())
def test_random_leases_never_overlap_leak_or_break_the_bound(steps: list[tuple[bool, int, int]], bounded: bool) -> None:
    bound = 3 * BLOCK + 200 if bounded else None
    arena = make_arena(bound)
    leased: list[tuple[float, LeasedPages]] = []
    for number, (is_lease, size, which) in enumerate(steps):
        if is_lease:
            try:
                pages = arena.allocate(size)
            except HostMemoryFull as error:
                assert error.missing_bytes == (size - arena.num_free) * arena.page_bytes
                continue
            for run in pages.runs:
                assert not bool(run.any())
                run.fill_(number + 1.0)
            leased.append((number + 1.0, pages))
        elif leased:
            leased.pop(which % len(leased))[1].free()
        assert arena.num_leased == sum(len(pages) for _, pages in leased)
        assert arena.num_leased + arena.num_free == arena.held_bytes // arena.page_bytes
        assert bound is None or arena.held_bytes <= bound
        assert all(bool((pages.stacked() == value).all()) for value, pages in leased), "a page has two owners"
    for _, pages in leased:
        pages.free()
    assert arena.num_free * arena.page_bytes == arena.held_bytes
    assert arena._free.longest == min(16, arena.num_free), "runs were not joined again"


def test_threads_lease_and_give_back_at_once() -> None:
    arena, errors = make_arena(64 * BLOCK), list[str]()

    def churn(seed: float) -> None:
        for size in range(1, 60):
            try:
                pages = arena.allocate(size % 13 + 1)
            except HostMemoryFull:
                continue
            for run in pages.runs:
                run.fill_(seed)
            if not bool((pages.stacked() == seed).all()):
                errors.append(f"pages of {seed} were written by another")
            pages.free()

    threads = [threading.Thread(target=churn, args=(i + 1.0,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert (arena.num_leased, arena.num_free * 64) == (0, arena.held_bytes)


def start_slow_block(arena: HostArena, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Thread]:
    """A thread that leases a page and is held up while its block is being made, until the event is set."""
    making, may_go, real = threading.Event(), threading.Event(), torch.empty

    def slow(*args: Any, **kwargs: Any) -> torch.Tensor:
        making.set()
        assert may_go.wait(10)
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", slow)
    thread = threading.Thread(target=arena.allocate, args=(1,))
    thread.start()
    assert making.wait(10)
    return may_go, thread


def test_small_lease_waits_for_the_block_that_another_thread_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = make_arena(BLOCK)
    may_go, thread = start_slow_block(arena, monkeypatch)
    threading.Timer(0.05, may_go.set).start()
    assert len(arena.allocate(1)) == 1
    thread.join()
    assert (arena.num_leased, arena.held_bytes) == (2, BLOCK)


def test_block_that_is_long_in_the_making_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_arena, "_BLOCK_WAIT_S", 0.02)
    arena = make_arena(BLOCK)
    may_go, thread = start_slow_block(arena, monkeypatch)
    with pytest.raises(HostMemoryFull):
        arena.allocate(1)
    with pytest.raises(AdapterRefused):
        arena.allocate(17)
    may_go.set()
    thread.join()
    assert len(arena.allocate(15)) == 15
