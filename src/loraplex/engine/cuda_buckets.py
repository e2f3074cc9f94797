"""Sizes that CUDA graphs are captured for."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

_ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256)
_PROGRAM_BUCKETS = (8, 16, 32, 64, 128)  # programs along a work list; the last serves longer lists too
_SEVERAL_PROGRAMS = ((13, 13), (31, 40), (61, 130), (127, 400), (251, 0))  # primes, and the longest list for each


def row_buckets(max_seqs: int) -> list[int]:
    """Rows of the graphs to capture for steps of up to `max_seqs` sequences."""
    step = _ROW_BUCKETS[-1] - _ROW_BUCKETS[-2]
    buckets = [*_ROW_BUCKETS, *range(_ROW_BUCKETS[-1] + step, max_seqs + step, step)]
    return [rows for rows in buckets if rows < max_seqs] + [max_seqs]


def program_buckets(max_rows: int) -> list[int]:
    """Programs along a work list of the graphs to capture for `max_rows` rows, beside those without adapters."""
    return [count for i, count in enumerate(_PROGRAM_BUCKETS) if i == 0 or _PROGRAM_BUCKETS[i - 1] < max_rows]


@dataclass(frozen=True, slots=True)
class GraphKey:
    """What a graph is captured for. `programs` 0 has no adapters; `several`: adapters of several chunks of ranks."""

    rows: int
    programs: int = 0
    several: bool = False


def several_buckets(max_rows: int) -> list[int]:
    """Programs of the graphs to capture where adapters have several chunks of ranks.

    Expand works at the first item of a block only: a prime number of programs deals those out evenly, however many
    items they stand apart. More than the rows are for lists as long as several chunks make them.
    """
    most = 2 * program_buckets(max_rows)[-1]
    return [count for count, _ in _SEVERAL_PROGRAMS if most / 8 < count < most]


def _several(rows: int, longest: int) -> GraphKey:
    """The graph for lists of up to `longest` items of adapters of several chunks."""
    wanted = next((count for count, limit in _SEVERAL_PROGRAMS if longest <= limit), _SEVERAL_PROGRAMS[-1][0])
    buckets = several_buckets(rows)
    return GraphKey(rows, buckets[min(bisect_left(buckets, wanted), len(buckets) - 1)], several=True)


def graph_keys(buckets: Sequence[int]) -> list[GraphKey]:
    """Every graph to capture, largest first."""
    return [
        key
        for rows in reversed(buckets)
        for key in (
            *(GraphKey(rows, programs, several=True) for programs in reversed(several_buckets(rows))),
            *(GraphKey(rows, programs) for programs in reversed(program_buckets(rows))),
            GraphKey(rows),
        )
    ]


def find_key(rows: int, longest: int, several: bool) -> GraphKey:
    """The graph for a bucket of `rows` rows, and lists of up to `longest` items; 0 is a step without adapters."""
    if not longest:
        return GraphKey(rows)
    if several:
        return _several(rows, longest)
    programs = program_buckets(rows)
    return GraphKey(rows, programs[min(bisect_left(programs, longest), len(programs) - 1)])
