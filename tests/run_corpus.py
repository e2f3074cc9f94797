"""Run a LoRA conformance corpus through both entry points and say what it means for supported families.

Usage: python tests/run_corpus.py CORPUS [checker options]

Exit code 1 if a case is silently wrong, crashes, serves what it must refuse, or is refused although its base is of a
supported family.
"""

import json
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loraplex.model import FAMILIES


@dataclass(frozen=True)
class CorpusReport:
    """Results of one checker run; `unexpected` are those that no unsupported base explains."""

    results: list[dict[str, Any]]
    unexpected: list[dict[str, Any]]
    log: str


def _unsupported(corpus: Path) -> set[str]:
    """Bases, and scenarios on bases, whose family is not supported: they are refused as a whole."""
    bases = json.loads((corpus / "manifest.json").read_text())["bases"]
    refused = {name for name, base in bases.items() if base["model_type"] not in FAMILIES}
    scenarios = json.loads((corpus / "scenarios.json").read_text())["scenarios"]
    return refused | {f"scenario/{one['id']}" for one in scenarios if one["base"] in refused}


def run_checker(corpus: Path, mode: str, target: str, *options: str) -> CorpusReport:
    """Run check_corpus.py with `--stub` or `--server` and read its results."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "results.json"
        command = [sys.executable, str(corpus / "check_corpus.py"), mode, target, "--json", str(out), *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not out.exists():
            raise RuntimeError(f"the checker did not run: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        results = json.loads(out.read_text())["results"]
    refused = _unsupported(corpus)
    unexpected = [one for one in results if not one["ok"] and not _is_base_refusal(one, refused)]
    return CorpusReport(results, unexpected, done.stdout)


def _is_base_refusal(result: dict[str, Any], refused: set[str]) -> bool:
    if result["id"] in refused:
        return "ARCHITECTURE_UNSUPPORTED" in result["detail"]
    return result["id"].split("/")[0] in refused and result["verdict"] == "REFUSED_VALID"


def main() -> int:
    corpus, options = Path(sys.argv[1]), sys.argv[2:]
    failed = False
    for mode, target in (("--stub", "run"), ("--server", "make_server")):
        extra = ["--greedy", *options] if mode == "--stub" else options
        report = run_checker(corpus, mode, f"loraplex.testing.corpus:{target}", *extra)
        verdicts = Counter((one["must"], one["verdict"]) for one in report.results)
        print(f"{mode} {target}: {len(report.results)} checks")
        for (must, verdict), count in sorted(verdicts.items()):
            print(f"  must {must:17} {verdict:16} {count}")
        explained = sum(not one["ok"] for one in report.results) - len(report.unexpected)
        print(f"  {explained} on bases of families not supported yet, {len(report.unexpected)} unexpected")
        for one in report.unexpected:
            print(f"  UNEXPECTED {one['id']}: must {one['must']}, {one['verdict']}: {one['detail']}")
        failed |= bool(report.unexpected)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
