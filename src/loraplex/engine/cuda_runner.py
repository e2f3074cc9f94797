"""Steps on CUDA: those of few rows in captured graphs, others launch by launch; nobody waits before results are read.

All steps run on one stream, so pages that the host hands on are written by their new owner after the old one read
them. Loads run on a second one, each after the steps that use its pages; no step uses an adapter before its load has
ended: the host saw that, or the step waits for it on the device. Adapters' work lists are planned on the host when the
mix changes, and read by the kernels on the device: a graph serves any mix. Graphs differ in rows, and in how many
programs share a work list.

To a graph every row is on its own, a prompt's too: launching a step takes the host 20 ms, whatever its size, and
replaying a graph next to nothing. A long prompt's rows would read its keys again and again, so those are run launch by
launch.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from loraplex.core import AdapterDigest, PageId, RequestId, SamplingParams, SequenceId
from loraplex.engine.batch import BatchBuilder, PageBuffer
from loraplex.engine.cuda_adapters import MAX_ITEMS, DecodeAdapters, PromptAdapters
from loraplex.engine.cuda_buckets import GraphBuckets, GraphKey
from loraplex.engine.cuda_tables import StepTables
from loraplex.engine.host_arena import HostPages
from loraplex.engine.runner import CopiesInFlight, LoadMark, Step, StepDone, StepInFlight
from loraplex.kernels import KvBatch, LoraBatch
from loraplex.kernels.gpu import (
    DECODE_ROWS,
    WARM_CHUNKS,
    BoundLora,
    BoundPrefill,
    count_blocks,
    partial_sums,
)
from loraplex.kernels.gpu.attention import PagedAttention
from loraplex.kernels.gpu.decode_attention import DecodeAttention
from loraplex.kernels.gpu.glue import resolve_tokens
from loraplex.kernels.gpu.ops import Attention, CudaOps
from loraplex.kernels.gpu.sampling import filter_weights
from loraplex.model import Decoder, DeviceBatch, Sampled, SamplingRow, draw_on_device, needs_host, sample
from loraplex.scheduler import ScheduledChunk, StepPlan
from loraplex.scheduler import Sequence as SequenceState

# Tokens that rows of prompts attend to in a graph's step, each row counted, without adapters and with. Beyond, reading
# them takes longer than launching the step takes the host, which is longer with adapters.
_PROMPT_TOKENS = (2**18, 2**20)
_LINK_BYTES = 64 * 2**20  # that the link's speed is measured with
_RESULTS = 3  # steps whose results may be unread at once, and one more
_Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class _InFlight:
    """Results of a step on their way to the host."""

    event: torch.cuda.Event
    result: Tensor  # pinned [num_draws] int64: the token, or -1 where the logits were not finite
    places: list[int]

    def wait(self) -> list[Sampled]:
        self.event.synchronize()
        values = self.result.tolist()
        return [Sampled(max(values[i], 0), is_finite=values[i] >= 0) for i in self.places]


def _attended(chunks: Iterable[ScheduledChunk]) -> int:
    """Tokens that the rows of chunks attend to, each row counted."""
    return sum(chunk.num_tokens * chunk.start + chunk.num_tokens * (chunk.num_tokens + 1) // 2 for chunk in chunks)


class CudaRunner:
    """Runs steps on a GPU. `capture` before use."""

    overlaps = True
    copies_aside = True

    def __init__(self, decoder: Decoder, buffer: PageBuffer, max_seqs: int, max_model_len: int) -> None:
        assert isinstance(decoder.ops, CudaOps)
        self._decoder = decoder
        self._buffer = buffer
        self._builder = BatchBuilder(buffer)
        self._buckets = GraphBuckets(max_seqs, decoder.max_rows)
        max_rows = self._buckets.max_rows
        device, geometry = decoder.device, buffer.geometry
        # That rows of a graph's step attend to, each row counted: what the pool holds, and prefixes that are shared.
        self._max_tokens = geometry.num_pages * geometry.page_tokens + max(_PROMPT_TOKENS)
        self._stream = torch.cuda.Stream(device, priority=-5)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self._load_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            decoder.ops.reserve(max_rows, decoder.dtype)
            num_listed = max_seqs * geometry.pages_for_tokens(max_model_len)
            self._tables = StepTables(decoder.max_rows, max_rows, num_listed, geometry.page_tokens, device)
            shapes = [layer.attention for layer in decoder.layers]
            self._prompt_attention = PagedAttention(shapes, decoder.dtype, geometry.page_tokens, device)
            self._decode_attention = DecodeAttention(
                shapes,
                self._tables.device("kv_pages"),
                geometry.page_tokens,
                max_rows,
                self._max_tokens,
            )
            self._tokens = torch.zeros(decoder.max_rows, dtype=torch.int64, device=device)
            self._logits = torch.zeros(max_seqs, decoder.config.vocab_size, dtype=torch.float32, device=device)
            self._best = torch.zeros(max_seqs, dtype=torch.float32, device=device)
            self._drawn = torch.zeros(max_seqs, dtype=torch.int64, device=device)
            self._make_lora(decoder)
        self._results = [torch.zeros(max_seqs, dtype=torch.int64, pin_memory=True) for _ in range(_RESULTS)]
        self._num_steps = 0
        self._sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._drawn_at: dict[SequenceId, int] = {}
        self._in_flight: deque[tuple[torch.cuda.Event, StepPlan]] = deque()  # steps that may still run, oldest first
        self._is_held_up = False  # whether the last load waits for them
        self._byte_s = 0.0  # that a byte takes to the device
        self._graphs: dict[GraphKey, torch.cuda.CUDAGraph] = {}

    def _make_lora(self, decoder: Decoder) -> None:
        linears = [
            [linear.sites for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)]
            for layer in decoder.layers
        ]
        num_sites, dims = sum(len(sites) for layer in linears for sites in layer), {8}
        for sites in linears[0]:
            dims |= {size for site in sites for size in (site.d_in, site.d_out)}
        align = 8 if all(size % 8 == 0 for size in dims) else 1
        size = partial_sums(linears[0], MAX_ITEMS, DECODE_ROWS)
        self._part = torch.empty(size, dtype=torch.float32, device=decoder.device)
        self._decode_lora = DecodeAdapters(num_sites, self._buckets.max_rows, align, decoder.device)
        self._prompt_lora = PromptAdapters(self._buffer.flat, linears[0], num_sites, align)

    # ------------------------------------------------------------------ capture
    def capture(self, progress: _Progress | None = None, *, in_graphs: bool = True) -> None:
        """Compile everything, and capture every graph, largest first, unless steps shall run without.

        `progress` is called with (graphs done, graphs in all).
        """
        wanted = self._buckets.keys() if in_graphs else []
        pool = torch.cuda.graph_pool_handle()
        with torch.cuda.device(self._decoder.device), torch.cuda.stream(self._stream), torch.inference_mode():
            for chunks in (0, *WARM_CHUNKS):  # first, as it fails where FlashInfer cannot compile
                self._warm_prompts(chunks)
            for done, key in enumerate(wanted, start=1):
                self._graphs[key] = self._capture(key, pool)
                if progress:
                    progress(done, len(wanted))
            self._stream.synchronize()
            self._byte_s = self._measure_link()

    def _warm_prompts(self, chunks: int) -> None:
        """Run a step of a prompt, so that what it needs is compiled: with an adapter of that many chunks, or none.

        Its tokens go to page 0, which nobody holds yet.
        """
        geometry = self._buffer.geometry
        num_rows = min(geometry.page_tokens, self._decoder.max_rows)
        seq_id = SequenceId(0)
        params = SamplingParams(temperature=1.0, top_p=0.9)
        tokens = [0] * num_rows
        seq = SequenceState(
            seq_id, RequestId("warm"), params, None, 0, tokens, num_rows, num_rows + 1, frozenset(), 0.0
        )
        chunk = ScheduledChunk(seq_id, 0, num_rows, False, None, (PageId(0),))
        mix = ((AdapterDigest(f"{chunks} chunks"), ()),)  # tells one list of these from another
        self._run_eagerly(
            Step(StepPlan((chunk,), mix, (), 0), {seq_id: seq}, {}, ()),
            self._zero_adapter(num_rows, chunks) if chunks else None,
        )
        random = SamplingRow(params, tokens, num_rows, seed=0)
        self._draw_at_random([0], [random])
        self._stream.synchronize()

    def _zero_adapter(self, num_rows: int, chunks: int) -> LoraBatch:
        """An adapter of full chunks that all lie at the pool's start."""
        num_sites = self._decode_lora.items.count.shape[0]
        starts = torch.arange(num_sites + 1, dtype=torch.int32)[None] * chunks
        zeros = torch.zeros(num_sites * chunks, dtype=torch.int64)
        return LoraBatch(
            pages=self._buffer.flat,
            seg_start=torch.tensor([0, num_rows], dtype=torch.int32),
            seg_slot=torch.zeros(1, dtype=torch.int32),
            chunk_start=starts,
            chunk_a=zeros,
            chunk_b=zeros,
            chunk_rank=torch.full((num_sites * chunks,), self._buffer.geometry.chunk_rank, dtype=torch.int32),
            scale=torch.zeros(1, num_sites),
        )

    def _capture(self, key: GraphKey, pool: Any) -> torch.cuda.CUDAGraph:
        rows = key.rows
        self._tables.fill_empty(rows)
        self._tables.send(rows)
        self._decode_attention.plan(*self._tables.contexts(rows))
        lora = self._bound(key) if key.programs else None
        num_draws = min(rows, self._buckets.max_seqs)
        logit_rows = self._tables.device("logit_rows", num_draws) if num_draws < rows else None
        batch = DeviceBatch(self._tokens[:rows], logit_rows, self._kv(rows, self._decode_attention), lora)
        self._run(batch, num_draws)  # compiles what is not compiled yet, which a capture may not
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=self._stream):
            self._run(batch, num_draws)
        return graph

    def _bound(self, key: GraphKey) -> LoraBatch:
        items = self._decode_lora.items
        return self._batch(BoundLora(self._buffer.flat, items, self._part, DECODE_ROWS, key.programs, key.several))

    def _batch(self, bound: BoundLora | BoundPrefill) -> LoraBatch:
        none = self._decode_lora.items.count
        return LoraBatch(self._buffer.flat, none, none, none, none, none, none, none, bound)

    def _kv(self, rows: int, attention: Attention) -> KvBatch:
        tables = self._tables
        row_pos, none = tables.device("row_pos", rows), tables.device("row_pos", 0)
        return KvBatch(self._buffer.kv, none, none, none, row_pos, tables.bound(rows, attention))

    def _run(self, batch: DeviceBatch, num_draws: int, on_layer: Callable[[], None] = lambda: None) -> None:
        """The whole step on the device, greedy draws included."""
        rows = batch.token_ids.shape[0]
        tables = self._tables
        resolve_tokens(tables.device("tokens", rows), tables.device("source", rows), self._drawn, self._tokens)
        logits = self._decoder.forward(batch, on_layer, self._logits[:num_draws])
        if num_draws:
            torch.max(logits, dim=-1, out=(self._best[:num_draws], self._drawn[:num_draws]))

    # ------------------------------------------------------------------ steps
    def load(self, pages: Sequence[PageId], image: HostPages) -> None:
        with torch.cuda.device(self._decoder.device), torch.cuda.stream(self._load_stream):
            self._is_held_up = self._uses(pages)
            if self._is_held_up:
                self._load_stream.wait_stream(self._stream)
            self._buffer.fill(pages, image)

    def load_mark(self) -> LoadMark:
        return CopiesInFlight.on(self._load_stream, is_held_up=self._is_held_up)

    def copy_s(self, num_bytes: int) -> float:
        return num_bytes * self._byte_s

    def follow(self, mark: LoadMark) -> None:
        assert isinstance(mark, CopiesInFlight)
        self._stream.wait_event(mark.event)

    def _uses(self, pages: Sequence[PageId]) -> bool:
        """Whether a step that may still run uses any of the pages."""
        self._forget_ended()
        wanted = frozenset(pages)
        return any(
            not wanted.isdisjoint(used)
            for _, plan in self._in_flight
            for used in (*(chunk.pages for chunk in plan.chunks), *(held for _, held in plan.adapters))
        )

    def _forget_ended(self) -> None:
        while self._in_flight and self._in_flight[0][0].query():  # type: ignore[no-untyped-call]
            self._in_flight.popleft()

    def _measure_link(self) -> float:
        """Seconds that a byte takes from pinned memory to the pool, whose pages nobody holds yet."""
        size = min(self._buffer.flat.numel(), _LINK_BYTES // self._buffer.flat.element_size())
        source = torch.zeros(size, dtype=self._buffer.flat.dtype, pin_memory=True)
        times = list[float]()
        for _ in range(3):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record(self._load_stream)
            with torch.cuda.stream(self._load_stream):
                self._buffer.flat[:size].copy_(source, non_blocking=True)
            end.record(self._load_stream)
            end.synchronize()
            times.append(begin.elapsed_time(end))
        return 1e-3 * min(times) / source.nbytes

    def launch(self, step: Step) -> StepInFlight:
        with torch.cuda.device(self._decoder.device), torch.cuda.stream(self._stream), torch.inference_mode():
            self._sent.synchronize()  # the pinned tables are the last step's until they are on the device
            places = self._start(step)
            started = self._draw(step, places)
        self._forget_ended()
        if isinstance(started, _InFlight):
            self._in_flight.append((started.event, step.plan))
        return started

    def _start(self, step: Step) -> list[int]:
        """Start a step; where each draw's logits stand."""
        plan = step.plan
        num_rows = plan.num_tokens
        lora = self._builder.lora(plan, step.packed) if plan.adapters else None
        if self._graphs and self._has_graph(plan):
            counts = count_blocks(lora, DECODE_ROWS) if lora is not None else None
            fits = counts is not None and counts.places <= MAX_ITEMS
            longest = self._decode_lora.send(lora, plan.adapters, num_rows) if lora is not None and fits else 0
            if lora is None or longest:
                key = self._buckets.find(num_rows, longest, several=counts is not None and counts.chunks > 1)
                self._replay(step, key)
                return self._draws_at(plan, key)
        self._run_eagerly(step, lora)
        return list(range(len(step.draws)))

    def _has_graph(self, plan: StepPlan) -> bool:
        """Whether there are graphs of so many rows, and room and time for each of them to be on its own."""
        prompts = _attended(chunk for chunk in plan.chunks if chunk.num_tokens > 1)
        return (
            plan.num_tokens <= self._buckets.max_rows
            and prompts <= _PROMPT_TOKENS[bool(plan.adapters)]
            and _attended(plan.chunks) <= self._max_tokens
        )

    def _draws_at(self, plan: StepPlan, key: GraphKey) -> list[int]:
        """Where a graph puts the logits of each chunk that samples: at its last row, or one after the other."""
        samples = [chunk.samples for chunk in plan.chunks]
        if key.rows > self._buckets.max_seqs:
            return list(range(sum(samples)))
        ends = accumulate(chunk.num_tokens for chunk in plan.chunks)
        return [end - 1 for end, is_drawn in zip(ends, samples, strict=True) if is_drawn]

    def _replay(self, step: Step, key: GraphKey) -> None:
        plan, tables = step.plan, self._tables
        pad = key.rows - plan.num_tokens
        tables.fill(plan, step.sequences, self._drawn_at, pad)
        tables.send(len(plan.chunks) + pad)
        self._decode_attention.plan(*tables.contexts(key.rows))
        self._sent.record()
        self._graphs[key].replay()

    def _run_eagerly(self, step: Step, lora: LoraBatch | None) -> None:
        plan, tables = step.plan, self._tables
        num_rows, num_seqs = plan.num_tokens, len(plan.chunks)
        tables.fill(plan, step.sequences, self._drawn_at, 0)
        tables.send(num_seqs)
        bound = self._batch(self._prompt_lora.bind(lora, plan.adapters)) if lora is not None else None
        self._prompt_attention.plan(tables.kv_pages(num_seqs), tables.row_starts(num_seqs))
        self._sent.record()
        logit_rows = tables.device("logit_rows", len(step.draws))
        batch = DeviceBatch(self._tokens[:num_rows], logit_rows, self._kv(num_rows, self._prompt_attention), bound)
        self._run(batch, len(step.draws), step.on_layer)

    # ------------------------------------------------------------------ draws
    def _draw(self, step: Step, places: list[int]) -> StepInFlight:
        """Draw from the logits at `places`, and send the tokens on their way."""
        draws = step.draws
        self._drawn_at = {
            chunk.seq_id: place for chunk, place in zip((c for c in step.plan.chunks if c.samples), places, strict=True)
        }
        if step.observe is not None:
            step.observe(self._logits[places])
        if any(needs_host(row.params, len(row.token_ids) - row.prompt_len) for row in draws):
            drawn = sample(self._logits[places], draws, filter_weights)
            self._drawn[places] = torch.tensor([one.token_id for one in drawn], device=self._decoder.device)
            return StepDone(drawn)
        random = [(place, row) for place, row in zip(places, draws, strict=True) if not row.params.greedy]
        if random:
            self._draw_at_random([place for place, _ in random], [row for _, row in random])
        count = max(places, default=-1) + 1
        result = self._results[self._num_steps % _RESULTS][:count]
        self._num_steps += 1
        is_finite = torch.isfinite(self._best[:count])
        result.copy_(torch.where(is_finite, self._drawn[:count], -1), non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return _InFlight(event, result, places)

    def _draw_at_random(self, places: list[int], rows: list[SamplingRow]) -> None:
        at = torch.tensor(places).to(self._decoder.device, non_blocking=True)
        drawn = draw_on_device(self._logits[at], self._best[at], rows, filter_weights)
        self._drawn.index_copy_(0, at, drawn)
