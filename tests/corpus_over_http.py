"""The conformance corpus through the HTTP API: each adapter uploaded, compared, activated, and asked in mixed batches.

Usage: python -m tests.corpus_over_http CORPUS [BASE ...]

A case passes where the upload is refused with a code and may be, or where the answers' tokens and the likeliest tokens'
log probabilities are those of its golden. Cases with files that only a directory can hold (links, pipes) are left out.
"""

import asyncio
import json
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch

from loraplex.engine import AsyncEngine, Engine, EngineConfig, load_base
from loraplex.registry import Registry, RegistryConfig, Role
from loraplex.server import ServerConfig, create_app

TENANT = "corpus"
TOP = 5  # log probabilities that are compared, of every first token
NUM_TOKENS = 16
_AT_ONCE = 48  # requests


@dataclass(frozen=True)
class CaseResult:
    """`ok` says whether the outcome is one that the case allows."""

    id: str
    must: str
    outcome: str  # "equal", "other", "refused <code>" or "error ..."
    ok: bool


def cases_of(corpus: Path, base: str) -> list[dict[str, Any]]:
    """The base's cases that can be uploaded."""
    manifest = json.loads((corpus / "manifest.json").read_text())
    own = [case for case in manifest["cases"] if case["base"] == f"bases/{base}"]
    return [case for case in own if "materialize" not in case and _files(corpus, case) is not None]


def _files(corpus: Path, case: dict[str, Any]) -> tuple[Path, Path] | None:
    folder = corpus / case["adapter"]
    files = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    return files if all(file.is_file() for file in files) else None


class CorpusServer:
    """One base of the corpus behind a registry. Use as an async context manager."""

    def __init__(self, corpus: Path, base: str, data_dir: Path) -> None:
        self._corpus = corpus
        self._base = base
        config = EngineConfig(dtype="float32", memory_bytes=2**26, max_num_batched_tokens=128)
        self._engine = AsyncEngine(Engine(load_base(corpus / "bases" / base, config)))
        self._registry = Registry(RegistryConfig(data_dir))
        operator = self._registry.local_operator()
        self._registry.tenants.create(operator, TENANT)
        key = self._registry.keys.create(operator, TENANT, Role.OPERATOR).key.reveal()
        app = create_app(self._engine, self._registry, ServerConfig(access_log=False))
        transport, headers = httpx.ASGITransport(app), {"Authorization": f"Bearer {key}"}
        self._client = httpx.AsyncClient(transport=transport, base_url="http://corpus", headers=headers, timeout=600)
        self._gate = asyncio.Semaphore(_AT_ONCE)

    async def __aenter__(self) -> "CorpusServer":
        self._engine.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()
        self._engine.stop()
        self._registry.close()

    async def run(self, cases: Sequence[dict[str, Any]]) -> list[CaseResult]:
        """Publish all, then ask all that may be served at once."""
        published = [await self._publish(number, case) for number, case in enumerate(cases)]
        asked = [self._ask(number, case) for number, case in enumerate(cases) if published[number] is None]
        answers = iter(await asyncio.gather(self._ask_base(), *asked))
        base = CaseResult(self._base, "equal", next(answers), ok=True)
        results = [CaseResult(base.id, base.must, base.outcome, base.outcome == "equal")]
        for case, refusal in zip(cases, published, strict=True):
            outcome = refusal or next(answers)
            is_ok = outcome.startswith("refused ") if refusal else outcome == "equal"
            allowed = case["must"] != ("equal" if refusal else "refuse")
            results.append(CaseResult(case["id"], case["must"], outcome, is_ok and allowed))
        return results

    async def _publish(self, number: int, case: dict[str, Any]) -> str | None:
        """What kept the adapter from being active; None if it is."""
        url, files = f"/admin/v1/tenants/{TENANT}/adapters/case-{number}", _files(self._corpus, case)
        assert files is not None
        form = {"config": ("c", files[0].read_bytes()), "weights": ("w", files[1].read_bytes())}
        for step, body in (
            ("versions", {"files": form, "data": {"base_unverified": "true"}}),
            ("versions/1/verify", {"json": {}}),
            ("activate", {"json": {"version": 1, "expected": None}}),
        ):
            reply = await self._client.post(f"{url}/{step}", **body)  # type: ignore[arg-type]
            if reply.status_code >= 500:
                return f"error {reply.status_code} {reply.text[:200]}"
            if reply.status_code >= 400:
                error = reply.json()["error"]
                return f"refused {error.get('reason') or error['code']}"
        return None

    async def _ask(self, number: int, case: dict[str, Any]) -> str:
        return await self._compare(f"case-{number}", self._corpus / case["golden"])

    async def _ask_base(self) -> str:
        return await self._compare(self._base, self._corpus / "goldens" / self._base / "_base.json")

    async def _compare(self, model: str, path: Path) -> str:
        golden = json.loads(path.read_text())
        wanted = golden.get("unmerged") or golden
        pairs = zip(golden["prompts"], wanted["last_logits"], wanted["greedy"], strict=True)
        found = await asyncio.gather(*(self._answer(model, *one) for one in pairs))
        return next((one for one in found if one != "equal"), "equal")

    async def _answer(self, model: str, prompt: list[int], logits: list[float], greedy: list[int]) -> str:
        body = {"model": model, "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "logprobs": TOP}
        async with self._gate:
            reply = await self._client.post("/v1/completions", json={**body, "ignore_eos": True})
        if reply.status_code != 200:
            return f"error {reply.status_code} {reply.text[:200]}"
        got = reply.json()["choices"][0]["logprobs"]
        likeliest = torch.tensor(logits, dtype=torch.float64).log_softmax(0).topk(TOP).values.tolist()
        first = sorted(got["top_logprobs"][0].values(), reverse=True)[:TOP]
        near = all(math.isclose(a, b, abs_tol=1e-3) for a, b in zip(first, likeliest, strict=True))
        words = [f"t{token}" if token else "<unk>" for token in greedy]
        return "equal" if near and [token.strip() for token in got["tokens"]] == words else "other"


async def check_base(corpus: Path, base: str, cases: Sequence[dict[str, Any]]) -> list[CaseResult]:
    """The outcome of the base itself and of each case."""
    with tempfile.TemporaryDirectory() as data_dir:
        async with CorpusServer(corpus, base, Path(data_dir)) as server:
            return await server.run(cases)


def main() -> int:
    corpus = Path(sys.argv[1])
    bases = sys.argv[2:] or sorted(path.name for path in (corpus / "bases").iterdir())
    failed = 0
    for base in bases:
        started = time.monotonic()
        results = asyncio.run(check_base(corpus, base, cases_of(corpus, base)))
        wrong = [one for one in results if not one.ok]
        counts = ", ".join(
            f"{sum(one.outcome.startswith(kind) for one in results)} {kind}" for kind in ("equal", "refused")
        )
        print(f"{base}: {counts}, {len(wrong)} unexpected, {time.monotonic() - started:.0f} s", flush=True)
        for one in wrong:
            print(f"  UNEXPECTED {one.id}: must {one.must}, {one.outcome}")
        failed += len(wrong)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
