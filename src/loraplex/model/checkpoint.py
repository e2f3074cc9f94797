"""A Hugging Face checkpoint directory: its safetensors files, memory-mapped, and its fingerprint."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from loraplex.core import BaseFingerprint, BaseRefused, RefusalReason

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""

SERVED_DTYPES = ("F32", "F16", "BF16")
SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
FINGERPRINT_CACHE = ".loraplex-fingerprint.json"


def find_shards(directory: Path) -> tuple[Path, ...]:
    """The weight files, in order of name. Raises BaseRefused when there are none, or one is missing."""
    if (directory / INDEX_FILE).is_file():
        try:
            index = json.loads((directory / INDEX_FILE).read_text(encoding="utf-8"))
            names = sorted({os.fspath(name) for name in index["weight_map"].values()})
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise BaseRefused(
                RefusalReason.WEIGHTS_CORRUPT, f"{INDEX_FILE} is not a valid index.", INDEX_FILE
            ) from error
    elif (directory / SINGLE_FILE).is_file():
        names = [SINGLE_FILE]
    else:
        found = sorted(p.name for p in directory.glob("*.bin")) if directory.is_dir() else []
        if found:
            message = f"{directory} has only pickled weights ({found[0]}); convert them to safetensors."
            raise BaseRefused(RefusalReason.WEIGHTS_UNSAFE_FORMAT, message, found[0])
        message = f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}."
        raise BaseRefused(RefusalReason.WEIGHTS_MISSING, message, SINGLE_FILE)
    for name in names:
        if Path(name).name != name or not (directory / name).is_file():
            raise BaseRefused(RefusalReason.WEIGHTS_MISSING, f"The weight file {name!r} is missing.", name)
    return tuple(directory / name for name in names)


class Checkpoint:
    """Tensors of a checkpoint by name. Files are memory-mapped; a tensor is read when asked for."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.shards = find_shards(directory)
        self._files: dict[str, Any] = {}
        for shard in self.shards:
            try:
                handle = safe_open(str(shard), framework="pt")
                names = list(handle.keys())  # type: ignore[no-untyped-call]
            except Exception as error:
                message = f"{shard.name} is not a well-formed safetensors file."
                raise BaseRefused(RefusalReason.WEIGHTS_CORRUPT, message, shard.name) from error
            for name in names:
                if name in self._files:
                    message = f"The tensor {name} is in two weight files."
                    raise BaseRefused(RefusalReason.KEY_DUPLICATE, message, name)
                self._files[name] = handle

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._files))

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[name].get_slice(name).get_shape())

    def tensor(self, name: str) -> Tensor:
        """The tensor, mapped from its file. Raises BaseRefused when there is none of that name."""
        if name not in self._files:
            raise BaseRefused(RefusalReason.KEY_UNMATCHED, f"The checkpoint has no tensor {name}.", name)
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def check_names(self, expected: Mapping[str, tuple[int, ...]], ignorable: Iterable[str] = ()) -> None:
        """Raise BaseRefused unless the tensors are exactly the expected ones, by name and shape, and plain floats."""
        missing, extra = sorted(expected.keys() - self._files), sorted(self._files.keys() - expected - set(ignorable))
        if missing:
            message = f"The checkpoint lacks {len(missing)} tensors, first {missing[0]}."
            raise BaseRefused(RefusalReason.KEY_UNMATCHED, message, missing[0])
        if extra:
            message = f"The checkpoint has {len(extra)} tensors that this architecture does not use, first {extra[0]}."
            raise BaseRefused(RefusalReason.KEY_UNMATCHED, message, extra[0])
        for name, shape in expected.items():
            if self.shape(name) != shape:
                message = f"The tensor {name} has shape {list(self.shape(name))}; the config says {list(shape)}."
                raise BaseRefused(RefusalReason.SHAPE_MISMATCH, message, name)
            dtype = self._files[name].get_slice(name).get_dtype()
            if dtype not in SERVED_DTYPES:
                message = f"The tensor {name} has dtype {dtype}; only {', '.join(SERVED_DTYPES)} are served."
                raise BaseRefused(RefusalReason.DTYPE_UNSUPPORTED, message, name)


@dataclass(frozen=True, slots=True)
class _Stamp:
    """What a cached fingerprint is valid for: these very files, unchanged. No program can set the time of change of a
    file, and a copy has another number: a cache that travels with a copied or unpacked model counts for nothing."""

    files: tuple[tuple[str | int, ...], ...]  # of each: name, size, times of writing and change, device, number


def _stamp(shards: Iterable[Path]) -> _Stamp:
    stats = ((shard.name, shard.stat()) for shard in shards)
    return _Stamp(tuple((name, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_dev, s.st_ino) for name, s in stats))


def compute_fingerprint(checkpoint: Checkpoint, num_threads: int = os.cpu_count() or 1) -> BaseFingerprint:
    """sha256 over, for each tensor in order of name: name, dtype, shape and sha256 of the data, each length-prefixed.

    Independent of how the tensors are spread over files.
    """

    def of_tensor(name: str) -> tuple[bytes, ...]:
        tensor = checkpoint.tensor(name).contiguous()
        data = tensor.reshape(-1).view(torch.uint8).numpy()
        digest = hashlib.sha256(data.data).digest() if data.size else hashlib.sha256().digest()
        return name.encode(), str(tensor.dtype).encode(), repr(tuple(tensor.shape)).encode(), digest

    total = hashlib.sha256(b"loraplex-base-1")
    with ThreadPoolExecutor(num_threads) as workers:
        for fields in workers.map(of_tensor, checkpoint.names):
            for field in fields:
                total.update(len(field).to_bytes(8, "little") + field)
    return BaseFingerprint(total.hexdigest())


def base_fingerprint(checkpoint: Checkpoint, num_threads: int = os.cpu_count() or 1) -> BaseFingerprint:
    """The fingerprint, from the cache beside the weights where that was made for these very files (`_Stamp`)."""
    path, stamp = checkpoint.directory / FINGERPRINT_CACHE, _stamp(checkpoint.shards)
    try:
        cached = json.loads(path.read_text(encoding="utf-8"))
        if cached["files"] == [list(entry) for entry in stamp.files] and len(cached["fingerprint"]) == 64:
            return BaseFingerprint(cached["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # no cache, or one that another version wrote: compute
    fingerprint = compute_fingerprint(checkpoint, num_threads)
    _write_cache(path, {"files": stamp.files, "fingerprint": fingerprint})
    return fingerprint


def _write_cache(path: Path, content: dict[str, Any]) -> None:
    """Best effort: a read-only model folder only costs the hashing next time."""
    scratch = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        scratch.write_text(json.dumps(content), encoding="utf-8")
        scratch.replace(path)
    except OSError:
        with suppress(OSError):
            scratch.unlink()
