"""The conformance corpus: no case silently wrong, none crashes, everything plain is equal."""

import os
from pathlib import Path

import pytest

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
