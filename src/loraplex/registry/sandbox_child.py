"""The child process of `sandbox`. Run as a file, not imported: it loads nothing of the registry."""

import hashlib
import json
import os
import resource
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loraplex.core import BaseDescription

_CHUNK_BYTES = 2**26
METADATA_KEY = "base_fingerprint"


def main() -> None:
    """Read the order, limit this process, check, answer. A crash of the parser ends with a status other than 0."""
    order = json.loads(sys.stdin.buffer.read())
    _limit(order)
    try:
        answer = _check(order)
    except MemoryError:
        answer = {"out_of_memory": True}
    sys.stdout.write(json.dumps(answer))
    sys.stdout.flush()


def _limit(order: Mapping[str, Any]) -> None:
    """No more memory, time, files or bytes written than the order says; no core dump that would hold tenants' bytes."""
    for kind, soft, hard in (
        (resource.RLIMIT_AS, order["memory_bytes"], order["memory_bytes"]),
        (resource.RLIMIT_CPU, order["cpu_s"], order["cpu_s"] + 1),
        (resource.RLIMIT_FSIZE, order["answer_bytes"], order["answer_bytes"]),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_NOFILE, 64, 64),
    ):
        allowed = resource.getrlimit(kind)[1]  # a process may lower this, never raise it
        if allowed != resource.RLIM_INFINITY:
            soft, hard = min(soft, allowed), min(hard, allowed)
        resource.setrlimit(kind, (soft, hard))


def _check(order: Mapping[str, Any]) -> Mapping[str, object]:
    from loraplex.adapters import AdapterLimits, Artifact, check_artifact
    from loraplex.core import AdapterRefused, BaseDescription, BaseSite

    config, weights = (_read(*file) for file in order["files"])
    fields = dict(order["base"])
    sites = tuple(BaseSite(*site) for site in fields.pop("sites"))
    base = BaseDescription(**fields, sites=sites)
    try:
        names_base = names_the_base(weights, base)
        adapter = check_artifact(
            Artifact(bytes(config), weights), base, AdapterLimits(order["max_rank"], order["max_bytes"])
        )
    except AdapterRefused as refused:
        return {"refused": refused.reason_code, "message": refused.message, "subject": refused.subject}
    return {
        "digest": adapter.digest,
        "max_rank": adapter.max_rank,
        "num_bytes": adapter.num_bytes,
        "targets": list(adapter.targets),
        "declared_base": adapter.declared_base,
        "names_base": names_base,
    }


def names_the_base(weights: memoryview, base: "BaseDescription") -> bool:
    """Whether the weights' metadata holds the base's fingerprint. Raises AdapterRefused (BASE_MISMATCH) for another's.

    What is wrong with a header is for `check_artifact` to say; here it names nothing.
    """
    from loraplex.adapters import read_metadata
    from loraplex.core import AdapterRefused, RefusalReason

    try:
        named = read_metadata(weights).get(METADATA_KEY)
    except AdapterRefused:
        return False
    if named is not None and named != base.fingerprint:
        message = (
            f"The metadata of adapter_model.safetensors names the base {named!r:.80}, "
            f"but {base.name!r} has the fingerprint {base.fingerprint[:12]}...."
        )
        raise AdapterRefused(RefusalReason.BASE_MISMATCH, message, METADATA_KEY)
    return named is not None


def _read(path: str, sha256: str, num_bytes: int) -> memoryview:
    """A staged file; it must be the very bytes that will be published."""
    view = memoryview(bytearray(num_bytes))
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    done = 0
    while done < num_bytes and (got := os.readv(fd, [view[done : done + _CHUNK_BYTES]])):
        done += got
    if done != num_bytes or hashlib.sha256(view).hexdigest() != sha256:
        raise SystemExit(3)
    return view.toreadonly()


if __name__ == "__main__":
    main()
