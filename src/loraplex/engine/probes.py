"""Probe prompts: sequences with fixed tokens that the engine runs like any request, and whose logits are kept.

The tokens after a prompt are given too and replace what the engine draws, so that every run, with or without an
adapter, computes the same positions: the last of the prompt from its prefill, the others by decoding.
"""

import random
import threading
from collections.abc import Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from loraplex.core import AdapterDigest, AdapterRef, Request, RequestId, SamplingParams

PROMPT_LENGTHS = (1, 6, 15, 17, 33, 70)  # within a page, at its end, over it, and several pages
ANSWER_LENGTH = 6  # positions compared of each probe
_SEED = 20_260_731


@dataclass(frozen=True, slots=True)
class Probe:
    """A prompt and the tokens that follow it, whatever the engine draws."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def computed(self) -> tuple[int, ...]:
        """The tokens that are fed to the model: the last of the answer is none of them."""
        return self.prompt + self.answer[:-1]


def make_probes(vocab_size: int, special: Set[int], max_tokens: int) -> tuple[Probe, ...]:
    """The same probes for every base with this vocabulary, cut to sequences of `max_tokens`, which is at least 2.

    Tokens are drawn uniformly, with a fixed seed, from those that are not special.
    """
    draw = random.Random(_SEED)
    plain = [token for token in range(vocab_size) if token not in special] or list(range(vocab_size))
    longest = [tuple(draw.choices(plain, k=length + ANSWER_LENGTH)) for length in PROMPT_LENGTHS]
    answer_len = min(ANSWER_LENGTH, max_tokens - 1)
    probes = []
    for length, tokens in zip(PROMPT_LENGTHS, longest, strict=True):
        prompt_len = min(length, max_tokens - answer_len)
        probes.append(Probe(tokens[:prompt_len], tokens[prompt_len : prompt_len + answer_len]))
    return tuple(probes)


class ProbeRun:
    """Probes on their way through the engine. `done` is set when the last one has ended."""

    def __init__(self, probes: Sequence[Probe]) -> None:
        self.done = threading.Event()
        self._rows: list[list[Tensor]] = [[] for _ in probes]
        self._num_open = len(probes)
        self._is_finite = True

    def take(self, index: int, logits: Tensor) -> None:
        """Keep the logits [vocab] of the next position of probe `index`."""
        self._rows[index].append(logits.to("cpu", copy=True))

    def end(self, *, is_finite: bool) -> None:
        """One probe has ended; not `is_finite` if the engine stopped it for what it computed."""
        self._is_finite &= is_finite
        self._num_open -= 1
        if not self._num_open:
            self.done.set()

    def logits(self) -> Tensor | None:
        """Logits [positions, vocab] float32 on the host, probe by probe; None if any had no finite maximum."""
        assert self.done.is_set(), "the probes are still running"
        return torch.stack([row for rows in self._rows for row in rows]) if self._is_finite else None


@dataclass(frozen=True, slots=True)
class _Running:
    run: ProbeRun
    index: int
    probe: Probe


class ProbeBook:
    """The probes that an engine runs, by request. Used by the thread that steps."""

    def __init__(self) -> None:
        self._running: dict[RequestId, _Running] = {}
        self._count = 0

    def __bool__(self) -> bool:
        return bool(self._running)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._running

    def add(self, run: ProbeRun, index: int, probe: Probe, digest: AdapterDigest | None) -> Request:
        """Book a probe; the request to queue for it."""
        self._count += 1
        request_id = RequestId(f"probe {self._count}")  # no client's id has a space
        self._running[request_id] = _Running(run, index, probe)
        adapter = None if digest is None else AdapterRef("probe", 0, digest)
        params = SamplingParams(max_tokens=len(probe.answer), temperature=0.0, ignore_eos=True)
        return Request(request_id, probe.prompt, params, adapter)

    def observe(self, request_id: RequestId, logits: Tensor) -> None:
        """Keep a row of logits if it is a probe's."""
        running = self._running.get(request_id)
        if running is not None:
            running.run.take(running.index, logits)

    def token(self, request_id: RequestId, position: int, drawn: int) -> int:
        """What stands at a position of the answer: the probe's own token, else what was drawn."""
        running = self._running.get(request_id)
        return drawn if running is None else running.probe.answer[position]

    def end(self, request_id: RequestId, *, is_finite: bool) -> None:
        """A request has ended."""
        running = self._running.pop(request_id, None)
        if running is not None:
            running.run.end(is_finite=is_finite)
