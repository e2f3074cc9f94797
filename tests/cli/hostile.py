"""Adapters that want to be more than data: every pickle among them makes a canary file if anything ever loads it."""

import io
import json
import os
import pickle
import struct
import subprocess
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.adapters.factories import make_config, make_tensors, with_header, write_safetensors

GOOD_CONFIG = json.dumps(make_config()).encode()
GOOD_WEIGHTS = write_safetensors(make_tensors())


@dataclass(frozen=True)
class Hostile:
    """Two files that no server may take."""

    name: str
    config: bytes
    weights: bytes


class _Call:
    """Pickles to a call of a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._reduced = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._reduced


def _gadgets(canary: Path) -> dict[str, _Call]:
    path = str(canary)
    return {
        "system": _Call(os.system, f"touch {path}"),
        "open": _Call(open, path, "w"),
        "eval": _Call(eval, f"open({path!r}, 'w')"),
        "exec": _Call(exec, f"open({path!r}, 'w')"),
        "mkdir": _Call(os.mkdir, path),
        "run": _Call(subprocess.call, ["touch", path]),
        "getattr": _Call(Path.touch, canary),
    }


def _zip(members: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return file.getvalue()


def _tar(members: dict[str, bytes], mode: str = "w") -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode) as archive:  # type: ignore[call-overload]
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


def _npz(gadget: _Call) -> tuple[bytes, bytes]:
    """An object array as .npy and in an .npz."""
    one, many = io.BytesIO(), io.BytesIO()
    array = np.array([gadget], dtype=object)
    np.save(one, array, allow_pickle=True)
    np.savez(many, weights=array)
    return one.getvalue(), many.getvalue()


def _disguised(payload: bytes) -> Iterator[tuple[str, bytes]]:
    """A payload as a whole file, and dressed up as safetensors."""
    size, header = struct.unpack("<Q", GOOD_WEIGHTS[:8])[0], GOOD_WEIGHTS[8:]
    yield "alone", payload
    yield "behind", GOOD_WEIGHTS + payload
    yield "before", payload + GOOD_WEIGHTS
    yield "as header", with_header(payload)
    yield "between", struct.pack("<Q", size) + header[:size] + payload + header[size:]


def _containers(canary: Path) -> Iterator[tuple[str, bytes]]:
    for name, gadget in _gadgets(canary).items():
        data = pickle.dumps(gadget, 2)
        yield f"torch zip {name}", _zip({"archive/data.pkl": data, "archive/version": b"3\n", "archive/data/0": b"0"})
        yield f"torch legacy {name}", pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2) + data
        yield f"nemo tar {name}", _tar({"model_config.yaml": b"!!python/object/apply:os.system", "weights.ckpt": data})
        npy, npz = _npz(gadget)
        yield f"npy {name}", npy
        yield f"npz {name}", npz
    data = pickle.dumps(_gadgets(canary)["system"], 2)
    yield "tar.gz", _tar({"../../escape": b"x", "weights.ckpt": data}, "w:gz")
    yield "zip slip", _zip({"../../escape": b"x", "..\\escape": b"x"})
    yield "h5", b"\x89HDF\r\n\x1a\n" + bytes(504) + data
    yield "onnx", b"\x08\x07\x12\x07pytorch" + data
    yield "gguf", b"GGUF\x03\x00\x00\x00" + bytes(16) + data


def _broken_headers() -> Iterator[tuple[str, bytes]]:
    size = struct.unpack("<Q", GOOD_WEIGHTS[:8])[0]
    yield "empty", b""
    yield "seven bytes", bytes(7)
    for declared in (0, 1, size - 1, size + 1, 10**8, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1):
        yield f"header of {declared}", struct.pack("<Q", declared) + GOOD_WEIGHTS[8:]
    yield "header too large", with_header(b"{" + b" " * (5 * 2**20) + b"}")
    yield "deep header", with_header(b'{"a":' * 50_000 + b"1" + b"}" * 50_000)
    yield "no object", with_header(b"[]")
    yield "duplicate", with_header(b'{"a": {}, "a": {}}')
    yield "terabytes", with_header(json.dumps({"a": _entry([2**40], [0, 2**42])}).encode())
    yield "overflow", with_header(json.dumps({"a": _entry([2**33, 2**33], [0, 4])}).encode(), bytes(4))
    yield "negative", with_header(json.dumps({"a": _entry([-1], [0, 4])}).encode(), bytes(4))
    yield "overlap", with_header(json.dumps({"a": _entry([1], [0, 4]), "b": _entry([1], [0, 4])}).encode(), bytes(4))
    yield "pickle dtype", with_header(json.dumps({"a": {**_entry([1], [0, 4]), "dtype": "OBJECT"}}).encode(), bytes(4))
    yield "cut", GOOD_WEIGHTS[:-1]


def _entry(shape: list[int], offsets: list[int]) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": offsets}


def _configs(canary: Path) -> Iterator[tuple[str, bytes]]:
    for name, gadget in _gadgets(canary).items():
        yield f"pickled config {name}", pickle.dumps(gadget, 4)
    yield "code in config", json.dumps(make_config(auto_map={"AutoModel": "x.py--x"}, trust_remote_code=True)).encode()
    yield "yaml config", f"!!python/object/apply:os.system ['touch {canary}']".encode()
    yield "deep config", b'{"a":' * 50_000 + b"1" + b"}" * 50_000
    yield "twice in config", GOOD_CONFIG[:-1] + b', "r": 2}'
    yield "config of another type", json.dumps(make_config(peft_type="IA3")).encode()
    yield "empty config", b""


def hostile_files(canary: Path) -> Iterator[Hostile]:
    """Over 120 cases, each with a name of its own."""
    for name, gadget in _gadgets(canary).items():
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            yield Hostile(f"pickle {name} {protocol}", GOOD_CONFIG, pickle.dumps(gadget, protocol))
    for how, data in _disguised(pickle.dumps(_gadgets(canary)["system"], 2)):
        yield Hostile(f"pickle {how}", GOOD_CONFIG, data)
    for how, data in _disguised(_zip({"archive/data.pkl": pickle.dumps(_gadgets(canary)["open"], 2)})):
        yield Hostile(f"zip {how}", GOOD_CONFIG, data)
    for name, data in (*_containers(canary), *_broken_headers()):
        yield Hostile(name, GOOD_CONFIG, data)
    for name, data in _configs(canary):
        yield Hostile(name, data, GOOD_WEIGHTS)


def leftovers(data_dir: Path) -> list[str]:
    """Files of uploads and publishing that are still in a data directory."""
    folders = (data_dir / "uploads", data_dir / "artifacts" / "tmp", data_dir / "artifacts" / "blobs")
    return [str(path) for folder in folders if folder.is_dir() for path in folder.rglob("*")]
