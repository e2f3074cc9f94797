"""The strict reader: what it takes is what the safetensors library takes, and less."""

import json
import pickle
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.adapters.safetensors_file import check_finite, read_metadata, read_tensors
from loraplex.adapters.types import TensorView
from loraplex.core import AdapterRefused

from .factories import tensor, with_header, write_safetensors


def read(data: bytes) -> tuple[TensorView, ...]:
    return read_tensors(memoryview(data))


def reason(data: bytes) -> str | None:
    try:
        read(data)
    except AdapterRefused as error:
        return error.reason_code
    return None


def one(entry: Any, data: bytes = bytes(8), **more: Any) -> bytes:
    return with_header(json.dumps({"x": entry, **more}).encode(), data)


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8), **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


def test_file_of_the_library_is_read_as_it_was_written() -> None:
    arrays = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.ones((4,), np.float16)}
    views = {view.name: view for view in read(safetensors.numpy.save(arrays, {"format": "np"}))}
    assert set(views) == {"a", "b"}
    assert views["b"].shape == (2, 3)
    assert views["b"].data == arrays["b"].tobytes()
    assert (views["a"].dtype, views["a"].data) == ("F16", arrays["a"].tobytes())


def test_metadata_is_read_from_the_header_alone() -> None:
    data = write_safetensors({"x": tensor((2,))}, {"base_fingerprint": "ab", "other": "{}"})
    assert read_metadata(data) == {"base_fingerprint": "ab", "other": "{}"}
    assert read_metadata(memoryview(data)[:-8]) == {"base_fingerprint": "ab", "other": "{}"}, "no tensor is needed"
    assert read_metadata(write_safetensors({"x": tensor((2,))})) == {}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        (2**22 + 1).to_bytes(8, "little") + b"{" + b" " * 2**22,
        with_header(b'{"__metadata__":{"a":1}}'),
        with_header(b'{"__metadata__":{"a":"1","a":"2"}}'),
        with_header(b'{"__metadata__":{},"__metadata__":{"a":"2"}}'),
        with_header(b'{"__metadata__":{"a":' + b"[" * 50 + b"]" * 50 + b"}}"),
        pickle.dumps({"a": 1}),
    ],
)
def test_metadata_of_a_bad_header_is_refused_as_its_tensors_are(data: bytes) -> None:
    with pytest.raises(AdapterRefused) as caught:
        read_metadata(data)
    assert caught.value.reason_code == reason(data)


def test_zero_size_tensors_and_padding_are_well_formed() -> None:
    assert read(with_header(b'{"x":{"dtype":"F32","shape":[0,4],"data_offsets":[0,0]}}   '))[0].shape == (0, 4)
    assert read(with_header(b"{}")) == ()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"1234567",
        bytes(8),
        b"\xff" * 8 + b"{}",
        (2**40).to_bytes(8, "little") + b"{}",
        (3).to_bytes(8, "little") + b"{}",
        b"version https://git-lfs.github.com/spec/v1\n",
        with_header(b" {}"),
        with_header(b"[]"),
        with_header(b"{]"),
        with_header(b'{"\xff":1}'),
        with_header(b'{"x":NaN}'),
        with_header(b'{"\\ud800":1}'),
        with_header(b'{"x":' + b"9" * 5000 + b"}"),
        with_header(b'{"x":' + b"[" * 50_000 + b"]" * 50_000 + b"}"),
        with_header(b'{"x":' + b"[" * 200 + b"]" * 200 + b"}"),
        with_header(b'{"__metadata__":{"a":1}}'),
        with_header(b'{"__metadata__":{"a":"1","a":"2"}}'),
        with_header(b'{"__metadata__":[]}'),
        with_header(b"{}", b"stray"),
        one(1),
        one(entry(extra=1)),
        one({"dtype": "F32", "shape": [2]}),
        with_header(b'{"x":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}', bytes(8)),
        one(entry(shape=[-2])),
        one(entry(shape=[2.0])),
        one(entry(shape=[True, 2])),
        one(entry(shape="2")),
        one(entry(shape=[1] * 9 + [2])),
        one(entry(shape=[2**64])),
        one(entry(shape=[2**63, 4], offsets=[0, 8])),
        one(entry(shape=[3])),
        one(entry(offsets=[0, 8, 8])),
        one(entry(offsets=[8, 0])),
        one(entry(offsets=[0, 8.0])),
        one(entry(), bytes(7)),
        one(entry(), bytes(9)),
        one(entry(offsets=[1, 9]), bytes(9)),
        one(entry(), bytes(8), y=entry()),
        one(entry(), bytes(12), y=entry(offsets=[4, 12])),
        one(entry(), bytes(20), y=entry(offsets=[12, 20])),
    ],
)
def test_malformed_file_is_corrupt(data: bytes) -> None:
    assert reason(data) == "WEIGHTS_CORRUPT"


def test_repeated_tensor_name_is_a_duplicate_key() -> None:
    text = json.dumps(entry())
    assert reason(with_header(f'{{"x":{text},"x":{text}}}'.encode(), bytes(8))) == "KEY_DUPLICATE"


@pytest.mark.parametrize("dtype", ["Q4_K", 4, None, ["F32"]])
def test_unknown_dtype_is_refused(dtype: object) -> None:
    assert reason(one(entry(dtype=dtype))) == "DTYPE_UNSUPPORTED"


def test_known_dtypes_that_are_not_served_are_still_read() -> None:
    assert [view.dtype for view in read(one(entry("I8", [8])))] == ["I8"]
    assert [view.dtype for view in read(one(entry("F4", [16])))] == ["F4"]


def test_too_many_tensors_are_refused_by_number() -> None:
    header = {str(i): entry(shape=[0], offsets=[0, 0]) for i in range(20_001)}
    assert reason(with_header(json.dumps(header, separators=(",", ":")).encode())) == "TOO_LARGE"


def test_pickles_under_the_wrong_name_are_called_so() -> None:
    assert reason(pickle.dumps({"a": 1}) + bytes(64)) == "WEIGHTS_UNSAFE_FORMAT"
    assert reason(b"PK\x03\x04" + bytes(64)) == "WEIGHTS_UNSAFE_FORMAT"


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [
        ("F32", b"\x00\x00\x80\x7f"),
        ("F32", b"\x00\x00\x80\xff"),
        ("F32", b"\x01\x00\x80\x7f"),
        ("F16", b"\x00\x7c"),
        ("F16", b"\x01\xfe"),
        ("BF16", b"\x80\x7f"),
        ("BF16", b"\xc0\xff"),
    ],
)
@pytest.mark.parametrize("position", [0, 700_000, 999_999])
def test_one_value_that_is_not_finite_is_found(dtype: str, bits: bytes, position: int) -> None:
    data = bytearray(1_000_000 * len(bits))
    clean = TensorView("x", dtype, (1_000_000,), memoryview(data))
    check_finite(clean)
    data[position * len(bits) : (position + 1) * len(bits)] = bits
    with pytest.raises(AdapterRefused) as caught:
        check_finite(clean)
    assert caught.value.reason_code == "NONFINITE"


@pytest.mark.parametrize(("dtype", "bits"), [("F32", b"\xff\xff\x7f\x7f"), ("F16", b"\xff\x7b"), ("BF16", b"\x7f\xff")])
def test_largest_finite_values_pass(dtype: str, bits: bytes) -> None:
    check_finite(TensorView("x", dtype, (1,), memoryview(bits)))


def test_data_that_is_not_aligned_is_checked_too() -> None:
    data = memoryview(b"x" + b"\x00\x00\x80\x7f")[1:]
    with pytest.raises(AdapterRefused):
        check_finite(TensorView("x", "F32", (1,), data))


GOOD = write_safetensors({"a": tensor((2, 3)), "b": tensor((4,), "BF16")}, {"format": "pt"})
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "F16", "BF16", "I8", "F4", "X"]) | json_values,
        "shape": st.lists(st.integers(-1, 4), max_size=3) | json_values,
        "data_offsets": st.lists(st.integers(-1, 16), min_size=2, max_size=2) | json_values,
    }
)


@settings(deadline=None, max_examples=300)
@given(st.dictionaries(st.text(max_size=4), entries | json_values, max_size=4), st.binary(max_size=24))
def test_any_header_is_refused_or_agrees_with_the_library(header: dict[str, Any], data: bytes) -> None:
    file = with_header(json.dumps(header).encode(), data)
    try:
        views = read(file)
    except AdapterRefused:
        return
    theirs = dict(safetensors.deserialize(file))
    assert {view.name: bytes(view.data) for view in views} == {name: bytes(t["data"]) for name, t in theirs.items()}


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_any_damage_is_refused_or_agrees_with_the_library(data: st.DataObject) -> None:
    file = bytearray(GOOD[: data.draw(st.integers(0, len(GOOD)) | st.just(len(GOOD)))])
    for _ in range(data.draw(st.integers(0, 3)) if file else 0):
        file[data.draw(st.integers(0, len(file) - 1))] = data.draw(st.integers(0, 255))
    try:
        views = read(bytes(file))
    except AdapterRefused:
        return
    assert len(safetensors.deserialize(bytes(file))) == len(views)


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    reason(data)
    reason(with_header(b"{" + data))
