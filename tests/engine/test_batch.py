"""From a plan to tensors: rows, segments and tables say what the plan says."""

from collections.abc import Sequence

import numpy as np
import torch

from loraplex.core import AdapterDigest, PageId, RequestId, SamplingParams, SequenceId
from loraplex.engine.batch import BatchBuilder, PageBuffer
from loraplex.engine.host_arena import HostPages, LeasedPages
from loraplex.engine.packing import PackedAdapter
from loraplex.pool import KvShape, PoolGeometry
from loraplex.scheduler import ScheduledChunk, StepPlan
from loraplex.scheduler import Sequence as SequenceState

GEOMETRY = PoolGeometry(KvShape(2, 1, 4), num_pages=12, page_tokens=16, chunk_rank=4, elem_bytes=4)
A, B = AdapterDigest("a"), AdapterDigest("b")


def pages(*numbers: int) -> tuple[PageId, ...]:
    return tuple(PageId(number) for number in numbers)


def sequence(number: int, tokens: Sequence[int], adapter: AdapterDigest | None) -> SequenceState:
    return SequenceState(
        seq_id=SequenceId(number),
        request_id=RequestId(str(number)),
        params=SamplingParams(),
        adapter=adapter,
        adapter_pages=2,
        token_ids=list(tokens),
        prompt_len=1,
        max_len=100,
        eos_token_ids=frozenset(),
        arrival_s=0.0,
    )


def chunk(
    number: int,
    start: int,
    num_tokens: int,
    adapter: AdapterDigest | None,
    held: tuple[PageId, ...],
    samples: bool = True,
) -> ScheduledChunk:
    return ScheduledChunk(SequenceId(number), start, num_tokens, samples, adapter, held)


def packed(num_chunks: int, num_pages: int = 2) -> PackedAdapter:
    """`num_chunks` chunks at site 1 of 3, ranks 1, 2, ..; A in the first page, B in the last."""
    counts = np.arange(num_chunks)
    return PackedAdapter(
        image=LeasedPages((torch.arange(num_pages * GEOMETRY.page_elems).view(num_pages, -1).float(),), lambda: None),
        chunk_start=np.array([0, 0, num_chunks, num_chunks], dtype=np.int32),
        chunk_rank=(counts + 1).astype(np.int32),
        piece_page=np.stack([counts * 0, counts * 0 + num_pages - 1]),
        piece_offset=np.stack([counts * 10, counts * 10 + 5]),
        scale=np.array([0.0, 0.5 * num_chunks, 0.0], dtype=np.float32),
    )


def make_plan(
    chunks: Sequence[ScheduledChunk], adapters: Sequence[tuple[AdapterDigest, tuple[PageId, ...]]] = ()
) -> StepPlan:
    return StepPlan(tuple(chunks), tuple(adapters), (), 0)


def make_builder() -> BatchBuilder:
    return BatchBuilder(PageBuffer(GEOMETRY, torch.float32, torch.device("cpu")))


SEQUENCES = {
    SequenceId(0): sequence(0, range(100, 120), None),
    SequenceId(1): sequence(1, range(200, 205), A),
    SequenceId(2): sequence(2, range(300, 340), A),
    SequenceId(3): sequence(3, range(400, 403), B),
}


def test_rows_are_the_planned_tokens_and_positions() -> None:
    plan = make_plan([chunk(0, 19, 1, None, pages(3, 9)), chunk(2, 4, 3, None, pages(5), samples=False)])
    batch = make_builder().build(plan, SEQUENCES, {})
    assert batch.token_ids.tolist() == [119, 304, 305, 306]
    assert batch.kv.row_pos.tolist() == [19, 4, 5, 6]
    assert batch.kv.row_seq.tolist() == [0, 1, 1, 1]
    assert batch.kv.seq_start.tolist() == [0, 1, 4]
    assert batch.kv.page_table.tolist() == [[3, 9], [5, 0]]
    assert batch.logit_rows.tolist() == [0]
    assert batch.lora is None


def test_step_that_samples_nothing_wants_no_logits() -> None:
    batch = make_builder().build(make_plan([chunk(2, 0, 8, None, pages(1), samples=False)]), SEQUENCES, {})
    assert batch.logit_rows.shape == (0,)


def test_segments_follow_the_adapters() -> None:
    chunks = [
        chunk(0, 19, 1, None, pages(0, 1)),
        chunk(1, 0, 5, A, pages(2)),
        chunk(2, 39, 1, A, pages(3, 4, 5)),
        chunk(3, 1, 2, B, pages(6)),
    ]
    plan = make_plan(chunks, [(A, pages(7, 8)), (B, pages(10, 9))])
    lora = make_builder().build(plan, SEQUENCES, {A: packed(3), B: packed(1)}).lora
    assert lora is not None
    assert lora.seg_slot.tolist() == [-1, 0, 1]
    assert lora.seg_start.tolist() == [0, 1, 7, 9]
    assert lora.chunk_start.tolist() == [[0, 0, 3, 3], [3, 3, 4, 4]]
    assert lora.chunk_rank.tolist() == [1, 2, 3, 1]
    page = GEOMETRY.page_elems
    assert lora.chunk_a.tolist() == [7 * page, 7 * page + 10, 7 * page + 20, 10 * page]
    assert lora.chunk_b.tolist() == [8 * page + 5, 8 * page + 15, 8 * page + 25, 9 * page + 5]
    assert lora.scale.tolist() == [[0, 1.5, 0], [0, 0.5, 0]]
    types = {lora.chunk_a.dtype, lora.chunk_b.dtype}
    assert types == {torch.int64}
    assert {lora.seg_start.dtype, lora.seg_slot.dtype, lora.chunk_start.dtype, lora.chunk_rank.dtype} == {torch.int32}


def test_tables_are_kept_for_the_same_mix_and_renewed_when_pages_move() -> None:
    builder, known = make_builder(), {A: packed(3), B: packed(1)}

    def tables(*adapters: tuple[AdapterDigest, tuple[PageId, ...]]) -> torch.Tensor:
        chunks = [chunk(1, 4, 1, digest, pages(0)) for digest, _ in adapters]
        lora = builder.build(make_plan(chunks, adapters), SEQUENCES, known).lora
        assert lora is not None
        return lora.chunk_a

    first = tables((A, pages(7, 8)))
    assert tables((A, pages(7, 8))) is first
    moved = tables((A, pages(8, 7)))
    assert moved.tolist() != first.tolist()
    assert tables((B, pages(8, 7))).tolist() != moved.tolist()
    assert len(tables((A, pages(8, 7)), (B, pages(1, 2)))) == 4


def test_filling_pages_changes_those_only() -> None:
    buffer = PageBuffer(GEOMETRY, torch.float32, torch.device("cpu"))
    buffer.flat.fill_(-1)
    image = packed(1).image
    buffer.fill(pages(9, 2), image)
    assert torch.equal(buffer.rows[9], image[0])
    assert torch.equal(buffer.rows[2], image[1])
    others = [page for page in range(12) if page not in (9, 2)]
    assert bool((buffer.rows[others] == -1).all())


def test_filling_copies_runs_that_are_neighbours_on_both_sides() -> None:
    buffer = PageBuffer(GEOMETRY, torch.float32, torch.device("cpu"))
    rows = torch.arange(float(6 * GEOMETRY.page_elems)).view(6, -1)
    to = pages(3, 4, 5, 9, 1, 2)
    for lengths in ((6,), (2, 4), (1, 1, 1, 1, 1, 1), (4, 2)):
        buffer.flat.fill_(-1)
        buffer.fill(to, HostPages(torch.split(rows, list(lengths))))
        assert torch.equal(buffer.rows[list(to)], rows)
        others = [page for page in range(12) if page not in to]
        assert bool((buffer.rows[others] == -1).all())


def test_flat_and_key_value_views_share_memory() -> None:
    buffer = PageBuffer(GEOMETRY, torch.float32, torch.device("cpu"))
    buffer.kv[3, 1, 0, 15, 0, 2] = 5.0
    assert float(buffer.rows[3].sum()) == 5.0
    assert buffer.kv.shape == (12, 2, 2, 16, 1, 4)
    assert buffer.flat.numel() == 12 * GEOMETRY.page_elems
