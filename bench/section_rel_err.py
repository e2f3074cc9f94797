"""Relative error of the engine's logits against float32, in batches whose mix of adapters changes from step to step."""

import argparse
import itertools
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine_runs import (
    PACKED_PER_RANK,
    Adapters,
    engine_settings,
    make_requests,
    say,
    shape_of,
    show_table,
    start_engine,
)
from float_reference import FloatReference, KnownSequence
from llama8b import Shape, make_adapter, make_base
from loraplex.adapters import Adapter
from loraplex.core import AdapterDigest, AdapterRef, Request, RequestOutput
from loraplex.engine import Engine

RANKS = (4, 8, 16, 32, 64, 128)
CUT_LAYERS = 4
NUM_REQUESTS, NUM_AT_ONCE = 24, 10
PROMPT_LENS, OUTPUT_LENS = (5, 40), (6, 20)


@dataclass
class Answer:
    """What the engine said to one request."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class MixedRun:
    """Answers, and how the mix changed under steps that only decode, which on a GPU replay graphs."""

    answers: list[Answer]
    num_decode_steps: int
    num_mixes: int  # distinct sets of running adapters in those
    num_changes: int  # decode steps whose mix is not that of the one before


def _requests(refs: Sequence[AdapterRef], vocab: int) -> list[Request]:
    """Base rows and adapters of every rank in random order, two requests for some adapters."""
    rng = random.Random(7)
    wanted: list[AdapterRef | None] = [*refs, *refs[::3]]
    wanted += [None] * max(1, NUM_REQUESTS - len(wanted))
    rng.shuffle(wanted)
    return [
        make_requests([ref], rng.randint(*PROMPT_LENS), rng.randint(*OUTPUT_LENS), vocab, seed=i)[0]
        for i, ref in enumerate(wanted)
    ]


def run_mixed(engine: Engine, requests: Sequence[Request]) -> MixedRun:
    """Keep NUM_AT_ONCE requests running until all have ended, and record every logits row that was drawn from."""
    answers = {request.request_id: Answer(request) for request in requests}
    waiting, running = list(requests), set[str]()
    mixes: list[tuple[tuple[str, ...], int]] = []
    engine._on_logits = lambda request_id, index, row: answers[request_id].logits.append(row)
    try:
        while waiting or engine.has_work:
            # Two at a time, so that several steps only decode between arrivals.
            while waiting and len(running) <= NUM_AT_ONCE - 2:
                for request in (waiting.pop(0) for _ in range(min(2, len(waiting)))):
                    engine.add_request(request, time.monotonic())
                    running.add(request.request_id)
            prompt_tokens = engine.stats().num_prompt_tokens
            for result in engine.step(time.monotonic()):
                assert isinstance(result, RequestOutput), result
                answers[result.request_id].tokens += [token for d in result.deltas for token in d.token_ids]
                if result.finished:
                    running.discard(result.request_id)
            stats = engine.stats()
            if stats.num_prompt_tokens == prompt_tokens and stats.num_running:
                mixes.append((stats.running_adapters, stats.num_running))
    finally:
        engine._on_logits = None
    if engine._decoder.device.type == "cuda":
        torch.cuda.synchronize()
    changes = sum(a != b for a, b in itertools.pairwise(mixes))
    return MixedRun(list(answers.values()), len(mixes), len(set(mixes)), changes)


def _errors(answer: Answer, exact: Tensor) -> list[float]:
    """||logits - exact|| / ||exact|| of every row."""
    rows = torch.stack(answer.logits[: len(answer.tokens)]).to(exact.device)
    return _relative(rows, exact)


def _relative(rows: Tensor, exact: Tensor) -> list[float]:
    values: list[float] = ((rows - exact).norm(dim=-1) / exact.norm(dim=-1)).tolist()
    return values


def compare(
    engine: Engine, directory: Path, shape: Shape, refs: Sequence[AdapterRef], made: dict[AdapterDigest, Adapter]
) -> dict[str, Any]:
    """Run the mixed batch and compare every drawn row with float32, and torch's own bfloat16 with float32."""
    run = run_mixed(engine, _requests(refs, shape.vocab))
    assert torch.get_float32_matmul_precision() == "highest", "a reference in TF32 is none"
    device = engine._decoder.device
    known = [
        KnownSequence(
            [*answer.request.prompt_token_ids, *answer.tokens[:-1]],
            len(answer.request.prompt_token_ids) - 1,
            made[answer.request.adapter.digest] if answer.request.adapter else None,
        )
        for answer in run.answers
    ]
    exact = FloatReference(directory, shape, device).logits(known)
    rounded = FloatReference(directory, shape, device, torch.bfloat16).logits(known)
    by_rank: dict[int, list[float]] = {}
    plain: list[float] = []
    same = count = 0
    for answer, one, bf16 in zip(run.answers, exact, rounded, strict=True):
        adapter = answer.request.adapter
        rank = made[adapter.digest].max_rank if adapter else 0
        by_rank.setdefault(rank, []).extend(_errors(answer, one))
        plain += _relative(bf16, one)
        same += int((one.argmax(-1).cpu() == torch.tensor(answer.tokens)).sum())
        count += len(answer.tokens)
    return {
        "max": max(error for errors in by_rank.values() for error in errors),
        "median": sorted(error for errors in by_rank.values() for error in errors)[count // 2],
        "max_base_rows": max(by_rank[0]),
        "max_by_rank": {str(rank): max(by_rank[rank]) for rank in sorted(by_rank)},
        "max_torch_bfloat16": max(plain),
        "median_torch_bfloat16": sorted(plain)[count // 2],
        "rows": count,
        "same_greedy_token": same / count,
        "layers": shape.layers,
        "decode_steps": run.num_decode_steps,
        "distinct_mixes": run.num_mixes,
        "mix_changes": run.num_changes,
    }


def _measure(engine: Engine, adapters: Adapters, directory: Path, shape: Shape) -> dict[str, Any]:
    made, refs = {}, []
    for rank in RANKS:
        for number, ref in enumerate(adapters.take(rank, PACKED_PER_RANK)):
            made[ref.digest] = make_adapter(engine.base.sites, rank, 1000 * rank + number, adapters.buffers)
            refs.append(ref)
    section = compare(engine, directory, shape, refs, made)
    torch_max = section["max_torch_bfloat16"]
    say(f"{shape.layers} layers: largest relative error {section['max']:.2e}, torch's bfloat16 {torch_max:.2e}")
    return section


def measure_rel_err(engine: Engine, adapters: Adapters, args: argparse.Namespace) -> dict[str, Any]:
    """With all layers."""
    return _measure(engine, adapters, args.base, shape_of(args))


def measure_rel_err_cut(engine: Engine, adapters: Adapters, args: argparse.Namespace) -> dict[str, Any]:
    """With the first few layers' worth of other random weights: rounding of one layer, less of what piles up."""
    shape = replace(shape_of(args), layers=min(CUT_LAYERS, shape_of(args).layers // 2 + 1))
    shape = replace(shape, name=f"{shape.name}-{shape.layers}-layers")
    with tempfile.TemporaryDirectory(dir=args.base.parent) as folder:
        make_base(Path(folder), shape)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        settings = engine_settings(args, kv_pages=4096, max_num_seqs=NUM_AT_ONCE, max_num_batched_tokens=512)
        cut, _ = start_engine(Path(folder), settings)
        return _measure(cut, Adapters(cut), Path(folder), shape)


def show_rel_err(section: dict[str, Any]) -> None:
    ranks = section["max_by_rank"]
    show_table(
        f"||logits - float32|| / ||float32||, {section['layers']} layers, {section['rows']} rows, "
        f"{section['mix_changes']} changes of mix in {section['decode_steps']} decode steps: largest",
        ("all", *(f"r{rank}" if int(rank) else "base" for rank in ranks), "median", "torch bf16", "same token"),
        [
            [
                f"{section['max']:.2e}",
                *(f"{error:.2e}" for error in ranks.values()),
                f"{section['median']:.2e}",
                f"{section['max_torch_bfloat16']:.2e}",
                f"{section['same_greedy_token']:.3f}",
            ]
        ],
    )
