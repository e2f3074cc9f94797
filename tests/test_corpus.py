"""The conformance corpus: no case silently wrong, none crashes, everything plain is equal."""

import asyncio
import os
from pathlib import Path

import pytest

from .corpus_over_http import cases_of, check_base
from .run_corpus import run_checker

CORPUS = Path(os.environ.get("LORAPLEX_CORPUS", Path(__file__).parents[2] / "shared" / "corpus"))

pytestmark = pytest.mark.skipif(not (CORPUS / "manifest.json").exists(), reason=f"no corpus at {CORPUS}")


def test_every_adapter_is_equal_to_its_golden_or_refused_with_its_reason() -> None:
    report = run_checker(CORPUS, "--stub", "loraplex.testing.corpus:run", "--greedy")
    assert report.unexpected == []
    verdicts = {one["verdict"] for one in report.results}
    assert verdicts <= {"equal", "refused", "REFUSED_VALID"}
    equal = [one for one in report.results if one["verdict"] == "equal"]
    assert len(equal) >= 40, "the run was hollow"
    reasons = [one["warning"] for one in report.results if one["warning"] and "BASE_MISMATCH" not in one["warning"]]
    assert reasons == []


def test_scenarios_and_names_hold() -> None:
    report = run_checker(CORPUS, "--server", "loraplex.testing.corpus:make_server")
    assert report.unexpected == []
    assert sum(one["ok"] for one in report.results) >= 40, "the run was hollow"


SMALL = ("gemma2-t", "llama-u2", "mistral-u", "phi3-u", "qwen2-u", "qwen3-t")
LARGE = ("gemma3-t", "llama-t", "llama-u")


@pytest.mark.parametrize("base", [*SMALL, *(pytest.param(base, marks=pytest.mark.slow) for base in LARGE)])
def test_uploaded_adapters_answer_as_their_goldens_in_mixed_batches(base: str) -> None:
    """Through the admin API, the validator's process, the comparison and `/v1/completions`."""
    if not (CORPUS / "bases" / base).exists():
        pytest.skip(f"no base {base} in this corpus")
    results = asyncio.run(check_base(CORPUS, base, cases_of(CORPUS, base)))
    assert [one for one in results if not one.ok] == []
    assert sum(one.outcome == "equal" for one in results) >= 3, "the run was hollow"
