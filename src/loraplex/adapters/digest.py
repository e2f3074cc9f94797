"""The identity of an adapter version: a sha256 over exactly what changes its answers.

Canonical form, every field being `tag (1 byte) | length (u64 little-endian) | bytes`:

    "V" format name
    then for each module, sorted by site name:
    "S" site name, UTF-8
    "R" rank, u64 little-endian
    "F" scale, IEEE double little-endian
    then for A and B, in this order:
    "D" dtype name, ASCII
    "H" shape, u64 little-endian each
    "W" data as stored, little-endian row-major

Tensor order, metadata, name prefixes and config fields without effect do not enter; one flipped bit of a weight does.
"""

import hashlib
import struct
from collections.abc import Iterable
from typing import Protocol

from loraplex.adapters.types import AdapterModule, TensorView
from loraplex.core import AdapterDigest

_FORMAT = b"loraplex-adapter-1"


class _Hash(Protocol):
    def update(self, data: bytes | memoryview, /) -> None: ...


def digest_modules(modules: Iterable[AdapterModule]) -> AdapterDigest:
    """Digest of an adapter made of these modules, in any order."""
    sha = hashlib.sha256()
    _add(sha, b"V", _FORMAT)
    for module in sorted(modules, key=lambda module: module.site.name):
        _add(sha, b"S", module.site.name.encode())
        _add(sha, b"R", struct.pack("<Q", module.rank))
        _add(sha, b"F", struct.pack("<d", module.scale))
        _add_tensor(sha, module.a)
        _add_tensor(sha, module.b)
    return AdapterDigest(sha.hexdigest())


def _add_tensor(sha: _Hash, tensor: TensorView) -> None:
    _add(sha, b"D", tensor.dtype.encode())
    _add(sha, b"H", struct.pack(f"<{len(tensor.shape)}Q", *tensor.shape))
    _add(sha, b"W", tensor.data)


def _add(sha: _Hash, tag: bytes, data: bytes | memoryview) -> None:
    sha.update(tag + struct.pack("<Q", len(data)))
    sha.update(data)
