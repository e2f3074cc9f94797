"""Artifacts in S3, Google Cloud Storage or Azure, through obstore. What a store answers is not trusted.

Objects are created only if they do not exist, one put each; an object that exists is read and hashed, and written over
if it is not what its name says. Credentials come from the environment, as each provider's tools read it.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError
from obstore.store import from_url

from loraplex.core import ConfigError
from loraplex.core.registry_errors import ArtifactCorrupt, ArtifactMissing, StoreUnavailable
from loraplex.registry.blobs import StagedBlob, StoredBlob, check_blob_key, check_bytes, corrupt, is_blob_key
from loraplex.registry.directory_store import DirectoryStore
from loraplex.registry.types import BlobKey, BlobRef

SCHEMES = frozenset({"s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss"})
_FOLDER = "blobs"
_CHUNK_BYTES = 8 * 2**20
_TIMEOUT = timedelta(seconds=60)
_RETRIES = {"max_retries": 4, "retry_timeout": timedelta(seconds=60)}


class ObjectStore:
    """A BlobStore in a bucket. Files are staged in a local directory."""

    __slots__ = ("_on_step", "_shown", "_staging", "_store")

    def __init__(
        self,
        url: str,
        staging: DirectoryStore,
        on_step: Callable[[str], None],
        options: Mapping[str, str],
    ) -> None:
        """`options` are settings of obstore, e.g. `endpoint`, `region`. Raises ConfigError."""
        parts = urlsplit(url)
        if parts.scheme not in SCHEMES:
            raise ConfigError(f"Artifact URLs of the kind {parts.scheme!r:.40} are not supported; use s3, gs or az.")
        if "@" in parts.netloc and parts.scheme not in ("abfs", "abfss"):
            raise ConfigError("The artifact URL holds credentials; give them in the environment instead.")
        settings: dict[str, Any] = dict(options)
        client: dict[str, Any] = {"timeout": _TIMEOUT}
        if str(settings.get("endpoint", "")).startswith("http://"):
            client["allow_http"] = True
        self._shown = f"{parts.scheme}://{parts.hostname or ''}{parts.path}"
        self._staging = staging
        self._on_step = on_step
        opened: Any = from_url
        try:
            self._store = opened(url, config=settings or None, client_options=client, retry_config=_RETRIES)
        except (BaseError, ValueError) as error:
            raise ConfigError(f"The artifact store {self._shown!r} cannot be used: {type(error).__name__}.") from None

    def stage(self, data: bytes | memoryview) -> StagedBlob:
        """See BlobStore."""
        return self._staging.stage(data)

    def discard(self, staged: StagedBlob) -> None:
        """See BlobStore."""
        self._staging.discard(staged)

    def publish(self, staged: StagedBlob) -> None:
        """See BlobStore."""
        try:
            self._put(staged.path, staged.ref.key, "create")
        except AlreadyExistsError:
            try:
                self.get(staged.ref)
            except (ArtifactCorrupt, ArtifactMissing):
                self._put(staged.path, staged.ref.key, "overwrite")
        self._on_step("blob.put")
        self.discard(staged)

    def _put(self, path: Path, key: BlobKey, mode: Literal["create", "overwrite"]) -> None:
        with self._failures(AlreadyExistsError):
            obstore.put(self._store, _path(key), path, mode=mode, use_multipart=False)

    def modified_at(self, key: BlobKey) -> float | None:
        """See BlobStore."""
        try:
            with self._failures(NotFoundError, FileNotFoundError):
                return obstore.head(self._store, _path(key))["last_modified"].timestamp()
        except (NotFoundError, FileNotFoundError):
            return None

    def get(self, ref: BlobRef) -> memoryview:
        """See BlobStore. Reads at most one byte more than is wanted, whatever length the store declares."""
        data = memoryview(bytearray(ref.num_bytes))
        done = 0
        try:
            with self._failures(NotFoundError, FileNotFoundError):
                for chunk in obstore.get(self._store, _path(ref.key)).stream(min_chunk_size=_CHUNK_BYTES):
                    view = memoryview(chunk)
                    if done + len(view) > len(data):
                        raise corrupt(ref, done + len(view))
                    data[done : done + len(view)] = view
                    done += len(view)
        except (NotFoundError, FileNotFoundError):
            raise ArtifactMissing(f"Artifact {ref.key} is not in the store.") from None
        if done != len(data):
            raise corrupt(ref, done)
        check_bytes(ref, data)
        return data.toreadonly()

    def list(self) -> Iterator[StoredBlob]:
        """See BlobStore."""
        with self._failures():
            for batch in obstore.list(self._store, prefix=_FOLDER):
                for item in batch:
                    name = item["path"].rpartition("/")[2]
                    if is_blob_key(name):
                        yield StoredBlob(BlobKey(name), item["last_modified"].timestamp())

    def delete(self, key: BlobKey) -> None:
        """See BlobStore."""
        with contextlib.suppress(NotFoundError, FileNotFoundError), self._failures(NotFoundError, FileNotFoundError):
            obstore.delete(self._store, _path(key))

    def sweep_staging(self, before: float) -> int:
        """See BlobStore."""
        return self._staging.sweep_staging(before)

    def close(self) -> None:
        self._staging.close()

    @contextlib.contextmanager
    def _failures(self, *let_pass: type[Exception]) -> Iterator[None]:
        """obstore's errors as ours; their texts, which may hold signed URLs, are not shown."""
        try:
            yield
        except let_pass:
            raise
        except (BaseError, OSError) as error:
            message = f"An operation in the artifact store {self._shown!r} failed: {type(error).__name__}."
            raise StoreUnavailable(message) from None


def _path(key: BlobKey) -> str:
    return f"{_FOLDER}/{check_blob_key(key)}"
