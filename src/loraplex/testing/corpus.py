"""Entry points for checkers of adapter conformance: `run` for one adapter at a time, `make_server` for sequences.

Both go through the engine as it serves: real pages, real scheduler, float32. An adapter or request that is refused
raises (or returns) an exception with a `reason_code`.
"""

import asyncio
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from loraplex.adapters import AdapterLimits
from loraplex.core import AdapterRef, BaseRefused, ClientError, RefusalReason, Request, RequestId, SamplingParams
from loraplex.engine import AsyncEngine, Engine, EngineConfig, ServedModels, load_base

_CONFIG = EngineConfig(dtype="float32", memory_bytes=64 * 2**20, max_num_batched_tokens=128)
_PARAMS = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)

Logits = list[float]


class ConformanceServer:
    """One base with adapters by name, run by an engine thread. Every method may be called from several threads."""

    def __init__(self, base_dir: str | Path, base_name: str) -> None:
        self._rows: dict[RequestId, Tensor] = {}
        engine = Engine(load_base(Path(base_dir), _CONFIG, name=base_name), self._observe)
        self._models = ServedModels(engine, AdapterLimits())
        self._engine = AsyncEngine(engine)
        self._engine.start()

    def _observe(self, request_id: RequestId, index: int, logits: Tensor) -> None:
        self._rows[request_id] = logits

    def load(self, name: str, adapter_dir: str | Path) -> None:
        """Load an adapter under a new name, or as a new version of a name it has. Raises AdapterRefused."""
        self._models.load(name, Path(adapter_dir), created=time.time(), replace=True)

    def unload(self, name: str) -> None:
        """Take a name away. Raises AdapterRefused."""
        self._models.unload(name)

    def infer(self, requests: Sequence[dict[str, object]]) -> list[Logits | Exception]:
        """Logits at the last position of each request {"model", "prompt"}, all in one batch; refusals in place."""
        return asyncio.run(self._infer(requests))

    async def _infer(self, requests: Sequence[dict[str, object]]) -> list[Logits | Exception]:
        return list(await asyncio.gather(*(self._one(request["model"], request["prompt"]) for request in requests)))

    async def _one(self, model: object, prompt: object) -> Logits | Exception:
        try:
            assert isinstance(model, str)
            assert isinstance(prompt, list)
            return await self.last_logits(self._models.catalog.resolve(model), tuple(prompt))
        except ClientError as error:
            return error

    async def last_logits(self, adapter: AdapterRef | None, prompt: tuple[int, ...]) -> Logits:
        """Logits at the last position of one prompt."""
        request = Request(RequestId(uuid.uuid4().hex), prompt, _PARAMS, adapter)
        async for output in self._engine.generate(request):
            assert output.served_by.adapter == adapter, "served by other weights than were asked for"
        values: Logits = self._rows.pop(request.request_id).tolist()
        return values

    def close(self) -> None:
        """Stop the engine."""
        self._engine.stop()


def make_server(base_dir: str, base_name: str) -> ConformanceServer:
    """A server with `load`, `unload`, `infer` and `close`."""
    return ConformanceServer(base_dir, base_name)


def run(base_dir: str, adapter_dir: str | None, prompts: Sequence[Sequence[int]]) -> list[Logits]:
    """Logits at the last position of each prompt, on the base or with one adapter. Raises what refuses it."""
    try:
        server = ConformanceServer(base_dir, "the-base")
    except BaseRefused as error:
        if error.reason is RefusalReason.ARCHITECTURE_UNSUPPORTED:
            error.reason_code = "BASE_MISMATCH"  # what the corpus calls a base that is refused as a whole
        raise
    try:
        if adapter_dir is not None:
            server.load("adapter", adapter_dir)
        model = "the-base" if adapter_dir is None else "adapter"
        rows = server.infer([{"model": model, "prompt": list(prompt)} for prompt in prompts])
        return [_raise_or_return(row) for row in rows]
    finally:
        server.close()


def _raise_or_return(row: Logits | Exception) -> Logits:
    if isinstance(row, Exception):
        raise row
    return row
