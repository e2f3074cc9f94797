"""Sizes that CUDA graphs are captured for."""

_ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256)
_PROGRAM_BUCKETS = (8, 16, 32, 64, 128)  # programs along a work list; the last serves longer lists too


def row_buckets(max_seqs: int) -> list[int]:
    """Rows of the graphs to capture for steps of up to `max_seqs` sequences."""
    step = _ROW_BUCKETS[-1] - _ROW_BUCKETS[-2]
    buckets = [*_ROW_BUCKETS, *range(_ROW_BUCKETS[-1] + step, max_seqs + step, step)]
    return [rows for rows in buckets if rows < max_seqs] + [max_seqs]


def program_buckets(max_rows: int) -> list[int]:
    """Programs along a work list of the graphs to capture for `max_rows` rows, beside those without adapters."""
    return [count for i, count in enumerate(_PROGRAM_BUCKETS) if i == 0 or _PROGRAM_BUCKETS[i - 1] < max_rows]
