"""The step loop: the scheduler and the pool meet the model. Synchronous and single-threaded; `now` is passed in."""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from loraplex.adapters import Adapter
from loraplex.core import (
    AdapterComparison,
    AdapterDigest,
    ConfigError,
    EngineStats,
    FinishReason,
    InvalidRequest,
    ModelNotFound,
    NonFiniteOutput,
    Overloaded,
    Request,
    RequestId,
    RequestOutput,
    SequenceId,
    ServedBy,
)
from loraplex.engine.batch import PageBuffer
from loraplex.engine.loading import LoadedBase, Progress
from loraplex.engine.outputs import OutputProcessor, RequestFailed, RequestState
from loraplex.engine.packing import PackedAdapter, pack_adapter
from loraplex.engine.probes import Probe, ProbeBook, ProbeRun
from loraplex.engine.runner import EagerRunner, Runner, Step, StepInFlight
from loraplex.engine.site_check import SiteCheck
from loraplex.engine.verification import Verifier
from loraplex.model import Sampled, SamplingRow, needs_host
from loraplex.scheduler import Committed, Scheduler, Sequence, StepPlan

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
        runner = CudaRunner(base.decoder, buffer, base.scheduler_config.max_num_seqs)
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
    in_flight: StepInFlight


@dataclass(slots=True)
class _Counters:
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_adapter_loads: int = 0
    adapter_load_s: float = 0.0
    num_distinct_adapters: int = 0


class Engine:
    """One base on one device with the adapters registered to it.

    `add_adapter`, `retire_adapter`, `hold_adapter`, `release_adapter`, `check` and `stats` may be called from any
    thread; the rest belongs to the thread that steps.
    """

    def __init__(
        self, base: LoadedBase, on_logits: LogitsObserver | None = None, progress: Progress | None = None
    ) -> None:
        """`progress` is called while CUDA graphs are captured, with (graphs done, graphs in all)."""
        self.base = base.description
        self.tokenizer = base.tokenizer
        self._decoder = base.decoder
        self._geometry = base.geometry
        self._max_waiting = base.config.max_waiting
        self.scheduler = Scheduler(base.scheduler_config, base.geometry)
        self._buffer = PageBuffer(base.geometry, base.decoder.dtype, base.decoder.device)
        self._runner = _make_runner(base, self._buffer, progress)
        self._started: _Started | None = None  # a step whose tokens nobody has seen yet
        self._outputs = OutputProcessor(base.tokenizer)
        self._packed: dict[AdapterDigest, PackedAdapter] = {}
        self._retired: set[AdapterDigest] = set()
        self._unfilled: set[AdapterDigest] = set()  # resident, but their pages were not written yet
        self._held: Counter[AdapterDigest] = Counter()  # kept for comparisons, whether or not they are retired
        self._adapters_lock = threading.Lock()  # over changes of packed, retired and held adapters
        self._requests: dict[RequestId, RequestState] = {}
        self._owner: dict[SequenceId, RequestState] = {}
        self._seeds: dict[SequenceId, int] = {}
        self._random = random.SystemRandom()
        self._counters = _Counters()
        self._on_logits = on_logits
        self._probes = ProbeBook()
        self._backlog: list[StepResult] = []  # of steps that a comparison made
        self._now = 0.0  # of the last step
        self.verifier = Verifier(self, base)
        self.on_layer: Callable[[], None] = lambda: None  # called before every layer of a step
        self._stats = EngineStats()
        self._snapshot()

    # ------------------------------------------------------------------ adapters
    def add_adapter(self, adapter: Adapter) -> None:
        """Pack an adapter and keep it in host memory, ready to be paged in. Raises AdapterRefused."""
        packed = self._pack(adapter)
        with self._adapters_lock:
            self._packed.setdefault(adapter.digest, packed)
            self._retired.discard(adapter.digest)

    def _pack(self, adapter: Adapter) -> PackedAdapter:
        packed = self._packed.get(adapter.digest)
        if packed is not None:
            return packed
        on_gpu = self._decoder.device.type == "cuda"
        return pack_adapter(adapter, self.base.sites, self._geometry, self._decoder.dtype, pin_memory=on_gpu)

    def retire_adapter(self, digest: AdapterDigest) -> None:
        """No new requests for it; its memory goes once the requests that run have ended."""
        with self._adapters_lock:
            self._retired.add(digest)

    def _sweep_retired(self) -> None:
        with self._adapters_lock:
            for digest in [d for d in self._retired if not self._held[d] and not self.scheduler.uses_adapter(d)]:
                if self.scheduler.residency.is_resident(digest):
                    self.scheduler.residency.evict(digest)
                self._packed.pop(digest, None)
                self._retired.discard(digest)

    def hold_adapter(self, adapter: Adapter) -> PackedAdapter:
        """Keep an adapter for a comparison until `release_adapter`; what is paged in. Raises AdapterRefused.

        One that was not added stays unknown to requests.
        """
        packed = self._pack(adapter)
        with self._adapters_lock:
            if adapter.digest not in self._packed:
                self._packed[adapter.digest] = packed
                self._retired.add(adapter.digest)
            self._held[adapter.digest] += 1
            return self._packed[adapter.digest]

    def release_adapter(self, digest: AdapterDigest) -> None:
        """Undo one `hold_adapter`. What nobody added meanwhile goes after the next step."""
        with self._adapters_lock:
            self._held[digest] -= 1
            if not self._held[digest]:
                del self._held[digest]

    # ------------------------------------------------------------------ comparisons
    def compare(self, adapter: Adapter) -> AdapterComparison:
        """Compare what the engine computes with an adapter to a merged reference (`verification.py`). Steps meanwhile.

        The adapter need not have been added. Requests that run go on; the next `step` gives their outputs. Raises
        AdapterRefused if the adapter cannot be brought into the pool.
        """
        try:
            return self.verifier.compare(adapter, self._run_probes, lambda check: check())
        finally:
            self._sweep_retired()

    def site_check(self, packed: PackedAdapter, adapter: Adapter) -> SiteCheck | None:
        """A look at what each linear adds; None where steps run in graphs, whose tables are the runner's."""
        if self._decoder.ops.in_graphs:
            return None
        return SiteCheck(self._decoder, self._geometry, packed, adapter, self.base.sites)

    def start_probes(self, probes: Iterable[Probe], adapter: Adapter | None) -> ProbeRun:
        """Queue probes on the base or on an adapter that is held."""
        wanted, digest = tuple(probes), None if adapter is None else adapter.digest
        num_pages = 0 if adapter is None else self._packed[adapter.digest].num_pages
        run = ProbeRun(wanted)
        for index, probe in enumerate(wanted):
            self._add(self._probes.add(run, index, probe, digest), num_pages, self._now)
        return run

    def _run_probes(self, probes: Iterable[Probe], adapter: Adapter | None) -> ProbeRun:
        run = self.start_probes(probes, adapter)
        while not run.done.is_set():
            self._backlog = self.step(self._now)  # with what was in it
        return run

    # ------------------------------------------------------------------ requests
    def check(self, request: Request) -> None:
        """Raise what `add_request` would: InvalidRequest, ContextTooLong, ModelNotFound, Overloaded."""
        vocab = self.base.vocab_size
        for token in request.prompt_token_ids:
            if not 0 <= token < vocab:
                raise InvalidRequest(f"prompt token {token} is outside the vocabulary of {vocab} tokens.", "prompt")
        request.params.check_vocabulary(vocab)
        params = request.params
        self.scheduler.check_fits(len(request.prompt_token_ids), params.max_tokens, self._pages_of(request))
        if params.n > self._max_waiting:
            raise InvalidRequest(
                f"n is {params.n}; the queue holds {self._max_waiting} sequences (--max-waiting).", "n"
            )
        if len(self.scheduler.waiting) + params.n > self._max_waiting:
            raise Overloaded(
                f"The queue of {self._max_waiting} waiting sequences is full (--max-waiting).", retry_after_s=1.0
            )

    def _pages_of(self, request: Request) -> int:
        if request.adapter is None:
            return 0
        packed = self._packed.get(request.adapter.digest)
        if packed is None or request.adapter.digest in self._retired:
            raise ModelNotFound(request.adapter.name)
        return packed.num_pages

    def add_request(self, request: Request, now: float) -> None:
        """Queue a request. Raises what `check` raises; then nothing is queued."""
        self.check(request)
        if request.request_id in self._requests:
            raise InvalidRequest(f"request id {request.request_id!r} is already running.", "request_id")
        self._add(request, self._pages_of(request), now)

    def _add(self, request: Request, adapter_pages: int, now: float) -> None:
        added = self.scheduler.add(request, adapter_pages, self.tokenizer.eos_token_ids, now)
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

    def _drop(self, state: RequestState, reason: FinishReason) -> None:
        for seq_id in state.sequences:
            self.scheduler.finish(seq_id, reason)
            self._owner.pop(seq_id, None)
            self._seeds.pop(seq_id, None)

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.sequences or self._backlog) or self._started is not None

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
        self._sweep_retired()
        self._snapshot()
        return results

    def _may_overlap(self) -> bool:
        """Whether the next step can be drawn before this one's tokens are known."""
        running = self.scheduler.running
        return not self._probes and not any(needs_host(seq.params, seq.num_output_tokens) for seq in running)

    def _start(self, plan: StepPlan) -> _Started:
        load_s = self._load(plan)
        self._identify(plan, load_s)
        drawing = [self.scheduler.sequences[chunk.seq_id] for chunk in plan.chunks if chunk.samples]
        is_observed = self._on_logits is not None or any(seq.request_id in self._probes for seq in drawing)
        observe = (lambda logits: self._observe(drawing, logits)) if is_observed else None
        step = Step(
            plan,
            self.scheduler.sequences,
            self._packed,
            [self._sampling_row(seq) for seq in drawing],
            observe,
            self.on_layer,
        )
        in_flight = self._runner.launch(step)
        self._count(plan, load_s)
        self.scheduler.advance(plan)
        return _Started(plan, tuple(seq.seq_id for seq in drawing), in_flight)

    def _collect(self, started: _Started) -> list[StepResult]:
        """Wait for a step and book what it drew."""
        if self._started is started:
            self._started = None
        return self._commit(started.plan, dict(zip(started.drawing, started.in_flight.wait(), strict=True)))

    def _load(self, plan: StepPlan) -> float:
        """Fill the pages of adapters that came in with this step; seconds it took.

        What an exception kept from being filled counts as resident by then; it stays in `_unfilled` until it is.
        """
        started = time.perf_counter()
        self._unfilled |= {load.digest for load in plan.loads}
        for digest, pages in plan.adapters:
            if digest in self._unfilled:
                self._runner.load(pages, self._packed[digest].image)
                self._unfilled.discard(digest)
        return time.perf_counter() - started if plan.loads else 0.0

    def _identify(self, plan: StepPlan, load_s: float) -> None:
        """Note on each request which weights its first step ran with."""
        cold = {load.digest for load in plan.loads}
        for chunk in plan.chunks:
            state = self._owner[chunk.seq_id]
            ref = state.request.adapter
            assert chunk.adapter == (ref.digest if ref else None), "a sequence was planned with another adapter"
            if state.served_by is None:
                is_cold = chunk.adapter in cold
                state.served_by = ServedBy(
                    self.base.name, self.base.fingerprint, ref, is_cold, load_s if is_cold else 0.0
                )

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
                failure = self._fail(state)
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
        output, request_id = self._outputs.flush(state), state.request.request_id
        is_probe = request_id in self._probes
        if output.finished:
            del self._requests[request_id]
            self._probes.end(request_id, is_finite=True)
        return None if is_probe else output

    def _fail(self, state: RequestState) -> RequestFailed | None:
        """Stop a request whose logits were not finite; None for a probe."""
        request = state.request
        self._requests.pop(request.request_id, None)
        self._drop(state, FinishReason.ABORT)
        if request.request_id in self._probes:
            self._probes.end(request.request_id, is_finite=False)
            return None
        name = request.adapter.label if request.adapter else self.base.name
        return RequestFailed(request.request_id, NonFiniteOutput(name, state.served_by))

    # ------------------------------------------------------------------ figures
    def _count(self, plan: StepPlan, load_s: float) -> None:
        counters = self._counters
        counters.num_steps += 1
        for chunk in plan.chunks:
            prompt_left = self.scheduler.sequences[chunk.seq_id].prompt_len - chunk.start
            counters.num_prompt_tokens += max(0, min(chunk.num_tokens, prompt_left))
        counters.num_adapter_loads += len(plan.loads)
        counters.adapter_load_s += load_s
        counters.num_distinct_adapters = len(plan.adapters)

    def _names(self, sequences: Iterable[Sequence]) -> tuple[str, ...]:
        wanted = (seq for seq in sequences if seq.request_id not in self._probes)
        refs = (self._owner[seq.seq_id].request.adapter for seq in wanted)
        return tuple(sorted({ref.name for ref in refs if ref is not None}))

    def _snapshot(self) -> None:
        scheduler, counters = self.scheduler, self._counters
        self._stats = EngineStats(
            num_waiting=len(scheduler.waiting),
            num_running=len(scheduler.running),
            num_pages=scheduler.pool.num_pages,
            num_free_pages=scheduler.pool.num_free,
            num_adapter_pages=scheduler.residency.num_pages,
            page_tokens=self._geometry.page_tokens,
            num_steps=counters.num_steps,
            num_prompt_tokens=counters.num_prompt_tokens,
            num_output_tokens=counters.num_output_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_adapter_loads=counters.num_adapter_loads,
            adapter_load_s=counters.adapter_load_s,
            num_adapter_evictions=scheduler.residency.num_evictions,
            num_distinct_adapters=counters.num_distinct_adapters if scheduler.running else 0,
            max_loras=scheduler.config.max_loras,
            running_adapters=self._names(scheduler.running),
            waiting_adapters=self._names(scheduler.waiting),
            resident_adapters=scheduler.residency.resident,
        )

    def stats(self) -> EngineStats:
        """Counters and gauges as of the end of the last step."""
        return self._stats
