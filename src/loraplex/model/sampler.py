"""From logits to the next token. Every row is handled on its own, so its draw never depends on its neighbours.

Log probabilities are read from the unmodified logits. Then the order is: logit bias, penalties, forbidden end tokens,
temperature, min-p, top-k, top-p, draw.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loraplex.core import SamplingParams

_MASK64 = 2**64 - 1
_CANDIDATES = 1024  # how many of the most likely tokens are tried before all are sorted


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What one row needs beside its logits. `seed` is fixed for a sequence; the draw depends on it and the position."""

    params: SamplingParams
    token_ids: Sequence[int]  # prompt, then output
    prompt_len: int
    seed: int
    forbidden: frozenset[int] = frozenset()  # end tokens before min_tokens are reached


@dataclass(frozen=True, slots=True)
class Sampled:
    """A drawn token. `logprob` and `top` (token, logprob; most likely first) are there when asked for.

    `is_finite` is false when the row's logits had no finite maximum; the token then means nothing.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    is_finite: bool = True


@torch.inference_mode()
def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> list[Sampled]:
    """Draw one token a row. logits [num_rows, vocab] float32; changed in place where a row has penalties or biases."""
    logprobs = [logits[i].log_softmax(-1) if row.params.logprobs is not None else None for i, row in enumerate(rows)]
    for i, row in enumerate(rows):
        _adjust(logits[i], row)
    best, tokens = logits.max(dim=-1)
    is_finite: list[bool] = torch.isfinite(best).tolist()
    chosen: list[int] = tokens.tolist()
    results = []
    for i, row in enumerate(rows):
        token = chosen[i] if row.params.greedy or not is_finite[i] else _draw(logits[i], row)
        results.append(_describe(token, is_finite[i], logprobs[i], row.params.logprobs or 0))
    return results


def _describe(token: int, is_finite: bool, logprobs: Tensor | None, num_top: int) -> Sampled:
    if logprobs is None or not is_finite:
        return Sampled(token, is_finite=is_finite)
    values, ids = logprobs.topk(min(num_top, logprobs.shape[0]))
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return Sampled(token, float(logprobs[token]), top)


def _adjust(logits: Tensor, row: SamplingRow) -> None:
    """Biases, penalties and forbidden tokens, in place. logits [vocab]."""
    params = row.params
    if params.logit_bias:
        ids, values = zip(*params.logit_bias, strict=True)
        logits.index_add_(0, torch.tensor(ids), torch.tensor(values, dtype=logits.dtype))
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(row.token_ids)))
        found, penalty = logits[seen], params.repetition_penalty
        logits[seen] = torch.where(found > 0, found / penalty, found * penalty)
    if params.presence_penalty or params.frequency_penalty:
        output = row.token_ids[row.prompt_len :]
        if output:
            used, counts = torch.unique(torch.tensor(output), return_counts=True)
            logits[used] -= params.presence_penalty + params.frequency_penalty * counts
    if row.forbidden:
        logits[torch.tensor(sorted(row.forbidden))] = float("-inf")


def _draw(logits: Tensor, row: SamplingRow) -> int:
    """Draw from the shaped distribution. logits [vocab], finite maximum."""
    scaled = logits / max(row.params.temperature, 1e-5)
    ids = _allowed(scaled, row.params)
    weights = (scaled if ids is None else scaled[ids]).double().softmax(-1)
    noise = torch.empty(logits.shape[0], dtype=torch.float64)
    noise.exponential_(generator=torch.Generator().manual_seed(_mix(row.seed, len(row.token_ids))))
    # The smallest exponential over weight is a draw from the weights (Gumbel's trick).
    race = (noise if ids is None else noise[ids]) / weights
    winner = int(race.argmin())
    return winner if ids is None else int(ids[winner])


def _allowed(scaled: Tensor, params: SamplingParams) -> Tensor | None:
    """Ids that min-p, top-k and top-p leave, or None for all. scaled [vocab]."""
    vocab = scaled.shape[0]
    top_k = params.top_k if 0 < params.top_k < vocab else vocab
    if top_k == vocab and params.top_p >= 1.0 and params.min_p <= 0.0:
        return None
    total = scaled.double().logsumexp(-1)
    for count in (min(_CANDIDATES, vocab), vocab):
        values, ids = scaled.topk(count)
        probabilities = (values.double() - total).exp()
        kept = _count_kept(probabilities, vocab, top_k, params)
        if kept is not None and (kept < count or count == vocab):
            return ids[:kept]
    return ids


def _count_kept(probabilities: Tensor, vocab: int, top_k: int, params: SamplingParams) -> int | None:
    """How many of the sorted probabilities stay; None if these are too few to tell.

    top-k keeps the k likeliest, min-p those of at least min_p times the likeliest, top-p the fewest of what is left
    whose renormalised sum reaches top_p. At least one stays.
    """
    count = probabilities.shape[0]
    kept = min(top_k, count)
    if params.min_p > 0.0:
        kept = min(kept, int((probabilities >= params.min_p * probabilities[0]).sum()))
    if params.top_p < 1.0:
        if kept < count or top_k <= count:  # the other filters keep none beyond these
            mass = probabilities[:kept].sum()
        elif top_k == vocab and params.min_p <= 0.0:
            mass = probabilities.new_tensor(1.0)
        else:
            return None
        reached = probabilities[:kept].cumsum(-1) >= params.top_p * mass - 1e-12
        if not bool(reached.any()):
            return None
        kept = int(reached.int().argmax()) + 1
    return max(kept, 1)


def _mix(seed: int, position: int) -> int:
    """A well mixed 63-bit number from a seed and a position (splitmix64)."""
    z = (seed * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03 + 0x2545F4914F6CDD1D) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return (z ^ (z >> 31)) >> 1
