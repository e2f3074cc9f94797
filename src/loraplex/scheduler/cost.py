"""What a step costs: milliseconds as a function of its tokens, the KV it reads and the ranks of its adapters.

step_ms = max(fixed_ms, token_ms * tokens) + kv_token_ms * KV tokens + rank_ms * sum of distinct ranks. Reading the
weights takes `fixed_ms` however few tokens there are; beyond a number of tokens arithmetic takes longer.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, fields

MIN_SAMPLES = 32  # steps seen before a calibrated model is trusted
SOLVE_EVERY = 16
FORGET = 0.998  # weight of the step before; about 500 steps are remembered
LEAST_RANKS_SHARE = 0.1  # of a step without ranks: time that adapters get whatever the target
CLIP = 4.0  # typical residuals that a step may be off before it counts as this much off
_PRIOR = 1e-7  # weight of start values that were assumed; so little that a feature seen a few times overrules it
_MEASURED_WEIGHT = 0.1  # of those that were measured, in squares of the fixed time
_FALL, _RISE = 2.0, 4.0  # how far a coefficient may go from what was measured: steps that look alike tell little of it
_SIZE = 4
_ANY_TOKENS = 2**62


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step's time depends on. `sum_ranks`: of its distinct adapters."""

    num_tokens: int
    num_kv_tokens: int
    sum_ranks: float


@dataclass(frozen=True, slots=True)
class CostModel:
    """Coefficients, all in milliseconds."""

    fixed_ms: float
    token_ms: float
    kv_token_ms: float
    rank_ms: float

    def step_ms(self, shape: StepShape) -> float:
        """Time of a step."""
        dense = max(self.fixed_ms, self.token_ms * shape.num_tokens)
        return dense + self.kv_token_ms * shape.num_kv_tokens + self.rank_ms * shape.sum_ranks

    def max_ranks(self, target_ms: float, num_tokens: int, num_kv_tokens: int) -> float:
        """Sum of distinct ranks with which such a step takes `target_ms`.

        It is at least what makes the step a tenth longer than it is without: where the base alone misses the target,
        adapters one after another would wait for ever and help little.
        """
        without_ms = self.step_ms(StepShape(num_tokens, num_kv_tokens, 0.0))
        if self.rank_ms <= 0.0:
            return math.inf
        return max(target_ms - without_ms, LEAST_RANKS_SHARE * without_ms) / self.rank_ms

    def max_tokens(self, target_ms: float, num_kv_tokens: int, sum_ranks: float) -> int:
        """Tokens with which such a step takes `target_ms`; at least those that cost nothing beside the weights."""
        left_ms = target_ms - self.kv_token_ms * num_kv_tokens - self.rank_ms * sum_ranks
        return int(max(self.fixed_ms, left_ms) / self.token_ms) if self.token_ms > 0.0 else _ANY_TOKENS

    @property
    def tokens_per_rank(self) -> float:
        """Tokens whose arithmetic takes as long as one rank in one step."""
        return self.rank_ms / self.token_ms if self.token_ms > 0.0 else 0.0


H200_8B = CostModel(fixed_ms=3.49, token_ms=0.019, kv_token_ms=3.05e-5, rank_ms=1.22e-3)
"""Physical limits of Llama-3-8B in bfloat16 on one H200: 4.3 TB/s and 790 TFLOP/s, adapters of all projections."""


@dataclass(frozen=True, slots=True)
class _Prior:
    """How much a start value weighs, and between which multiples of it a coefficient stays."""

    weight: float
    least: float
    most: float

    def keep(self, value: float, start: float) -> float:
        """The value within the bounds; one of which nothing was known has none above."""
        return min(max(value, self.least * start), self.most * start if start > 0.0 else math.inf)


class Calibrator:
    """Fits a cost model to measured steps: least squares with forgetting, where outliers are clipped.

    A step counts for `fixed_ms` or for `token_ms`, whichever the model so far says it was bound by. A coefficient that
    the steps say nothing about keeps its start value; none is negative. One that was measured stays within half and
    four times of that: under a target steps have nearly the same ranks, and noise would decide what a rank costs.
    """

    __slots__ = ("_error_ms", "_gram", "_moment", "_prior", "_scale", "_start", "is_measured", "model", "num_samples")

    def __init__(self, start: CostModel = H200_8B, *, is_measured: bool = False, least: Collection[str] = ()) -> None:
        """`is_measured`: the start values are of this device and model, so they may be relied on at once.

        `least` names those of them that are only the least that could have been told from noise.
        """
        self.model = start
        self.is_measured = is_measured
        self.num_samples = 0
        self._start = _vector(start)
        self._scale = [1.0 / max(value, 1e-9) for value in self._start]  # of features, so that the prior weighs alike
        self._gram = [[0.0] * _SIZE for _ in range(_SIZE)]
        self._moment = [0.0] * _SIZE
        self._error_ms = 0.0
        measured = _Prior(_MEASURED_WEIGHT * start.fixed_ms**2, 1.0 / _FALL, _RISE)
        known = measured if is_measured else _Prior(_PRIOR, 0.0, math.inf)
        self._prior = [_Prior(_PRIOR, 1.0 / _FALL, math.inf) if one.name in least else known for one in fields(start)]

    @property
    def is_ready(self) -> bool:
        """Whether the model is of this device: measured, or enough steps were seen."""
        return self.is_measured or self.num_samples >= MIN_SAMPLES

    def add(self, shape: StepShape, step_ms: float) -> None:
        """Take a measured step into account."""
        if not (math.isfinite(step_ms) and step_ms > 0.0):
            return
        expected = self.model.step_ms(shape)
        off = step_ms - expected
        if self.num_samples >= MIN_SAMPLES:
            limit = CLIP * max(self._error_ms, 0.01 * expected)
            off = min(max(off, -limit), limit)
        self._error_ms += (0.05 if self.num_samples else 1.0) * (abs(off) - self._error_ms)
        self._book(shape, expected + off)
        self.num_samples += 1
        if self.num_samples % SOLVE_EVERY == 0:
            self.model = CostModel(*self._solve())

    def _book(self, shape: StepShape, step_ms: float) -> None:
        is_fixed = self.model.fixed_ms >= self.model.token_ms * shape.num_tokens
        raw = (float(is_fixed), 0.0 if is_fixed else shape.num_tokens, shape.num_kv_tokens, shape.sum_ranks)
        row = [value / scale for value, scale in zip(raw, self._scale, strict=True)]
        for i in range(_SIZE):
            self._moment[i] = FORGET * self._moment[i] + row[i] * step_ms
            for j in range(_SIZE):
                self._gram[i][j] = FORGET * self._gram[i][j] + row[i] * row[j]

    def _solve(self) -> list[float]:
        """Coefficients within their bounds that fit best: those beyond are put on them, and the others fitted again."""
        start = [value * scale for value, scale in zip(self._start, self._scale, strict=True)]
        prior = self._prior
        bound: dict[int, float] = {}  # coefficients that are on a bound, in the scale of the features
        while len(bound) < _SIZE:
            free = [i for i in range(_SIZE) if i not in bound]
            gram = [[self._gram[i][j] + (prior[i].weight if i == j else 0.0) for j in free] for i in free]
            rest = [sum(self._gram[i][j] * value for j, value in bound.items()) for i in free]
            moment = [self._moment[i] + prior[i].weight * start[i] - rest[k] for k, i in enumerate(free)]
            found = dict(zip(free, _solve_linear(gram, moment), strict=True))
            kept = {i: prior[i].keep(x, start[i]) for i, x in found.items()}
            beyond = {i: x for i, x in kept.items() if x != found[i]}
            if not beyond:
                bound |= found
                break
            bound |= beyond
        return [bound[i] / self._scale[i] for i in range(_SIZE)]


def _vector(model: CostModel) -> list[float]:
    return [model.fixed_ms, model.token_ms, model.kv_token_ms, model.rank_ms]


def _solve_linear(matrix: list[list[float]], right: list[float]) -> list[float]:
    """x of matrix x = right, by elimination. The matrix is symmetric and positive definite."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for i in range(size):
        for j in range(i + 1, size):
            factor = rows[j][i] / rows[i][i]
            for k in range(i, size + 1):
                rows[j][k] -= factor * rows[i][k]
    x = [0.0] * size
    for i in reversed(range(size)):
        x[i] = (rows[i][size] - sum(rows[i][k] * x[k] for k in range(i + 1, size))) / rows[i][i]
    return x
