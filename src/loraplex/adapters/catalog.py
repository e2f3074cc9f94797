"""The adapter names of one server: which name stands for which exact weights at this moment."""

import re
import threading
from dataclasses import dataclass

from loraplex.adapters.refusal import show
from loraplex.adapters.types import Adapter
from loraplex.core import AdapterRef, AdapterRefused, ModelNotFound, RefusalReason
from loraplex.core.limits import MAX_ADAPTER_NAME_CHARS

_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_ADAPTER_NAME_CHARS - 1}}}")


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One name and what is known of its current version."""

    ref: AdapterRef
    rank: int  # largest of its modules
    targets: tuple[str, ...]
    num_bytes: int
    declared_base: str | None
    created: float  # unix time in seconds, as given to `add`


class AdapterCatalog:
    """Names, versions and digests. Every method may be called from any thread.

    Versions of a name count up from 1 and are never used again, also after the name was removed.
    """

    __slots__ = ("_base_name", "_entries", "_lock", "_versions")

    def __init__(self, base_name: str) -> None:
        self._base_name = base_name
        self._lock = threading.Lock()
        self._entries: dict[str, CatalogEntry] = {}
        self._versions: dict[str, int] = {}

    def check_name(self, name: str, *, replace: bool = False) -> None:
        """Raise AdapterRefused unless `add` would take the name now: NAME_INVALID or NAME_CONFLICT."""
        with self._lock:
            self._check_name(name, replace)

    def add(self, name: str, adapter: Adapter, *, created: float, replace: bool = False) -> AdapterRef:
        """Give a name to an adapter; with `replace` also a taken one, as a new version. Raises as `check_name`."""
        with self._lock:
            self._check_name(name, replace)
            version = self._versions.get(name, 0) + 1
            ref = AdapterRef(name, version, adapter.digest)
            entry = CatalogEntry(
                ref, adapter.max_rank, adapter.targets, adapter.num_bytes, adapter.declared_base, created
            )
            self._versions[name] = version
            self._entries[name] = entry
            return ref

    def remove(self, name: str) -> AdapterRef:
        """Forget a name; returns what it stood for. Raises AdapterRefused (NOT_FOUND)."""
        with self._lock:
            entry = self._entries.pop(name, None)
        if entry is None:
            message = f"There is no adapter named {show(name)}."
            raise AdapterRefused(RefusalReason.NOT_FOUND, message, "lora_name")
        return entry.ref

    def resolve(self, model: str) -> AdapterRef | None:
        """What a request's `model` stands for: None for the base's exact name, else `name` or its current `name@N`.

        Raises ModelNotFound for anything else; the base is never a fallback.
        """
        if model == self._base_name:
            return None
        name, at, version = model.partition("@")
        with self._lock:
            entry = self._entries.get(name)
        if entry is None or (at and version != str(entry.ref.version)):
            raise ModelNotFound(model)
        return entry.ref

    def list(self) -> tuple[CatalogEntry, ...]:
        """All names, sorted."""
        with self._lock:
            return tuple(self._entries[name] for name in sorted(self._entries))

    def _check_name(self, name: str, replace: bool) -> None:
        if _NAME.fullmatch(name) is None or ".." in name:
            message = (
                f"Adapter name {show(name)} is not allowed: 1 to {MAX_ADAPTER_NAME_CHARS} of A-Z a-z 0-9 . _ -, "
                "starting with a letter or digit and without '..'."
            )
            raise AdapterRefused(RefusalReason.NAME_INVALID, message, "lora_name")
        if name == self._base_name:
            message = f"Adapter name {name!r} is the name of the base model; choose another name."
            raise AdapterRefused(RefusalReason.NAME_CONFLICT, message, "lora_name")
        if name in self._entries and not replace:
            message = f"Adapter name {name!r} is taken; choose another name."
            raise AdapterRefused(RefusalReason.NAME_CONFLICT, message, "lora_name")
