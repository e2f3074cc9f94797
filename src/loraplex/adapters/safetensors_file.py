"""A strict reader of the safetensors format over bytes in memory.

Layout: u64 little-endian header length, that many bytes of JSON, then the tensors' data. Stricter than the format's
own library: no repeated keys, no gap anywhere, caps on header, tensors and dimensions. What it accepts, the library
accepts too.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from loraplex.adapters.limits import MAX_HEADER_BYTES, MAX_TENSOR_DIMS, MAX_TENSORS
from loraplex.adapters.refusal import show, tensor_refused
from loraplex.adapters.strict_json import JsonError, JsonObject, parse_json_object
from loraplex.adapters.types import TensorView
from loraplex.core import AdapterRefused, RefusalReason

SERVED_DTYPES = ("F32", "F16", "BF16")

_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}
# Where all these bits are set the value is an infinity or NaN.
_EXPONENT = {"F32": ("<u4", 0x7F800000), "F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80)}
_CHUNK_BYTES = 2**20  # stays in the cache between the two passes
_LENGTH_BYTES = 8
_ZIP_MAGIC = b"PK\x03\x04"
_ENTRY_KEYS = {"dtype", "shape", "data_offsets"}


def read_tensors(weights: memoryview) -> tuple[TensorView, ...]:
    """Every tensor of a file, in file order of the data. Raises AdapterRefused."""
    header_end = _header_end(weights)
    header = _parse_header(bytes(weights[_LENGTH_BYTES:header_end]))
    data = weights[header_end:]
    entries = [_Entry.read(name, value) for name, value in header.pairs if name != "__metadata__"]
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    position = 0
    for entry in entries:
        if entry.begin != position or entry.end < entry.begin or entry.end > len(data):
            problem = f"claims bytes {show([entry.begin, entry.end])}, but its data must start at {position}"
            raise tensor_refused(RefusalReason.WEIGHTS_CORRUPT, entry.name, f"{problem} and end by {len(data)}")
        position = entry.end
    if position != len(data):
        raise _corrupt(f"its tensors cover {position} of {len(data)} data bytes")
    return tuple(entry.view(data) for entry in entries)


def read_metadata(weights: bytes | memoryview) -> Mapping[str, str]:
    """The `__metadata__` of a file, empty if it has none: what somebody claimed who wrote the file.

    Only the header is read, within the limits of `read_tensors`. Raises AdapterRefused where that does for a header.
    """
    view = memoryview(weights)
    return _metadata(_parse_header(bytes(view[_LENGTH_BYTES : _header_end(view)])))


def check_finite(tensor: TensorView) -> None:
    """Raise AdapterRefused (NONFINITE) if an F32, F16 or BF16 tensor holds a NaN or an infinity."""
    dtype, exponent = _EXPONENT[tensor.dtype]
    for start in range(0, len(tensor.data), _CHUNK_BYTES):
        bits = np.frombuffer(tensor.data[start : start + _CHUNK_BYTES], dtype=dtype)
        if int((bits & bits.dtype.type(exponent)).max()) == exponent:
            raise tensor_refused(RefusalReason.NONFINITE, tensor.name, "holds a NaN or an infinity")


@dataclass(frozen=True, slots=True)
class _Entry:
    """One header entry whose fields have been checked one by one, not yet against the others."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @classmethod
    def read(cls, name: str, value: object) -> "_Entry":
        """Check the form of an entry and that its shape and dtype fill its bytes."""
        fields = _entry_fields(name, value)
        dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
        if not isinstance(dtype, str) or dtype not in _BITS:
            raise tensor_refused(RefusalReason.DTYPE_UNSUPPORTED, name, f"has the unknown dtype {show(dtype)}")
        shape_ints, offset_ints = _sizes(shape), _sizes(offsets)
        if shape_ints is None or len(shape_ints) > MAX_TENSOR_DIMS:
            problem = f"has the shape {show(shape)}, not at most {MAX_TENSOR_DIMS} sizes from 0 on"
            raise tensor_refused(RefusalReason.WEIGHTS_CORRUPT, name, problem)
        if offset_ints is None or len(offset_ints) != 2:
            problem = f"has the data_offsets {show(offsets)}, not two positions"
            raise tensor_refused(RefusalReason.WEIGHTS_CORRUPT, name, problem)
        begin, end = offset_ints
        if math.prod(shape_ints) * _BITS[dtype] != (end - begin) * 8:
            problem = f"has {end - begin} bytes, which is not what {dtype} {show(list(shape_ints))} takes"
            raise tensor_refused(RefusalReason.WEIGHTS_CORRUPT, name, problem)
        return cls(name, dtype, shape_ints, begin, end)

    def view(self, data: memoryview) -> TensorView:
        return TensorView(self.name, self.dtype, self.shape, data[self.begin : self.end])


def _corrupt(problem: str) -> AdapterRefused:
    message = f"adapter_model.safetensors is not a well-formed safetensors file: {problem}."
    return AdapterRefused(RefusalReason.WEIGHTS_CORRUPT, message, "adapter_model.safetensors")


def _header_end(weights: memoryview) -> int:
    """Position of the first data byte. Nothing is allocated by what the file claims."""
    if len(weights) < _LENGTH_BYTES:
        raise _corrupt(f"it has {len(weights)} bytes and needs at least {_LENGTH_BYTES}")
    header_len = int.from_bytes(weights[:_LENGTH_BYTES], "little")
    limit = min(MAX_HEADER_BYTES, len(weights) - _LENGTH_BYTES)
    if 2 <= header_len <= limit and weights[_LENGTH_BYTES] == ord("{"):
        return _LENGTH_BYTES + header_len
    # "\x80" and a protocol number open a pickle; torch.save writes those inside a zip file.
    if weights[:4] == _ZIP_MAGIC or (weights[0] == 0x80 and weights[1] <= 5):
        message = "adapter_model.safetensors looks like pickled weights, which are never opened."
        raise AdapterRefused(RefusalReason.WEIGHTS_UNSAFE_FORMAT, message, "adapter_model.safetensors")
    if 2 <= header_len <= limit:
        raise _corrupt("its header does not start with '{'")
    raise _corrupt(f"it claims a header of {header_len} bytes where 2 to {limit} are possible")


def _parse_header(data: bytes) -> JsonObject:
    try:
        header = parse_json_object(data)
    except JsonError as error:
        raise _corrupt(f"its header {error}") from None
    num_tensors = sum(name != "__metadata__" for name, _ in header.pairs)
    if num_tensors > MAX_TENSORS:
        message = f"adapter_model.safetensors has {num_tensors} tensors; the limit is {MAX_TENSORS}."
        raise AdapterRefused(RefusalReason.TOO_LARGE, message, "adapter_model.safetensors")
    repeated = header.repeated_key()
    if repeated is not None:
        raise tensor_refused(RefusalReason.KEY_DUPLICATE, repeated, "occurs twice in the header")
    _metadata(header)
    return header


def _metadata(header: JsonObject) -> dict[str, str]:
    """Metadata carries no meaning for the tensors, but must be strings once each, as the format wants."""
    metadata = header.as_dict().get("__metadata__", JsonObject(()))
    if not isinstance(metadata, JsonObject):
        raise _corrupt("its __metadata__ is not an object of strings")
    strings = {key: value for key, value in metadata.pairs if isinstance(value, str)}
    if metadata.repeated_key() is not None:
        raise _corrupt("its __metadata__ has a key twice")
    if len(strings) != len(metadata.pairs):
        raise _corrupt("its __metadata__ is not an object of strings")
    return strings


def _entry_fields(name: str, value: object) -> dict[str, object]:
    if not isinstance(value, JsonObject) or value.repeated_key() is not None or set(value.as_dict()) != _ENTRY_KEYS:
        problem = "has a header entry other than dtype, shape and data_offsets once each"
        raise tensor_refused(RefusalReason.WEIGHTS_CORRUPT, name, problem)
    return value.as_dict()


def _sizes(value: object) -> tuple[int, ...] | None:
    """A list of ints that fit an unsigned 64-bit number, or None. A bool is not an int."""
    if not isinstance(value, list):
        return None
    sizes = [item for item in value if isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 2**64]
    return tuple(sizes) if len(sizes) == len(value) else None
