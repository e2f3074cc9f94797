"""From logits to the next token. Rows share passes over the vocabulary, but no draw depends on its neighbours.

Log probabilities are read from the unmodified logits. Then the order is: logit bias, penalties, forbidden end tokens,
temperature, min-p, top-k, top-p, draw.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loraplex.core import SamplingParams

_MASK64 = 2**64 - 1
_MIN_TEMPERATURE = 1e-5
_BLOCK = 256  # a draw looks at the sums of blocks of this many tokens, then at the tokens of one block
_FLOORS = (1e-2, 1e-3, 1e-4, 1e-6, 0.0)  # weights, the likeliest being 1, above which top-p's tokens are looked for
_ROUNDING = 1e-12
_BELOW_ONE = 1 - 2.0**-52  # times any x, this still stays below x

Filter = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""Sets to 0 the weights [rows, width] that min-p (float32), top-k (int32, 0 is none) and top-p (float32) exclude."""


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
def sample(logits: Tensor, rows: Sequence[SamplingRow], keep: Filter | None = None) -> list[Sampled]:
    """Draw one token a row. logits [num_rows, vocab] float32; changed in place where a row has penalties or biases.

    With `keep`, random rows are drawn as `draw_on_device` draws them.
    """
    if not rows:
        return []
    asking = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    logprobs = _pick(logits, asking).log_softmax(-1) if asking else None
    for i, row in enumerate(rows):
        _adjust(logits[i], row)
    if any(row.params.greedy for row in rows):
        best, likeliest = logits.max(-1)
        tokens: list[int] = likeliest.tolist()
    else:
        best, tokens = logits.amax(-1), [0] * len(rows)  # a tenth of the time of `max`
    is_finite: list[bool] = torch.isfinite(best).tolist()
    drawing = [i for i, row in enumerate(rows) if not row.params.greedy and is_finite[i]]
    if drawing:
        wanted = [rows[i] for i in drawing]
        shaped = (_pick(logits, drawing), _pick(best, drawing))
        found = _draw(*shaped, wanted) if keep is None else draw_on_device(*shaped, wanted, keep).tolist()
        for i, token in zip(drawing, found, strict=True):
            tokens[i] = token
    drawn = [Sampled(token, is_finite=finite) for token, finite in zip(tokens, is_finite, strict=True)]
    if logprobs is not None:
        num_tops = [rows[i].params.logprobs or 0 for i in asking]
        described = _describe(logprobs, [tokens[i] for i in asking], num_tops)
        for i, one in zip(asking, described, strict=True):
            if drawn[i].is_finite:
                drawn[i] = one
    return drawn


def _pick(values: Tensor, rows: list[int]) -> Tensor:
    """Some rows of `values`, without a copy where that is all of them."""
    return values if len(rows) == values.shape[0] else values[rows]


def _describe(logprobs: Tensor, tokens: list[int], num_tops: list[int]) -> list[Sampled]:
    """Tokens with their log probability and those of the likeliest, each row as many as it asks for. [rows, vocab]."""
    at = torch.tensor(tokens).to(logprobs.device)[:, None]
    values, ids = logprobs.topk(min(max(num_tops), logprobs.shape[1]))
    own, likeliest = logprobs.gather(1, at)[:, 0].tolist(), zip(ids.tolist(), values.tolist(), strict=True)
    return [
        Sampled(token, logprob, tuple(zip(top[:num], of_top[:num], strict=True)))
        for token, logprob, (top, of_top), num in zip(tokens, own, likeliest, num_tops, strict=True)
    ]


def _numbers(values: list[float], like: Tensor) -> Tensor:
    """Numbers [len] in the dtype and on the device of `like`; does not wait for the device."""
    return torch.tensor(values, dtype=like.dtype).to(like.device, non_blocking=True)


def _as_tensor(ids: Sequence[int], device: torch.device) -> Tensor:
    """Token ids [len] int64; eight times as fast as `torch.tensor` for a list of 2,000. At least one id."""
    return torch.frombuffer(array("q", ids), dtype=torch.int64).to(device)


def _adjust(logits: Tensor, row: SamplingRow) -> None:
    """Biases, penalties and forbidden tokens, in place. logits [vocab]."""
    params = row.params
    if params.logit_bias:
        ids, values = zip(*params.logit_bias, strict=True)
        logits.index_add_(0, _as_tensor(ids, logits.device), logits.new_tensor(values))
    if params.repetition_penalty != 1.0:
        seen = _as_tensor(row.token_ids, logits.device)  # a token that stands twice gets the same value twice
        found, penalty = logits[seen], params.repetition_penalty
        logits[seen] = torch.where(found > 0, found / penalty, found * penalty)
    if params.presence_penalty or params.frequency_penalty:
        output = row.token_ids[row.prompt_len :]
        if output:
            used, counts = torch.unique(_as_tensor(output, logits.device), return_counts=True)
            logits[used] -= params.presence_penalty + params.frequency_penalty * counts
    if row.forbidden:
        logits[_as_tensor(sorted(row.forbidden), logits.device)] = float("-inf")


def _draw(logits: Tensor, best: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """Draw from the shaped distributions by inverting their sums at one uniform number a row.

    logits [num_rows, vocab]; best [num_rows], their finite maxima.
    """
    vocab = logits.shape[1]
    weights = _weights(logits, best, [row.params.temperature for row in rows])
    uniforms = [_uniform(row.seed, len(row.token_ids)) for row in rows]
    sums = _block_sums(weights)
    tokens: list[int] = _draw_from_all(weights, sums, uniforms).tolist()
    for i in _outside(weights, vocab, sums[:, -1], tokens, [row.params for row in rows]):
        row = rows[i]
        ids = _kept_ids(logits[i], weights[i, :vocab], float(sums[i, -1]), row.params)
        # A draw that was refused leaves its uniform number on one side; what is drawn instead needs a fresh one.
        uniform = _uniform(_mix(row.seed, -1), len(row.token_ids))
        tokens[i] = int(ids[_invert(weights[i, ids].double().cumsum(-1), uniform)])
    return tokens


def _outside(
    weights: Tensor, vocab: int, totals: Tensor, tokens: list[int], params: Sequence[SamplingParams]
) -> list[int]:
    """Rows whose token, drawn from all, the filters exclude or may exclude; the others' tokens stand.

    Keeping a draw that lies within the filters, and else drawing among what they leave, gives exactly their
    distribution, and spares most rows with top-p alone the sort. weights as from `_weights`; totals [num_rows].
    """
    has_top_k = [0 < one.top_k < vocab for one in params]
    nucleus = [i for i, p in enumerate(params) if p.top_p < 1.0 and p.min_p <= 0.0 and not has_top_k[i]]
    outside = [i for i, p in enumerate(params) if has_top_k[i] or p.min_p > 0.0]
    if nucleus:
        limit = totals.new_tensor([params[i].top_p * (1 - _ROUNDING) for i in nucleus]) * _pick(totals, nucleus)
        drawn = torch.tensor([tokens[i] for i in nucleus], device=weights.device)[:, None]
        is_kept = _mass_before(_pick(weights, nucleus), drawn) < limit
        outside += [i for i, kept in zip(nucleus, is_kept.tolist(), strict=True) if not kept]
    return outside


def _mass_before(weights: Tensor, drawn: Tensor) -> Tensor:
    """Weight of the tokens likelier than the one drawn, or as likely and of a lower id, [num_rows].

    weights as from `_weights`; drawn [num_rows, 1].
    """
    own = weights.gather(-1, drawn)
    is_before = (weights == own) & (torch.arange(weights.shape[1], device=weights.device) < drawn)
    return _block_sums(torch.where(is_before | (weights > own), weights, 0.0))[:, -1]


def _weights(logits: Tensor, best: Tensor, temperatures: list[float]) -> Tensor:
    """exp((logits - best) / temperature), float32 [num_rows, vocab padded with zeros to whole blocks].

    Whole blocks also put every row at the same alignment, so that its values do not depend on how many stand before it.
    """
    num_rows, vocab = logits.shape
    weights = logits.new_zeros(num_rows, -(-vocab // _BLOCK) * _BLOCK)
    scale = _numbers([max(temperature, _MIN_TEMPERATURE) for temperature in temperatures], logits)
    used = weights[:, :vocab]
    torch.sub(logits, best[:, None], out=used)
    used.div_(scale[:, None]).exp_()
    return weights


def _block_sums(weights: Tensor) -> Tensor:
    """Sums of the blocks up to each one, float64 [num_rows, num_blocks].

    The order of additions is the same however many rows there are; that of one sum over the vocabulary is not.
    """
    return weights.view(weights.shape[0], -1, _BLOCK).sum(-1).double().cumsum(-1)


def needs_host(params: SamplingParams, num_output: int) -> bool:
    """Whether the draw after `num_output` tokens needs the host: the tokens so far, or words of its own for each."""
    return (
        params.logprobs is not None
        or bool(params.logit_bias)
        or params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
        or num_output + 1 < params.min_tokens  # end tokens are forbidden
    )


@torch.inference_mode()
def draw_on_device(logits: Tensor, best: Tensor, rows: Sequence[SamplingRow], keep: Filter) -> Tensor:
    """Tokens [num_rows] int64 of rows that are not greedy, without waiting for a device.

    logits [num_rows, vocab]; best [num_rows], their maxima; where one is not finite the token means nothing. `keep`
    applies the filters; a seed draws other tokens than `sample` does on the CPU, from the same distribution.
    """
    is_finite = torch.isfinite(best)
    best = torch.where(is_finite, best, 0.0)
    logits = torch.where(is_finite[:, None], logits, 0.0)
    weights = _weights(logits, best, [row.params.temperature for row in rows])
    params = [row.params for row in rows]
    if any(one.min_p > 0.0 or one.top_k > 0 or one.top_p < 1.0 for one in params):
        top_k = torch.tensor([max(one.top_k, 0) for one in params], dtype=torch.int32)
        keep(
            weights[:, : logits.shape[1]],
            _numbers([one.min_p for one in params], logits),
            top_k.to(logits.device, non_blocking=True),
            _numbers([one.top_p for one in params], logits),
        )
    tokens = _draw_from_all(weights, _block_sums(weights), [_uniform(row.seed, len(row.token_ids)) for row in rows])
    return tokens.clamp(0, logits.shape[1] - 1)


def _draw_from_all(weights: Tensor, sums: Tensor, uniforms: list[float]) -> Tensor:
    """A token a row by its weight [num_rows] int64: first its block, then the token in it.

    weights as from `_weights`; sums as from `_block_sums`.
    """
    target = _numbers(uniforms, sums)[:, None] * sums[:, -1:]
    block = torch.searchsorted(sums, target, right=True)  # [num_rows, 1]
    before = torch.where(block > 0, sums.gather(-1, (block - 1).clamp(min=0)), 0.0)
    share = ((target - before) / (sums.gather(-1, block) - before)).clamp(max=_BELOW_ONE)
    ids = block * _BLOCK + torch.arange(_BLOCK, device=weights.device)
    inner = weights.gather(-1, ids).double().cumsum(-1)
    found = torch.searchsorted(inner, share * inner[:, -1:], right=True)
    return ids.gather(-1, found).squeeze(-1)


def _invert(sums: Tensor, uniform: float) -> int:
    """The first index whose sum lies above `uniform` of the whole; never one without weight. sums [count] float64."""
    return int(torch.searchsorted(sums, uniform * sums[-1:], right=True))


def _kept_ids(logits: Tensor, weights: Tensor, total: float, params: SamplingParams) -> Tensor:
    """Ids that the filters leave. logits [vocab]; weights [vocab], the likeliest being 1; total, their sum.

    top-k keeps the k likeliest, min-p those of at least min_p times the likeliest, top-p the fewest of what is left
    whose renormalised sum reaches top_p. At least one stays. Only tokens that can stay are sorted.
    """
    is_top_k = 0 < params.top_k < logits.shape[0]
    if is_top_k:
        ids = logits.topk(params.top_k).indices
        ids = ids[weights[ids] >= params.min_p]
    elif params.min_p > 0.0:
        ids = (weights >= params.min_p).nonzero().squeeze(-1)
    else:
        ids = _ids_reaching(weights, params.top_p * total)
    if params.top_p >= 1.0:
        return ids
    ids = ids[logits[ids].argsort(descending=True, stable=True)]
    sums = weights[ids].double().cumsum(-1)
    mass = float(sums[-1]) if is_top_k or params.min_p > 0.0 else total
    return ids[: int((sums < params.top_p * mass * (1 - _ROUNDING)).sum()) + 1]


def _ids_reaching(weights: Tensor, mass: float) -> Tensor:
    """Ids of the likeliest tokens, unsorted, whose weights sum to `mass` or more; not many more than needed."""
    for floor in _FLOORS:
        ids = (weights >= floor).nonzero().squeeze(-1)
        if float(weights[ids].double().sum()) >= mass:
            break
    return ids


def _uniform(seed: int, position: int) -> float:
    """A number from 0 to _BELOW_ONE."""
    return (_mix(seed, position) >> 11) * 2.0**-52


def _mix(seed: int, position: int) -> int:
    """A well mixed 63-bit number from a seed and a position (splitmix64)."""
    z = (seed * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03 + 0x2545F4914F6CDD1D) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return (z ^ (z >> 31)) >> 1
