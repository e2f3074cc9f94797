"""The tables that a step on CUDA is described with, on the CPU."""

from collections import Counter

import pytest
import torch

pytest.importorskip("triton")

from loraplex.core import PageId, SequenceId
from loraplex.engine.cuda_buckets import GraphBuckets
from loraplex.engine.cuda_tables import StepTables
from loraplex.scheduler import UNKNOWN_TOKEN, ScheduledChunk, Sequence, StepPlan
from tests.scheduler.helpers import make_request

PAGE_TOKENS = 4


def make_tables() -> StepTables:
    return StepTables(max_rows=32, max_seqs=6, num_listed=40, page_tokens=PAGE_TOKENS, device=torch.device("cpu"))


def chunk(seq: int, start: int, count: int, samples: bool, *pages: int) -> ScheduledChunk:
    leased = tuple(PageId(page) for page in pages)
    return ScheduledChunk(SequenceId(seq), start, count, samples, None, leased)


def sequence(seq: int, tokens: list[int]) -> Sequence:
    request = make_request(tokens)
    return Sequence(
        SequenceId(seq), request.request_id, request.params, None, 0, list(tokens), len(tokens), 99, frozenset(), 0.0
    )


def fill(tables: StepTables, pad: int = 0) -> StepPlan:
    """A prompt's chunk, a decode whose token nobody has seen, a decode whose token is known."""
    chunks = (
        chunk(0, 4, 3, True, 7, 3),
        chunk(1, 8, 1, True, 1, 2, 9),
        chunk(2, 2, 1, False, 5, 6),
    )
    plan = StepPlan(chunks, (), (), 0)
    sequences = {
        SequenceId(0): sequence(0, [10, 11, 12, 13, 14, 15, 16]),
        SequenceId(1): sequence(1, [*range(20, 28), UNKNOWN_TOKEN]),
        SequenceId(2): sequence(2, [30, 31, 32, 33]),
    }
    tables.fill(plan, sequences, {SequenceId(1): 5}, pad)
    tables.send(len(chunks) + pad)
    return plan


def read(tables: StepTables, name: str, size: int) -> list[int]:
    values: list[int] = tables.device(name, size).tolist()
    return values


def test_rows_follow_the_plan() -> None:
    tables = make_tables()
    fill(tables)
    assert read(tables, "tokens", 5) == [14, 15, 16, 0, 32]
    assert read(tables, "source", 5) == [-1, -1, -1, 5, -1]
    assert read(tables, "row_pos", 5) == [4, 5, 6, 8, 2]
    assert read(tables, "row_offset", 5) == [0, 1, 2, 0, 2]
    assert read(tables, "row_page", 5) == [3, 3, 3, 9, 5]
    assert read(tables, "logit_rows", 2) == [2, 3]
    assert tables.row_starts(3).tolist() == [0, 3, 4, 5]


def test_pages_are_those_that_hold_tokens() -> None:
    tables = make_tables()
    fill(tables)
    kv = tables.kv_pages(3)
    assert (kv.starts.tolist(), kv.last_len.tolist()) == ([0, 2, 5, 6], [3, 1, 3])
    assert kv.pages.tolist() == [7, 3, 1, 2, 9, 5]


def test_sequences_may_list_a_page_each() -> None:
    """Six sequences on one prefix list more pages than a pool of 20 has."""
    tables = make_tables()
    chunks = tuple(chunk(seq, 20, 1, True, 0, 1, 2, 3, 4, 5 + seq) for seq in range(6))
    sequences = {SequenceId(seq): sequence(seq, [*range(21)]) for seq in range(6)}
    tables.fill(StepPlan(chunks, (), (), 0), sequences, {}, 6 - len(chunks))
    tables.send(6)
    kv = tables.kv_pages(6)
    assert kv.starts.tolist() == [0, 6, 12, 18, 24, 30, 36]
    assert kv.pages[30:36].tolist() == [0, 1, 2, 3, 4, 10]


def test_padding_belongs_to_no_sequence() -> None:
    tables = make_tables()
    fill(tables, pad=2)
    assert read(tables, "row_page", 7)[5:] == [-1, -1]
    assert read(tables, "source", 7)[5:] == [-1, -1]
    kv = tables.kv_pages(5)
    assert (kv.starts.tolist(), kv.last_len.tolist()) == ([0, 2, 5, 6, 7, 8], [3, 1, 3, 1, 1])
    assert kv.pages.tolist() == [7, 3, 1, 2, 9, 5, 0, 0]


def test_pages_that_changed_are_seen() -> None:
    """A sequence may be given other pages, as many as before, after it was preempted."""
    tables = make_tables()
    sequences = {SequenceId(0): sequence(0, [1, 2, 3])}
    for pages in ((4,), (11,), (11, 12)):
        tables.fill(StepPlan((chunk(0, 2, 1, True, *pages),), (), (), 0), sequences, {}, 0)
        tables.send(1)
        assert read(tables, "row_page", 1) == [pages[0]]


def test_empty_step_stores_nothing() -> None:
    tables = make_tables()
    tables.fill_empty(3)
    tables.send(3)
    assert read(tables, "row_page", 3) == [-1, -1, -1]
    assert tables.kv_pages(3).starts.tolist() == [0, 1, 2, 3]


def test_rows_of_a_chunk_attend_up_to_themselves() -> None:
    tables = make_tables()
    fill(tables, pad=2)
    starts, lengths = tables.contexts(7)
    assert starts.tolist() == [0, 0, 0, 2, 5, 6, 7]
    assert lengths.tolist() == [5, 6, 7, 9, 3, 1, 1]


def test_draws_beyond_those_of_the_step_are_of_a_row_that_exists() -> None:
    tables = make_tables()
    tables.device("logit_rows").fill_(99)
    fill(tables)
    assert read(tables, "logit_rows", 6) == [2, 3, 0, 0, 0, 0]


@pytest.mark.parametrize("max_seqs", [1, 3, 8, 64, 100, 256, 300, 1000])
def test_every_number_of_rows_has_a_graph(max_seqs: int) -> None:
    buckets = GraphBuckets(max_seqs, 2048)
    assert buckets.max_rows == max(max_seqs, 512)
    assert buckets.rows(max_seqs) == max_seqs
    for rows in range(1, buckets.max_rows + 1):
        assert rows <= buckets.rows(rows) <= (max(rows * 2, 8) if rows <= max_seqs else max(rows * 2, 96))


@pytest.mark.parametrize(
    ("max_seqs", "budget", "most"), [(64, 2048, 512), (64, 200, 192), (32, 64, 32), (700, 2048, 700)]
)
def test_graphs_for_prompts_stay_within_the_token_budget(max_seqs: int, budget: int, most: int) -> None:
    assert GraphBuckets(max_seqs, budget).max_rows == most


def test_programs_grow_with_the_rows() -> None:
    buckets = GraphBuckets(256, 2048)
    assert [buckets.programs(rows) for rows in (1, 8, 9, 64, 256, 512)] == [
        [8],
        [8],
        [8, 16],
        [8, 16, 32, 64],
        [8, 16, 32, 64, 128],
        [128],
    ]


@pytest.mark.parametrize("rows", [1, 8, 64, 256, 512])
@pytest.mark.parametrize("chunks", [2, 3, 4, 5, 7, 8, 15, 16])
def test_blocks_of_several_chunks_are_dealt_out_evenly(rows: int, chunks: int) -> None:
    """Expand works at every block's first item; programs take every num_programs-th item."""
    programs = GraphBuckets(256, 2048).find(rows, rows * chunks, several=True).programs
    busy = Counter(first % programs for first in range(0, rows * chunks, chunks))
    assert max(busy.values()) <= -(-rows // programs) + 1


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("longest", [0, 1, 8, 9, 100, 1024])
def test_every_step_finds_a_graph_that_was_captured(longest: int, several: bool) -> None:
    buckets = GraphBuckets(100, 2048)
    keys = buckets.keys()
    assert len(set(keys)) == len(keys)
    for rows in range(1, buckets.max_rows + 1):
        key = buckets.find(rows, longest, several=several)
        assert key in keys
        assert (key.rows, key.programs > 0, key.several) == (buckets.rows(rows), longest > 0, several and longest > 0)
