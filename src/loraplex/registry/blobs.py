"""What an artifact store is: files named by the sha256 of their bytes, written once, hashed again at every read."""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from loraplex.core import InvalidRequest
from loraplex.core.registry_errors import ArtifactCorrupt
from loraplex.registry.types import BlobKey, BlobRef

_KEY = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class StagedBlob:
    """A file that was written durably under a name of its own and is not in the store yet."""

    ref: BlobRef
    path: Path


@dataclass(frozen=True, slots=True)
class StoredBlob:
    """A file in the store. `modified_at` in unix seconds."""

    key: BlobKey
    modified_at: float


class BlobStore(Protocol):
    """Stores files by their hash. Methods may be called from any thread; all raise StoreUnavailable."""

    def stage(self, data: bytes | memoryview) -> StagedBlob:
        """Write to a temporary file, durably. Raises StoreFull, StoreReadOnly."""
        ...

    def discard(self, staged: StagedBlob) -> None:
        """Remove a temporary file, if it is still there."""
        ...

    def publish(self, staged: StagedBlob) -> None:
        """Put a staged file into the store, durably, in one step. Raises StoreFull, StoreReadOnly."""
        ...

    def modified_at(self, key: BlobKey) -> float | None:
        """When the file was put there, in unix seconds; None if it is not there. It is not read."""
        ...

    def get(self, ref: BlobRef) -> memoryview:
        """The bytes, read-only. Raises ArtifactMissing, ArtifactCorrupt."""
        ...

    def list(self) -> Iterator[StoredBlob]:
        """All files."""
        ...

    def delete(self, key: BlobKey) -> None:
        """Remove a file, if it is there."""
        ...

    def sweep_staging(self, before: float) -> int:
        """Remove temporary files last changed before a time in unix seconds; returns how many."""
        ...

    def close(self) -> None: ...


def check_blob_key(text: str) -> BlobKey:
    """A key from text. Raises InvalidRequest for anything but 64 lower-case hex digits."""
    if _KEY.fullmatch(text) is None:
        raise InvalidRequest(f"A blob key has 64 lower-case hex digits, got {text!r:.80}.", "key")
    return BlobKey(text)


def is_blob_key(text: str) -> bool:
    return _KEY.fullmatch(text) is not None


def hash_blob(data: bytes | memoryview) -> BlobRef:
    """What a store calls these bytes."""
    return BlobRef(BlobKey(hashlib.sha256(data).hexdigest()), len(data))


def check_bytes(ref: BlobRef, data: bytes | memoryview) -> None:
    """Raise ArtifactCorrupt unless these are the bytes that the reference names."""
    if len(data) != ref.num_bytes or hash_blob(data) != ref:
        raise corrupt(ref, len(data))


def corrupt(ref: BlobRef, num_bytes: int) -> ArtifactCorrupt:
    """The error for a file that is not what its name says."""
    if num_bytes != ref.num_bytes:
        return ArtifactCorrupt(f"Artifact {ref.key} has {num_bytes} bytes in the store, not {ref.num_bytes}.")
    return ArtifactCorrupt(f"Artifact {ref.key} was changed in the store: its bytes have another hash.")
