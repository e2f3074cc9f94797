"""What a step takes on this device: steps of made-up sequences, timed before anything is served.

They take the way of real steps. They write to pages that nobody holds, which are zeros afterwards.
"""

import time
from dataclasses import dataclass

import numpy as np
import torch

from loraplex.core import AdapterDigest, BaseSite, PageId, RequestId, SamplingParams, SequenceId
from loraplex.engine.batch import PageBuffer
from loraplex.engine.host_arena import LeasedPages
from loraplex.engine.packing import PackedAdapter
from loraplex.engine.runner import Runner, Step
from loraplex.model import SamplingRow
from loraplex.pool import PoolGeometry, SiteRank, plan_layout
from loraplex.scheduler import Calibrator, CostModel, ScheduledChunk, SchedulerConfig, StepPlan, StepShape
from loraplex.scheduler import Sequence as SequenceState

BUDGET_S = 0.7  # of all timed steps; each shape runs once however long that takes
_ROUNDS = 8
_LEAST_SHARE = 0.01  # of a step: what differs by less cannot be told from noise
_CONTEXT = 512  # tokens of each sequence of a long context


@dataclass(frozen=True, slots=True)
class Timed:
    """Steps of one shape and what each took, in milliseconds."""

    shape: StepShape
    times_ms: tuple[float, ...]

    @property
    def typical_ms(self) -> float:
        return sorted(self.times_ms)[len(self.times_ms) // 2]


@dataclass(frozen=True, slots=True)
class _Sizes:
    """How large the steps are: what the settings and the pool allow."""

    rows: int
    context: int  # tokens of each row
    prompt: int
    num_adapters: int

    @staticmethod
    def of(config: SchedulerConfig, geometry: PoolGeometry, adapter_pages: int, *, on_gpu: bool) -> "_Sizes":
        rows = min(config.max_num_seqs, 64 if on_gpu else 8, geometry.num_pages)
        adapters = min(config.max_distinct, rows, geometry.num_pages // 2 // max(adapter_pages, 1))
        left = geometry.num_pages - adapters * adapter_pages
        rows = min(rows, left)
        context = min(_CONTEXT, config.max_model_len, left // rows * geometry.page_tokens)
        longest = min(config.max_step_tokens, config.max_model_len, left * geometry.page_tokens)
        return _Sizes(rows, context, min(longest, 2048 if on_gpu else 64), min(adapters, rows))


def calibrate(
    runner: Runner, buffer: PageBuffer, config: SchedulerConfig, sites: tuple[BaseSite, ...], *, on_gpu: bool
) -> Calibrator:
    """Time steps of few and many tokens, of long contexts, and with adapters. Nobody may hold a page."""
    geometry = buffer.geometry
    packed = _adapter(sites, geometry)
    adapter_pages = int(packed.piece_page.max(initial=-1)) + 1
    sizes = _Sizes.of(config, geometry, adapter_pages, on_gpu=on_gpu)
    steps = _steps(sizes, geometry.page_tokens, packed, adapter_pages, float(geometry.chunk_rank))
    times: list[list[float]] = [[] for _ in steps]  # the first of each counts only if there is no other
    end_s = time.perf_counter() + BUDGET_S
    for _ in range(1 + _ROUNDS):
        for step, found in zip(steps, times, strict=True):
            found.append(_time_ms(runner, step))
        if time.perf_counter() > end_s:
            break
    used = {page for step in steps for chunk in step.plan.chunks for page in chunk.pages}
    for page in used:
        buffer.rows[page].zero_()
    if on_gpu:
        torch.cuda.synchronize(buffer.flat.device)  # the steps that come run on a stream of their own
    timed = [Timed(step.plan.shape, tuple(found[1:] or found)) for step, found in zip(steps, times, strict=True)]
    return fit(*timed)


def _time_ms(runner: Runner, step: Step) -> float:
    """What a step takes; where the host is a step ahead of the device, from the end of one to the end of the next."""
    before = runner.launch(step) if runner.overlaps else None
    began_s = time.perf_counter()
    now = runner.launch(step)
    if before is not None:
        before.wait()
        began_s = time.perf_counter()
    now.wait()
    return 1e3 * (time.perf_counter() - began_s)


def fit(one: Timed, several: Timed, long: Timed, adapters: Timed, prompt: Timed) -> Calibrator:
    """A model of steps of one row, of several, of as many with long contexts, with adapters, and of a prompt.

    What noise may hide counts as the least that could be told from it, and what is learned while serving corrects it.
    """
    floor_ms, base_ms = _LEAST_SHARE * several.typical_ms, several.typical_ms
    num_kv_tokens = max(1, long.shape.num_kv_tokens - several.shape.num_kv_tokens)
    more_ms = {"kv_token_ms": long.typical_ms - base_ms, "rank_ms": adapters.typical_ms - base_ms}
    start = CostModel(
        fixed_ms=one.typical_ms,
        token_ms=prompt.typical_ms / prompt.shape.num_tokens,
        kv_token_ms=max(more_ms["kv_token_ms"], floor_ms) / num_kv_tokens,
        rank_ms=max(more_ms["rank_ms"], floor_ms) / max(adapters.shape.sum_ranks, 16.0),
    )
    hidden = {name for name, ms in more_ms.items() if ms <= floor_ms}
    costs = Calibrator(start, is_measured=True, least=hidden)
    for timed in (one, several, long, adapters, prompt):
        for _ in timed.times_ms:
            costs.add(timed.shape, timed.typical_ms)
    return costs


def _adapter(sites: tuple[BaseSite, ...], geometry: PoolGeometry) -> PackedAdapter:
    """The tables of an adapter of one full chunk on every linear, without an image: its pages are taken as they are."""
    ranks = [SiteRank(i, site.d_in, site.d_out, geometry.chunk_rank) for i, site in enumerate(sites)]
    chunks = plan_layout(ranks, geometry.page_elems, geometry.chunk_rank).chunks
    return PackedAdapter(
        image=LeasedPages((), lambda: None),
        chunk_start=np.arange(len(sites) + 1, dtype=np.int32),
        chunk_rank=np.full(len(chunks), geometry.chunk_rank, dtype=np.int32),
        piece_page=np.array([[c.a.page_idx for c in chunks], [c.b.page_idx for c in chunks]], np.int64),
        piece_offset=np.array([[c.a.offset for c in chunks], [c.b.offset for c in chunks]], np.int64),
        scale=np.zeros(len(sites), dtype=np.float32),
    )


def _steps(
    sizes: _Sizes, page_tokens: int, packed: PackedAdapter, adapter_pages: int, rank: float
) -> tuple[Step, Step, Step, Step, Step]:
    """In the order of `fit`. Adapters lie in the first pages, keys and values behind them."""
    placed = []
    for number in range(sizes.num_adapters):
        first = number * adapter_pages
        pages = tuple(PageId(page) for page in range(first, first + adapter_pages))
        placed.append((AdapterDigest(f"calibration {number}"), pages))
    of_rows = [digest for digest, _ in placed]
    tables = dict.fromkeys(of_rows, packed)
    kv_first = sizes.num_adapters * adapter_pages

    def step(rows: int, start: int, count: int, digests: list[AdapterDigest]) -> Step:
        size = -(-(start + count) // page_tokens)
        chunks, sequences = [], {}
        for row in range(rows):
            digest = digests[row - rows + len(digests)] if row >= rows - len(digests) else None
            pages = tuple(PageId(kv_first + row * size + page) for page in range(size))
            seq = _sequence(SequenceId(-1 - row), start + count, digest)
            sequences[seq.seq_id] = seq
            chunks.append(ScheduledChunk(seq.seq_id, start, count, True, digest, pages))
        mix = tuple(placed) if digests else ()
        plan = StepPlan(tuple(chunks), mix, (), 0, rank * len(digests))
        draws = [SamplingRow(seq.params, seq.token_ids, seq.prompt_len, seed=0) for seq in sequences.values()]
        return Step(plan, sequences, tables, draws)

    return (
        step(1, 0, 1, []),
        step(sizes.rows, 0, 1, []),
        step(sizes.rows, sizes.context - 1, 1, []),
        step(sizes.rows, 0, 1, of_rows),
        step(1, 0, sizes.prompt, []),
    )


def _sequence(seq_id: SequenceId, num_tokens: int, digest: AdapterDigest | None) -> SequenceState:
    params = SamplingParams(max_tokens=1, temperature=0.0)
    tokens = [0] * num_tokens
    return SequenceState(
        seq_id, RequestId("calibration"), params, digest, 0, tokens, num_tokens, num_tokens + 1, frozenset(), 0.0
    )
