"""How many adapters lie in the pool beside a KV lease, ranks as in production (BENCH.md 3.6): filled for real."""

import argparse
import random
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from engine_runs import Adapters, make_requests, run_batch, say, shape_of, show_table
from llama8b import ByteModel
from loraplex.core import AdapterRef
from loraplex.engine import Engine

MIX = {4: 10, 8: 30, 16: 35, 32: 15, 64: 8, 128: 2}  # per cent of the adapters
KV_TOKENS = 128 * 1024
NUM_CHECKED = 24


def mixed_refs(adapters: Adapters, seed: int = 0) -> Iterator[AdapterRef]:
    """Adapters without end, every hundred in the shares of MIX and in random order."""
    rng, counts = random.Random(seed), Counter[int]()
    while True:
        block = [rank for rank, share in MIX.items() for _ in range(share)]
        rng.shuffle(block)
        for rank in block:
            counts[rank] += 1
            yield adapters.take(rank, counts[rank])[-1]


def _evict_all(engine: Engine) -> None:
    for digest in engine.scheduler.residency.resident:
        engine.scheduler.residency.evict(digest)


def _lease_all(engine: Engine, adapters: Adapters) -> list[AdapterRef]:
    """Lease pages for adapters until the next one does not fit."""
    pool, residency = engine.scheduler.pool, engine.scheduler.residency
    resident: list[AdapterRef] = []
    for ref in mixed_refs(adapters):
        packed = engine.shelf.packed[ref.digest]
        if packed.num_pages > pool.num_free:
            return resident
        acquired = residency.acquire(ref.digest, packed.num_pages)
        assert acquired is not None and acquired.is_cold
        residency.release(ref.digest)
        resident.append(ref)
    raise AssertionError("mixed_refs has no end")


def _check_pages(engine: Engine, refs: list[AdapterRef]) -> int:
    """Pages of `refs` compared with their images; every one must hold the image's bits."""
    count = 0
    for ref in refs:
        pages, image = engine.scheduler.residency.pages(ref.digest), engine.shelf.packed[ref.digest].image
        held = engine._buffer.rows[torch.tensor(pages, device=engine._buffer.rows.device)]
        assert torch.equal(held.view(torch.int16), image.stacked().to(held.device).view(torch.int16)), (
            f"{ref.name} has changed"
        )
        count += len(pages)
    return count


def measure_resident(engine: Engine, adapters: Adapters, args: argparse.Namespace) -> dict[str, Any]:
    """Lease the KV, fill the rest with adapters, check a sample, then answer a batch from adapters that are there."""
    geometry, scheduler = engine._geometry, engine.scheduler
    _evict_all(engine)
    kv_pages = geometry.num_pages // 2 if args.tiny else geometry.pages_for_tokens(KV_TOKENS)
    lease = scheduler.pool.allocate(kv_pages, "bench:kv")
    assert lease is not None, f"the pool of {geometry.num_pages} pages has no room for {kv_pages} pages of KV"
    resident = _lease_all(engine, adapters)
    started = time.perf_counter()
    for ref in resident:
        engine._runner.load(scheduler.residency.pages(ref.digest), engine.shelf.packed[ref.digest].image)
    if engine._decoder.device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    used = scheduler.residency.num_pages
    sample = random.Random(1).sample(resident, min(NUM_CHECKED, len(resident)))
    checked = _check_pages(engine, sample)
    lease.release()
    asked = random.Random(2).sample(resident, min(args.batch, len(resident)))
    timing = run_batch(engine, make_requests(asked, 16, 8, engine.base.vocab_size))
    assert timing.num_loads == 0, "an adapter counted as resident had to be loaded"
    _check_pages(engine, sample)
    _evict_all(engine)
    ranks = Counter(int(ref.name[1:].split("-")[0]) for ref in resident)
    free_bytes = (geometry.num_pages - kv_pages) * geometry.page_bytes
    unit = ByteModel.of(shape_of(args)).rank_unit_bytes
    say(f"{len(resident)} adapters in {used} pages, loaded in {seconds:.1f} s; {checked} pages compared")
    return {
        "resident_adapters": len(resident),
        "kv_tokens": kv_pages * geometry.page_tokens,
        "by_rank": {str(rank): ranks[rank] for rank in sorted(ranks)},
        "adapter_gb": used * geometry.page_bytes / 1e9,
        "wasted_share": 1 - sum(rank * n for rank, n in ranks.items()) * unit / (used * geometry.page_bytes),
        "padded_slots": int(free_bytes // (max(MIX) * unit)),
        "pool_pages": geometry.num_pages,
        "pool_gb": geometry.num_pages * geometry.page_bytes / 1e9,
        "load_gb_s": used * geometry.page_bytes / seconds / 1e9,
        "checked_pages": checked,
        "served_from": len(asked),
    }


def show_resident(section: dict[str, Any]) -> None:
    show_table(
        "Resident adapters, production ranks, beside a lease of KV",
        ("adapters", "KV tokens", "adapters GB", "pool GB", "lost in packing", "slots padded to 128", "load GB/s"),
        [
            [
                str(section["resident_adapters"]),
                str(section["kv_tokens"]),
                f"{section['adapter_gb']:.1f}",
                f"{section['pool_gb']:.1f}",
                f"{section['wasted_share']:.1%}",
                str(section["padded_slots"]),
                f"{section['load_gb_s']:.1f}",
            ]
        ],
    )
