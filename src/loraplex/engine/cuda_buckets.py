"""Sizes that CUDA graphs are captured for."""

from bisect import bisect_left
from dataclasses import dataclass

_ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256)
_MIXED_ROWS = (96, 128, 192, 256, 320, 384, 448, 512)  # of steps with prompts, beyond the most sequences
_PROGRAM_BUCKETS = (8, 16, 32, 64, 128)  # programs along a work list; the last serves longer lists too
_SEVERAL_PROGRAMS = ((13, 13), (31, 40), (61, 130), (127, 400), (251, 0))  # primes, and the longest list for each


def _decode_rows(max_seqs: int) -> list[int]:
    step = _ROW_BUCKETS[-1] - _ROW_BUCKETS[-2]
    buckets = [*_ROW_BUCKETS, *range(_ROW_BUCKETS[-1] + step, max_seqs + step, step)]
    return [rows for rows in buckets if rows < max_seqs] + [max_seqs]


def choose_programs(longest: int, *, several: bool) -> int:
    """Programs along a list of `longest` items: the best there is a number for."""
    if several:
        return next((count for count, limit in _SEVERAL_PROGRAMS if longest <= limit), _SEVERAL_PROGRAMS[-1][0])
    return next((count for count in _PROGRAM_BUCKETS if longest <= count), _PROGRAM_BUCKETS[-1])


@dataclass(frozen=True, slots=True)
class GraphKey:
    """What a graph is captured for. `programs` 0 has no adapters; `several`: adapters of several chunks of ranks."""

    rows: int
    programs: int = 0
    several: bool = False


class GraphBuckets:
    """The graphs of an engine: up to `max_seqs` rows for any step, beyond for steps with prompts too.

    Where a step has at most `max_seqs` rows, every row may draw; beyond, as many as there are sequences.
    """

    __slots__ = ("_rows", "max_seqs")

    def __init__(self, max_seqs: int, max_rows: int) -> None:
        """`max_rows`: of any step."""
        self.max_seqs = max_seqs
        self._rows = [*_decode_rows(max_seqs), *(rows for rows in _MIXED_ROWS if max_seqs < rows <= max_rows)]

    @property
    def max_rows(self) -> int:
        """Most rows that there is a graph for."""
        return self._rows[-1]

    def rows(self, num_rows: int) -> int:
        """Rows of the graph for a step of `num_rows` rows."""
        return self._rows[bisect_left(self._rows, num_rows)]

    def programs(self, rows: int) -> list[int]:
        """Programs along a work list of the graphs for `rows` rows, beside those without adapters."""
        if rows > self.max_seqs:
            return [_PROGRAM_BUCKETS[-1]]
        return [count for i, count in enumerate(_PROGRAM_BUCKETS) if i == 0 or _PROGRAM_BUCKETS[i - 1] < rows]

    def several(self, rows: int) -> list[int]:
        """The same where adapters have several chunks of ranks.

        Expand works at the first item of a block only: a prime number of programs deals those out evenly, however
        many items they stand apart. More than the rows are for lists as long as several chunks make them.
        """
        most = 2 * self.programs(rows)[-1]
        least = most / 4 if rows > self.max_seqs else most / 8
        return [count for count, _ in _SEVERAL_PROGRAMS if least < count < most]

    def keys(self) -> list[GraphKey]:
        """Every graph to capture, largest first."""
        return [
            key
            for rows in reversed(self._rows)
            for key in (
                *(GraphKey(rows, programs, several=True) for programs in reversed(self.several(rows))),
                *(GraphKey(rows, programs) for programs in reversed(self.programs(rows))),
                GraphKey(rows),
            )
        ]

    def find(self, num_rows: int, longest: int, *, several: bool) -> GraphKey:
        """The graph for `num_rows` rows, and lists of up to `longest` items; 0 is a step without adapters."""
        rows = self.rows(num_rows)
        if not longest:
            return GraphKey(rows)
        buckets = self.several(rows) if several else self.programs(rows)
        wanted = choose_programs(longest, several=several)
        return GraphKey(rows, buckets[min(bisect_left(buckets, wanted), len(buckets) - 1)], several)
