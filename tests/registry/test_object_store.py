"""Artifacts in S3, against moto's server."""

import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from loraplex.adapters import AdapterLimits
from loraplex.core import ConfigError
from loraplex.registry import ArtifactCorrupt, ArtifactMissing, BlobRef, Registry, RegistryConfig, StoreUnavailable
from loraplex.registry.blobs import hash_blob
from loraplex.registry.changes import no_step
from loraplex.registry.directory_store import DirectoryStore
from loraplex.registry.object_store import ObjectStore

from .helpers import BASE, OPERATOR, World, check_here

BUCKET = "adapters"


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """The address of an S3 server."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def options(s3: str) -> Mapping[str, str]:
    return {"endpoint": s3, "region": "us-east-1", "access_key_id": "test", "secret_access_key": "hunter2"}


@pytest.fixture
def client(s3: str) -> Any:
    """A second way to the bucket, which is empty."""
    import boto3

    client = boto3.client(
        "s3", endpoint_url=s3, region_name="us-east-1", aws_access_key_id="test", aws_secret_access_key="hunter2"
    )
    client.create_bucket(Bucket=BUCKET)
    for item in client.list_objects_v2(Bucket=BUCKET).get("Contents", []):
        client.delete_object(Bucket=BUCKET, Key=item["Key"])
    return client


@pytest.fixture
def store(client: Any, options: Mapping[str, str], tmp_path: Path) -> Iterator[ObjectStore]:
    store = ObjectStore(f"s3://{BUCKET}/some/prefix", DirectoryStore(tmp_path, no_step), no_step, options)
    yield store
    store.close()


def put(store: ObjectStore, data: bytes) -> BlobRef:
    staged = store.stage(data)
    store.publish(staged)
    return staged.ref


def object_name(ref: BlobRef) -> str:
    return f"some/prefix/blobs/{ref.key}"


def test_bytes_come_back_under_their_hash(store: ObjectStore, client: Any, tmp_path: Path) -> None:
    data = random.Random(1).randbytes(100_000)
    ref = put(store, data)
    assert ref == hash_blob(data)
    assert bytes(store.get(ref)) == data
    assert [item["Key"] for item in client.list_objects_v2(Bucket=BUCKET)["Contents"]] == [object_name(ref)]
    assert [blob.key for blob in store.list()] == [ref.key]
    assert store.modified_at(ref.key) == pytest.approx(next(iter(store.list())).modified_at, abs=1)
    assert list((tmp_path / "tmp").iterdir()) == []


def test_an_object_is_created_once_and_mended_if_damaged(store: ObjectStore, client: Any) -> None:
    ref = put(store, b"weights")
    tag = client.head_object(Bucket=BUCKET, Key=object_name(ref))["LastModified"]
    put(store, b"weights")
    assert client.head_object(Bucket=BUCKET, Key=object_name(ref))["LastModified"] == tag
    client.put_object(Bucket=BUCKET, Key=object_name(ref), Body=b"weightz")
    put(store, b"weights")
    assert bytes(store.get(ref)) == b"weights"


def test_what_the_store_answers_is_not_trusted(store: ObjectStore, client: Any) -> None:
    data = random.Random(1).randbytes(2_000)
    ref, rng, found = put(store, data), random.Random(2), 0
    for number in range(60):
        changed = bytearray(data)
        if number % 3 == 0:
            changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif number % 3 == 1:
            del changed[rng.randrange(len(data)) :]
        else:
            changed += rng.randbytes(1 + rng.randrange(50_000))
        client.put_object(Bucket=BUCKET, Key=object_name(ref), Body=bytes(changed))
        with pytest.raises(ArtifactCorrupt):
            store.get(ref)
        found += 1
    assert found == 60
    client.put_object(Bucket=BUCKET, Key=object_name(ref), Body=data)
    assert bytes(store.get(ref)) == data


def test_without_the_hash_a_changed_object_is_missed(
    store: ObjectStore, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant of the test above."""
    ref = put(store, b"weights")
    client.put_object(Bucket=BUCKET, Key=object_name(ref), Body=b"weightz")
    monkeypatch.setattr("loraplex.registry.object_store.check_bytes", lambda ref, data: None)
    assert bytes(store.get(ref)) == b"weightz"


def test_deleted_objects_are_missing(store: ObjectStore) -> None:
    ref = put(store, b"weights")
    store.delete(ref.key)
    store.delete(ref.key)
    assert store.modified_at(ref.key) is None
    with pytest.raises(ArtifactMissing):
        store.get(ref)


def test_a_store_that_cannot_be_reached_is_unavailable_and_shows_no_secret(
    store: ObjectStore, options: Mapping[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraplex.registry.object_store._RETRIES", {"max_retries": 0})
    settings = {**options, "endpoint": "http://127.0.0.1:9"}
    other = ObjectStore(f"s3://{BUCKET}/x", DirectoryStore(tmp_path / "x", no_step), no_step, settings)
    staged = other.stage(b"x")
    calls = (lambda: other.publish(staged), lambda: other.get(staged.ref), lambda: list(other.list()))
    for call in (*calls, lambda: other.modified_at(staged.ref.key), lambda: other.delete(staged.ref.key)):
        with pytest.raises(StoreUnavailable) as caught:
            call()
        assert "hunter2" not in repr(caught.value)
    other.close()


@pytest.mark.parametrize("url", ["ftp://x/y", "file:///tmp/x", "http://x/y", "s3://key:hunter2@bucket/x", "nonsense"])
def test_other_urls_are_refused_without_showing_credentials(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Registry(RegistryConfig(tmp_path, artifacts_url=url))
    assert "hunter2" not in repr(caught.value)


def test_a_registry_on_s3_publishes_loads_and_sweeps(client: Any, options: Mapping[str, str], tmp_path: Path) -> None:
    config = RegistryConfig(tmp_path / "data", artifacts_url=f"s3://{BUCKET}/r", artifacts_options=options)
    with Registry(config, validate=check_here) as registry:
        world = World(registry, tmp_path, config)
        world.tenant("acme")
        kept, gone = world.active("acme", "kept", seed=1), world.active("acme", "gone", seed=2)
        assert registry.load(kept, BASE, AdapterLimits()).digest == kept.facts.digest  # type: ignore[union-attr]
        registry.adapters.delete(OPERATOR, "acme", "gone")
        assert registry.sweep() == 0  # not old enough
        assert registry.sweep(older_than_s=-5) == 1  # the config belongs to both
        registry.load(kept, BASE, AdapterLimits())
        with pytest.raises(ArtifactMissing):
            registry.load(gone, BASE, AdapterLimits())
