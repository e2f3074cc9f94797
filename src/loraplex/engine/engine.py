"""The step loop: the scheduler and the pool meet the model. Synchronous and single-threaded; `now` is passed in."""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from loraplex.adapters import Adapter
from loraplex.core import (
    AdapterComparison,
    AdapterDigest,
    AdapterResidence,
    ConfigError,
    EngineStats,
    FinishReason,
    InvalidRequest,
    LoraplexError,
    NonFiniteOutput,
    Overloaded,
    OverloadReason,
    Request,
    RequestId,
    RequestOutput,
    SequenceId,
    ServedBy,
)
from loraplex.core.host_memory import Restored
from loraplex.engine.adapter_shelf import AdapterShelf, load_failed
from loraplex.engine.batch import PageBuffer
from loraplex.engine.calibration import calibrate
from loraplex.engine.figures import Counters, residences, snapshot
from loraplex.engine.host_arena import HostArena
from loraplex.engine.loading import LoadedBase, Progress
from loraplex.engine.loads import AdapterLoader
from loraplex.engine.outputs import OutputProcessor, RequestFailed, RequestState
from loraplex.engine.packed_files import PackedFiles
from loraplex.engine.packing import Allocate, PackedAdapter, pack_adapter
from loraplex.engine.probes import Probe, ProbeBook, ProbeRun
from loraplex.engine.queue_bounds import QueueBounds
from loraplex.engine.runner import EagerRunner, Runner, Step, StepInFlight
from loraplex.engine.site_check import SiteCheck
from loraplex.engine.verification import Verifier
from loraplex.model import Sampled, SamplingRow, needs_host
from loraplex.scheduler import Committed, Scheduler, Sequence, StepPlan

_LOAD_TICK_S = 2e-4

StepResult = RequestOutput | RequestFailed

LogitsObserver = Callable[[RequestId, int, Tensor], None]
"""Called with (request, sequence index, logits [vocab] float32) for every token drawn, before it is drawn."""


def _make_runner(base: LoadedBase, buffer: PageBuffer, progress: Progress | None) -> Runner:
    """What runs steps on the base's device; on a GPU, with every graph captured."""
    if not base.decoder.ops.in_graphs:
        return EagerRunner(base.decoder, buffer)
    from loraplex.engine.cuda_runner import CudaRunner
    from loraplex.kernels.gpu.attention import KernelsNotBuilt

    try:
        config = base.scheduler_config
        runner = CudaRunner(base.decoder, buffer, config.max_num_seqs, config.max_model_len)
        runner.capture(progress, in_graphs=not base.config.enforce_eager)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            "The GPU's memory ends before everything is captured; lower --gpu-memory-utilization, --memory or "
            "--kv-pages, or --max-num-seqs."
        ) from error
    except KernelsNotBuilt as error:
        raise ConfigError(
            f"{error} It needs nvcc at the first start (a CUDA toolkit; CUDA_HOME says where), or use --device cpu."
        ) from error
    return runner


@dataclass(frozen=True, slots=True)
class _Started:
    """A step that was launched, and for whom it draws."""

    plan: StepPlan
    drawing: tuple[SequenceId, ...]
    num_next: int  # of these, those that draw a token after their first
    in_flight: StepInFlight
    at_s: float  # of the host's clock


class Engine:
    """One base on one device with the adapters registered to it.

    What adds, restores, stores, retires, holds and releases adapters, `set_tenant_weight`, `check`, `stats` and
    `residency` may be called from any thread; the rest belongs to the thread that steps.
    """

    def __init__(
        self,
        base: LoadedBase,
        on_logits: LogitsObserver | None = None,
        progress: Progress | None = None,
        *,
        max_host_bytes: int | None = None,
        packed_files: PackedFiles | None = None,
    ) -> None:
        """`progress` is called while CUDA graphs are captured, with (graphs done, graphs in all).

        `max_host_bytes` bounds the host memory of adapters that were added; None: as much as there is.
        `packed_files` keeps them packed on disk, for `restore_adapter`.
        """
        self.base = base.description
        self.tokenizer = base.tokenizer
        self._decoder = base.decoder
        self._geometry = base.geometry
        self.scheduler = Scheduler(base.scheduler_config, base.geometry)
        self.queue_bounds = QueueBounds(self.scheduler, base.config.max_waiting, base.config.max_waiting_tokens)
        self._buffer = PageBuffer(base.geometry, base.decoder.dtype, base.decoder.device)
        self._runner = _make_runner(base, self._buffer, progress)
        self._started: _Started | None = None  # a step whose tokens nobody has seen yet
        self._outputs = OutputProcessor(base.tokenizer)
        self._requests: dict[RequestId, RequestState] = {}
        self._owner: dict[SequenceId, RequestState] = {}
        self._seeds: dict[SequenceId, int] = {}
        self._random = random.SystemRandom()
        self._counters = Counters()
        loader = AdapterLoader(self._runner, base.geometry.page_bytes)
        on_gpu, elems = base.decoder.device.type == "cuda", base.geometry.page_elems
        self.arena = HostArena(elems, base.decoder.dtype, max_bytes=max_host_bytes, pin_memory=on_gpu)
        self.shelf = AdapterShelf(self._pack, self.arena, self.scheduler, loader, self._counters, packed_files)
        self._collected_s = 0.0  # when the last step's results came
        self._on_logits = on_logits
        self._probes = ProbeBook()
        self._backlog: list[StepResult] = []  # of steps that a comparison made
        self._now = 0.0  # of the last step
        self.verifier = Verifier(self, base)
        self.on_layer: Callable[[], None] = lambda: None  # called before every layer of a step

    def calibrate(self) -> None:
        """Measure what steps and loads cost on this device. Before the first step, while nobody holds a page."""
        config, on_gpu = self.scheduler.config, self._decoder.device.type == "cuda"
        self.scheduler.costs = calibrate(self._runner, self._buffer, config, self.base.sites, on_gpu=on_gpu)
        self.scheduler.cache.page_s = 1e-3 * self._geometry.page_tokens * self.scheduler.costs.model.token_ms
        page_s = self._runner.copy_s(self._geometry.page_bytes) or config.reload.page_s
        self.scheduler.residency.cost = replace(config.reload, page_s=page_s)

    # ------------------------------------------------------------------ adapters
    def add_adapter(self, adapter: Adapter) -> None:
        """Pack an adapter and keep it in host memory, ready to be paged in.

        Raises AdapterRefused, and HostMemoryFull where others must go first.
        """
        self.shelf.add(adapter)

    def _pack(self, adapter: Adapter, allocate: Allocate) -> PackedAdapter:
        return pack_adapter(adapter, self.base.sites, self._geometry, allocate)

    def restore_adapter(self, digest: AdapterDigest) -> Restored | None:
        """As `add_adapter`, of what is here or from its packed file; None if there is none to use."""
        return self.shelf.restore(digest)

    def store_adapter(self, digest: AdapterDigest) -> None:
        """Keep an adapter that was added packed on disk, if the engine has a place for that. Blocks."""
        self.shelf.store(digest)

    def retire_adapter(self, digest: AdapterDigest, *, for_room: bool = False) -> None:
        """As `AdapterShelf.retire`."""
        self.shelf.retire(digest, for_room=for_room)

    def hold_adapter(self, adapter: Adapter) -> PackedAdapter:
        """Keep an adapter for a comparison until `release_adapter`; what is paged in. Raises AdapterRefused.

        One that was not added stays unknown to requests.
        """
        return self.shelf.hold(adapter)

    def release_adapter(self, digest: AdapterDigest) -> None:
        """Undo one `hold_adapter`. What nobody added meanwhile goes after the next step."""
        self.shelf.release(digest)

    def pin_adapter(self, digest: AdapterDigest) -> None:
        """Bring an adapter that was added into the pool and keep it there, used or not, until unpinned or retired.

        Raises ModelNotFound for one that was not added, InvalidRequest where too many pages would be pinned, and
        Overloaded while a request is here that could not end beside them.
        """
        self.shelf.pin(digest)

    def unpin_adapter(self, digest: AdapterDigest) -> None:
        """Let an adapter be evicted like others. One that is not pinned is ignored."""
        self.shelf.unpin(digest)

    def preload_adapter(self, digest: AdapterDigest, *, only_free: bool = False) -> None:
        """Bring an adapter that was added into the pool while nothing waits, if there is room; else it is dropped.

        `only_free`: in pages that hold nothing. Raises ModelNotFound for one that was not added.
        """
        self.shelf.preload(digest, only_free=only_free)

    def set_tenant_weight(self, tenant: str, weight: float) -> None:
        """A tenant of weight 2 is served twice as much as one of weight 1, which is every tenant's at first."""
        self.scheduler.shares.set_weight(tenant, weight)

    # ------------------------------------------------------------------ comparisons
    def compare(self, adapter: Adapter) -> AdapterComparison:
        """Compare what the engine computes with an adapter to a merged reference (`verification.py`). Steps meanwhile.

        The adapter need not have been added. Requests that run go on; the next `step` gives their outputs. Raises
        AdapterRefused if the adapter cannot be brought into the pool.
        """
        try:
            return self.verifier.compare(adapter, self._run_probes, lambda check: check())
        finally:
            self.shelf.sweep()

    def site_check(self, packed: PackedAdapter, adapter: Adapter) -> SiteCheck | None:
        """A look at what each linear adds; None where steps run in graphs, whose tables are the runner's."""
        if self._decoder.ops.in_graphs:
            return None
        return SiteCheck(self._decoder, self._geometry, packed, adapter, self.base.sites)

    def start_probes(self, probes: Iterable[Probe], adapter: Adapter | None) -> ProbeRun:
        """Queue probes on the base or on an adapter that is held."""
        wanted, digest = tuple(probes), None if adapter is None else adapter.digest
        run = ProbeRun(wanted)
        for index, probe in enumerate(wanted):
            self._add(self._probes.add(run, index, probe, digest), self._now)
        return run

    def _run_probes(self, probes: Iterable[Probe], adapter: Adapter | None) -> ProbeRun:
        run = self.start_probes(probes, adapter)
        while not run.done.is_set():
            self._backlog = self.step(self._now)  # with what was in it
        return run

    # ------------------------------------------------------------------ requests
    def check(self, request: Request) -> None:
        """Raise what `add_request` would: InvalidRequest, ContextTooLong, ModelNotFound, Overloaded.

        All but Overloaded for an adapter whose load has failed a moment ago.
        """
        vocab = self.base.vocab_size
        for token in request.prompt_token_ids:
            if not 0 <= token < vocab:
                raise InvalidRequest(f"prompt token {token} is outside the vocabulary of {vocab} tokens.", "prompt")
        request.params.check_vocabulary(vocab)
        digest = request.adapter.digest if request.adapter is not None else None
        num_pages = self.shelf.pages_of(request)
        self.scheduler.check_fits(len(request.prompt_token_ids), request.params.max_tokens, num_pages, digest)
        self.queue_bounds.check_request(request)

    def add_request(self, request: Request, now: float) -> None:
        """Queue a request. Raises what `check` raises; then nothing is queued."""
        self.check(request)
        if request.request_id in self._requests:
            raise InvalidRequest(f"request id {request.request_id!r} is already running.", "request_id")
        self.shelf.check_load(request, now)
        self._add(request, now)

    def _add(self, request: Request, now: float) -> None:
        packed = self.shelf.packed[request.adapter.digest] if request.adapter is not None else None
        added = self.scheduler.add(
            request,
            packed.num_pages if packed is not None else 0,
            self.tokenizer.eos_token_ids,
            now,
            adapter_rank=packed.rank(self.base.sites) if packed is not None else 0.0,
            may_share=request.request_id not in self._probes,
        )
        state = self._outputs.start(request, (seq.seq_id for seq in added))
        self._requests[request.request_id] = state
        first_seed = request.params.seed
        for index, seq in enumerate(added):
            self._owner[seq.seq_id] = state
            self._seeds[seq.seq_id] = self._random.getrandbits(63) if first_seed is None else first_seed + index

    def abort(self, request_id: RequestId) -> None:
        """Cancel a request between steps. Unknown ids are ignored: it may just have ended."""
        state = self._requests.pop(request_id, None)
        if state is not None:
            self._drop(state, FinishReason.ABORT)

    def _drop(self, state: RequestState, reason: FinishReason, *, keep_prefix: bool = True) -> None:
        for seq_id in state.sequences:
            self.scheduler.finish(seq_id, reason, keep_prefix=keep_prefix)
            self._owner.pop(seq_id, None)
            self._seeds.pop(seq_id, None)

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.sequences or self._backlog or self.shelf.has_work) or self._started is not None

    # ------------------------------------------------------------------ one step
    def step(self, now: float) -> list[StepResult]:
        """Run one step. Outputs of every request that gained a token, and failures.

        Where the device runs by itself, a step is started and the outputs are those of the one before: the host plans
        and answers while the device computes.
        """
        self._now = now
        results, self._backlog = self._backlog, []
        if self._started is not None and not self._may_overlap():
            results += self._collect(self._started)
        results += self._end_overdue(now)
        results += self._advance_loads(now)
        plan = self.scheduler.schedule(now)
        before, self._started = self._started, None
        if plan is not None:
            self._started = self._start(plan)
        if before is not None:
            results += self._collect(before)
        if self._started is not None and not self._runner.overlaps:
            results += self._collect(self._started)
        if plan is None:
            assert before is not None or not self.scheduler.running, "running sequences but no plan"
            if before is None and self.has_work:
                time.sleep(_LOAD_TICK_S)  # for loads, which run by themselves, or for one that may be tried again
        self.shelf.sweep()
        return results

    def _may_overlap(self) -> bool:
        """Whether the next step can be drawn before this one's tokens are known."""
        running = self.scheduler.running
        return not self._probes and not any(needs_host(seq.params, seq.num_output_tokens) for seq in running)

    def _start(self, plan: StepPlan) -> _Started:
        self._identify(plan)
        drawing = [self.scheduler.sequences[chunk.seq_id] for chunk in plan.chunks if chunk.samples]
        is_observed = self._on_logits is not None or any(seq.request_id in self._probes for seq in drawing)
        observe = (lambda logits: self._observe(drawing, logits)) if is_observed else None
        step = Step(
            plan,
            self.scheduler.sequences,
            self.shelf.packed,
            [self._sampling_row(seq) for seq in drawing],
            observe,
            self.on_layer,
        )
        at_s = time.perf_counter()
        in_flight = self._runner.launch(step)
        num_next = self._counters.count(plan, (self.scheduler.sequences[chunk.seq_id] for chunk in plan.chunks))
        self.scheduler.advance(plan)
        return _Started(plan, tuple(seq.seq_id for seq in drawing), num_next, in_flight, at_s)

    def _collect(self, started: _Started) -> list[StepResult]:
        """Wait for a step and book what it drew."""
        if self._started is started:
            self._started = None
        drawn = started.in_flight.wait()
        before_s, self._collected_s = self._collected_s, time.perf_counter()
        began_s = max(started.at_s, before_s)
        self._counters.count_tokens(len(started.plan.adapters), started.num_next, self._collected_s - before_s)
        self.scheduler.observe(started.plan, 1e3 * (self._collected_s - began_s))
        return self._commit(started.plan, dict(zip(started.drawing, drawn, strict=True)))

    def _lead_s(self) -> float:
        """Seconds until the next step will begin, with a fifth to spare: until then copies delay nobody."""
        started, costs = self._started, self.scheduler.costs
        if started is None or not costs.is_ready:
            return 0.0
        left_s = 1e-3 * costs.model.step_ms(started.plan.shape) + max(started.at_s, self._collected_s)
        return max(0.0, 0.8 * (left_s - time.perf_counter()))

    def _advance_loads(self, now: float) -> list[StepResult]:
        """Bring adapters nearer that requests wait for; failures of requests whose adapter could not be loaded."""
        results: list[StepResult] = []

        def fail(seq: Sequence, retry_after_s: float) -> None:
            state = self._owner.get(seq.seq_id)
            if state is not None and state.request.adapter is not None:
                failure = self._fail(state, load_failed(state.request.adapter.name, retry_after_s))
                results.extend([failure] if failure is not None else [])

        self.shelf.advance_loads(now, fail, self._lead_s())
        return results

    def _end_overdue(self, now: float) -> list[StepResult]:
        """Fail requests whose deadline has passed."""
        results: list[StepResult] = []
        for seq in self.scheduler.overdue(now):
            state = self._owner.get(seq.seq_id)
            if state is None:
                continue
            message = f"The request had {state.request.deadline_s:g} s (deadline_s) and has not ended."
            error = Overloaded(message, self.scheduler.retry_after_s, OverloadReason.DEADLINE)
            failure = self._fail(state, error)
            results += [failure] if failure is not None else []
        return results

    def _identify(self, plan: StepPlan) -> None:
        """Note on each request which weights its first step ran with."""
        for chunk in plan.chunks:
            state, seq = self._owner[chunk.seq_id], self.scheduler.sequences[chunk.seq_id]
            ref = state.request.adapter
            assert chunk.adapter == (ref.digest if ref else None), "a sequence was planned with another adapter"
            assert seq.num_cached_tokens is not None, "a sequence runs that never started"
            if state.num_cached_tokens is None or seq.num_cached_tokens < state.num_cached_tokens:
                state.num_cached_tokens = seq.num_cached_tokens
            if state.served_by is None:
                load_s = self.shelf.load_s[ref.digest] if ref is not None and seq.is_cold else 0.0
                served_by = ServedBy(self.base.name, self.base.fingerprint, ref, seq.is_cold, load_s)
                state.begin(served_by, self._now - seq.arrival_s, time.perf_counter())
                self._counters.queue_s.add(state.queue_s)

    def _observe(self, drawing: Iterable[Sequence], logits: Tensor) -> None:
        for row, seq in zip(logits, drawing, strict=True):
            if seq.request_id in self._probes:
                self._probes.observe(seq.request_id, row)
            elif self._on_logits is not None:
                index = self._owner[seq.seq_id].sequences[seq.seq_id].index
                self._on_logits(seq.request_id, index, row.clone())

    def _sampling_row(self, seq: Sequence) -> SamplingRow:
        params = seq.params
        early = seq.num_output_tokens + 1 < params.min_tokens
        forbidden = seq.eos_token_ids | frozenset(params.stop_token_ids) if early else frozenset[int]()
        return SamplingRow(params, seq.token_ids, seq.prompt_len, self._seeds[seq.seq_id], forbidden)

    def _commit(self, plan: StepPlan, sampled: dict[SequenceId, Sampled]) -> list[StepResult]:
        committed = self.scheduler.commit(plan, {seq_id: self._token(seq_id, one) for seq_id, one in sampled.items()})
        self._counters.num_output_tokens += len(committed)
        touched: dict[RequestId, RequestState] = {}
        failed: list[RequestFailed] = []
        for entry in committed:
            state = self._owner.get(entry.seq_id)
            if state is None:
                continue  # its request failed a moment ago
            if not sampled[entry.seq_id].is_finite:
                ref = state.request.adapter
                name = ref.label if ref is not None else self.base.name
                failure = self._fail(state, NonFiniteOutput(name, state.served_by))
                failed += [failure] if failure is not None else []
                touched.pop(state.request.request_id, None)
                continue
            self._take(state, entry, sampled[entry.seq_id])
            touched[state.request.request_id] = state
        flushed = (self._flush(state) for state in touched.values())
        return [*failed, *(output for output in flushed if output is not None)]

    def _token(self, seq_id: SequenceId, sampled: Sampled) -> int:
        """The token that a sequence goes on with: the drawn one, unless a probe gives it."""
        state = self._owner.get(seq_id)
        if state is None or not self._probes:
            return sampled.token_id
        return self._probes.token(state.request.request_id, state.num_output_tokens, sampled.token_id)

    def _take(self, state: RequestState, entry: Committed, sampled: Sampled) -> None:
        if self._outputs.take(state, entry, sampled):
            self.scheduler.finish(entry.seq_id, FinishReason.STOP)
        if state.sequences[entry.seq_id].is_done:
            self._owner.pop(entry.seq_id)
            self._seeds.pop(entry.seq_id)

    def _flush(self, state: RequestState) -> RequestOutput | None:
        """What a request gained; None for a probe."""
        output, request_id = self._outputs.flush(state, self._collected_s), state.request.request_id
        is_probe = request_id in self._probes
        if output.finished:
            del self._requests[request_id]
            self._probes.end(request_id, is_finite=True)
        return None if is_probe else output

    def _fail(self, state: RequestState, error: LoraplexError) -> RequestFailed | None:
        """Stop a request; None for a probe. Nothing that it computed is used again."""
        request = state.request
        self._requests.pop(request.request_id, None)
        self._drop(state, FinishReason.ABORT, keep_prefix=False)
        if request.request_id in self._probes:
            self._probes.end(request.request_id, is_finite=False)
            return None
        return RequestFailed(request.request_id, error)

    # ------------------------------------------------------------------ figures
    def _names(self, sequences: Iterable[Sequence]) -> tuple[str, ...]:
        """Names of their adapters, those of most first; `sequences` is a copy, the latest first; some have ended."""
        states = (self._owner.get(seq.seq_id) for seq in sequences if seq.request_id not in self._probes)
        refs = (state.request.adapter for state in states if state is not None)
        return tuple(name for name, _ in Counter(ref.name for ref in refs if ref is not None).most_common())

    def stats(self) -> EngineStats:
        """Counters and gauges as of now, made for whoever asks."""
        scheduler = self.scheduler
        running, waiting = (self._names(reversed(tuple(them))) for them in (scheduler.running, scheduler.waiting))
        tiers = self.shelf.packed.copy(), self.shelf.file_counts(), self.shelf.host_memory()
        return snapshot(scheduler, self._counters, running, waiting, self._now, *tiers)

    def residency(self) -> tuple[AdapterResidence, ...]:
        """Where every adapter is that the engine knows, by digest."""
        return residences(self.scheduler, self.shelf.packed.copy(), self.shelf.file_sizes(), self._now)
