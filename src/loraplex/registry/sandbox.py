"""Validation of an adapter in a child process with limits: whatever its bytes do to the parser, the server goes on.

The child (`sandbox_child.py`) gets its order as JSON on standard input, an environment without secrets and no open
files, sets its own limits, reads the two staged files and answers in JSON. Nothing is ever unpickled.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import BinaryIO

from loraplex.adapters import AdapterLimits
from loraplex.core import AdapterDigest, AdapterRefused, BaseDescription, ConfigError, RefusalReason
from loraplex.core.registry_errors import ValidatorFailed
from loraplex.registry.blobs import StagedBlob, is_blob_key
from loraplex.registry.types import AdapterFacts

_CHILD = Path(__file__).with_name("sandbox_child.py")
_MAX_ANSWER_BYTES = 2**20
_BYTES_PER_BYTE = 3  # of memory for each byte of the file: itself, and copies while values are looked at


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """What one validation may use. Raises ConfigError if a limit cannot work."""

    memory_bytes: int = 2**30  # of address space, beside three times the size of the files
    cpu_s: int = 120
    wall_s: float = 180.0

    def __post_init__(self) -> None:
        for name, value, least in (("memory_bytes", self.memory_bytes, 2**28), ("cpu_s", self.cpu_s, 1)):
            if value < least:
                raise ConfigError(f"{name} of the sandbox must be at least {least}, got {value}.")
        if not 0 < self.wall_s < 86_400:
            raise ConfigError(f"wall_s of the sandbox must be above 0 and below 86400, got {self.wall_s}.")


def validate_in_subprocess(
    config: StagedBlob, weights: StagedBlob, base: BaseDescription, limits: AdapterLimits, sandbox: SandboxLimits
) -> AdapterFacts:
    """Check two staged files against a base, in a child process. Blocks.

    Raises AdapterRefused, with TOO_LARGE where a limit of the sandbox was met, and ValidatorFailed.
    """
    order = _order(config, weights, base, limits, sandbox)
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stdout:
        stdin.write(json.dumps(order).encode())
        stdin.seek(0)
        status = _run(stdin, stdout, sandbox)
        stdout.seek(0)
        answer = stdout.read(_MAX_ANSWER_BYTES + 1)
    if status != 0:
        raise _ended(status, sandbox)
    return _facts(answer, sandbox)


def _order(
    config: StagedBlob, weights: StagedBlob, base: BaseDescription, limits: AdapterLimits, sandbox: SandboxLimits
) -> Mapping[str, object]:
    file_bytes = config.ref.num_bytes + weights.ref.num_bytes
    return {
        "memory_bytes": sandbox.memory_bytes + _BYTES_PER_BYTE * file_bytes,
        "cpu_s": sandbox.cpu_s,
        "answer_bytes": _MAX_ANSWER_BYTES,
        "files": [[str(blob.path), blob.ref.key, blob.ref.num_bytes] for blob in (config, weights)],
        "max_rank": limits.max_rank,
        "max_bytes": limits.max_bytes,
        "base": {
            "name": base.name,
            "fingerprint": base.fingerprint,
            "model_type": base.model_type,
            "vocab_size": base.vocab_size,
            "num_layers": base.num_layers,
            "tied_embeddings": base.tied_embeddings,
            "sites": [list(astuple(site)) for site in base.sites],
        },
    }


def _run(stdin: BinaryIO, stdout: BinaryIO, sandbox: SandboxLimits) -> int:
    """Exit status of the child; negative for the signal that ended it. Raises AdapterRefused after `wall_s`."""
    process = subprocess.Popen(  # noqa: S603  (our own file, by Python's own path)
        [sys.executable, "-P", "-s", str(_CHILD)],
        stdin=stdin,
        stdout=stdout,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env=_environment(),
        close_fds=True,
        start_new_session=True,
    )
    try:
        return process.wait(sandbox.wall_s)
    except subprocess.TimeoutExpired:
        raise _too_large(f"more than {sandbox.wall_s:g} s", "wall_s") from None
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _environment() -> Mapping[str, str]:
    """Where to find Python's packages, and one thread; nothing else of ours."""
    paths = os.pathsep.join(path for path in sys.path if path)
    return {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


def _ended(status: int, sandbox: SandboxLimits) -> AdapterRefused | ValidatorFailed:
    if status == -signal.SIGXCPU:
        return _too_large(f"more than {sandbox.cpu_s} s of processor time", "cpu_s")
    how = f"signal {-status}" if status < 0 else f"status {status}"
    return ValidatorFailed(f"The process that checks adapters ended with {how}.")


def _too_large(what: str, knob: str) -> AdapterRefused:
    message = f"Checking the adapter took {what}, which is the limit ({knob} of the sandbox)."
    return AdapterRefused(RefusalReason.TOO_LARGE, message)


def _facts(answer: bytes, sandbox: SandboxLimits) -> AdapterFacts:
    """The child's answer, believed in nothing but its form."""
    try:
        fields = json.loads(answer)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise ValidatorFailed("The process that checks adapters gave no answer that can be read.")
    if fields.get("out_of_memory") is True:
        raise _too_large("more memory than was given", f"memory_bytes, {sandbox.memory_bytes},")
    if "refused" in fields:
        raise _refusal(fields)
    digest, rank, num_bytes, targets, declared, names_base = (
        fields.get(name) for name in ("digest", "max_rank", "num_bytes", "targets", "declared_base", "names_base")
    )
    if not (
        isinstance(digest, str)
        and is_blob_key(digest)
        and isinstance(rank, int)
        and isinstance(num_bytes, int)
        and isinstance(targets, list)
        and all(isinstance(target, str) for target in targets)
        and (declared is None or isinstance(declared, str))
        and isinstance(names_base, bool)
    ):
        raise ValidatorFailed("The process that checks adapters gave an answer of another form.")
    return AdapterFacts(AdapterDigest(digest), rank, num_bytes, tuple(targets), declared, names_base)


def _refusal(fields: Mapping[str, object]) -> AdapterRefused | ValidatorFailed:
    reason, message, subject = (fields.get(name) for name in ("refused", "message", "subject"))
    if reason not in {known.value for known in RefusalReason} or not isinstance(message, str):
        return ValidatorFailed("The process that checks adapters refused without a known reason.")
    return AdapterRefused(RefusalReason(str(reason)), message, subject if isinstance(subject, str) else None)
