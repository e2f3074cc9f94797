"""Identifiers. Names are for people; everything inside is keyed by these."""

from typing import NewType

AdapterDigest = NewType("AdapterDigest", str)
"""sha256 (64 lower-case hex digits) over the canonical form of an adapter's config and tensors."""

BaseFingerprint = NewType("BaseFingerprint", str)
"""sha256 (64 lower-case hex digits) over the sorted (name, dtype, shape, data) of a base model's tensors."""

PageId = NewType("PageId", int)
"""Index of a page in the pool."""

RequestId = NewType("RequestId", str)
"""One client request; it may expand into several sequences (`n`)."""

SequenceId = NewType("SequenceId", int)
"""One generated sequence inside the engine."""
