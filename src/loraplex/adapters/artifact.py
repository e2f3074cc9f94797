"""Reading an adapter directory: two file names, regular files only, each read once into memory.

Everything after this works on these bytes, so a file that is replaced or cut while we work cannot change the answer.
Pickled weights are never opened.
"""

import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from loraplex.adapters.limits import MAX_CONFIG_BYTES, AdapterLimits
from loraplex.core import AdapterRefused, RefusalReason

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_PICKLED_FILES = tuple(f"adapter_model.{suffix}" for suffix in ("bin", "pt", "pth", "pkl", "ckpt"))
_MAX_READ_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class Artifact:
    """The bytes of an adapter as they were at one moment."""

    config: bytes
    weights: memoryview  # read-only


def read_artifact(directory: Path, limits: AdapterLimits) -> Artifact:
    """Read both files of an adapter directory. Raises AdapterRefused; its message never shows what a file holds."""
    try:
        root = Path(os.path.realpath(directory, strict=True))
    except FileNotFoundError:
        message = f"The adapter directory {str(directory)!r} does not exist."
        raise AdapterRefused(RefusalReason.CONFIG_MISSING, message, str(directory)) from None
    except (OSError, ValueError):
        message = f"The adapter directory {str(directory)!r} cannot be reached."
        raise AdapterRefused(RefusalReason.CONFIG_MISSING, message, str(directory)) from None
    config = _read_file(root, CONFIG_FILE, RefusalReason.CONFIG_MISSING, MAX_CONFIG_BYTES)
    if not os.path.lexists(root / WEIGHTS_FILE):
        _refuse_pickled(root)
    weights = _read_file(root, WEIGHTS_FILE, RefusalReason.WEIGHTS_MISSING, limits.max_bytes)
    return Artifact(config=bytes(config), weights=weights)


def _refuse_pickled(root: Path) -> None:
    """Tell "only pickled weights" from "no weights". Looks at names only."""
    for name in _PICKLED_FILES:
        if os.path.lexists(root / name):
            message = f"The adapter has only {name}; pickled weights are never opened, save it as {WEIGHTS_FILE}."
            raise AdapterRefused(RefusalReason.WEIGHTS_UNSAFE_FORMAT, message, name)


def _read_file(root: Path, name: str, missing: RefusalReason, max_bytes: int) -> memoryview:
    """Read a regular file of the adapter directory exactly once, up to the size it had when opened."""
    path = _resolve(root, name, missing)
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        fd = os.open(path, flags)
    except OSError as error:
        raise AdapterRefused(missing, f"{name} cannot be opened: {_why(error)}.", name) from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise AdapterRefused(missing, f"{name} is not a regular file.", name)
        if status.st_size > max_bytes:
            message = f"{name} has {status.st_size} bytes; the limit is {max_bytes}."
            raise AdapterRefused(RefusalReason.TOO_LARGE, message, name)
        return _read_exactly(fd, status.st_size, name, missing)
    finally:
        os.close(fd)


def _read_exactly(fd: int, num_bytes: int, name: str, missing: RefusalReason) -> memoryview:
    view = memoryview(bytearray(num_bytes))
    done = 0
    while done < num_bytes:
        try:
            got = os.readv(fd, [view[done : done + _MAX_READ_BYTES]])
        except OSError as error:
            raise AdapterRefused(missing, f"{name} cannot be read: {_why(error)}.", name) from None
        if got == 0:
            raise AdapterRefused(missing, f"{name} was cut while it was read, at byte {done} of {num_bytes}.", name)
        done += got
    return view.toreadonly()


def _resolve(root: Path, name: str, missing: RefusalReason) -> Path:
    """The real path of a file; symbolic links may only lead where `_link_allowed` says."""
    try:
        path = Path(os.path.realpath(root / name, strict=True))
    except OSError as error:
        raise AdapterRefused(missing, f"{name} is missing or cannot be reached: {_why(error)}.", name) from None
    if not _link_allowed(root, path):
        message = f"{name} is a symbolic link that leaves the adapter directory."
        raise AdapterRefused(RefusalReason.PATH_ESCAPE, message, name)
    return path


def _link_allowed(root: Path, path: Path) -> bool:
    """True inside the adapter directory, and for a blob of the same repository in huggingface_hub's cache.

    That cache is laid out `models--<repo>/snapshots/<revision>/.../file -> models--<repo>/blobs/<hash>`.
    """
    if path.is_relative_to(root):
        return True
    for revision in (root, *root.parents):
        repository = revision.parent.parent
        if revision.parent.name == "snapshots" and repository.name.startswith("models--"):
            return path.parent == repository / "blobs"
    return False


def _why(error: OSError) -> str:
    """The system's word for an error, without paths."""
    return os.strerror(error.errno or errno.EIO)
