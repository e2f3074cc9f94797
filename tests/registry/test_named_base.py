"""Which base an adapter was trained on: the caller says it, or the file, or the absence is recorded."""

import json
from pathlib import Path

import pytest

from loraplex.core import AdapterRefused, BaseFingerprint, InvalidRequest
from loraplex.registry import Registry, RegistryConfig, Role, VersionInfo, sandbox_child
from tests.adapters.factories import make_config, make_tensors, with_header, write_safetensors

from .helpers import BASE, OPERATOR, World, adapter_dir

OTHER = "1" * 64


@pytest.fixture
def acme(world: World) -> World:
    world.tenant("acme")
    return world


def labelled_dir(folder: Path, metadata: dict[str, str] | None, rank: int = 2) -> Path:
    """A valid adapter whose weights have this metadata."""
    directory = folder / "labelled"
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(make_config(r=rank)))
    weights = write_safetensors(make_tensors(rank=rank), metadata)
    (directory / "adapter_model.safetensors").write_bytes(weights)
    return directory


def publish(world: World, named: str | None, **claim: object) -> VersionInfo:
    metadata = {"format": "pt"} | ({"base_fingerprint": named} if named is not None else {})
    directory = labelled_dir(world.folder, metadata)
    return world.registry.publish(OPERATOR, "acme", "sup", directory, BASE, **claim)  # type: ignore[arg-type]


def test_the_base_must_be_named_or_its_absence_recorded(acme: World) -> None:
    admin, directory = acme.principal("acme", Role.TENANT_ADMIN), adapter_dir(acme.folder)
    publish = acme.registry.publish
    with pytest.raises(InvalidRequest, match="base_unverified"):
        publish(admin, "acme", "sup", directory, BASE)
    assert list(acme.registry._blobs.list()) == []
    with pytest.raises(InvalidRequest, match="64 lower-case hex"):
        publish(admin, "acme", "sup", directory, BASE, base_fingerprint="abc")
    version = publish(admin, "acme", "sup", directory, BASE, base_unverified=True)
    assert (version.base_verified, version.base_override_by) == (False, admin.key_id)
    with pytest.raises(AdapterRefused) as caught:
        publish(admin, "acme", "sup", directory, BASE, base_fingerprint=OTHER, base_unverified=True)
    assert caught.value.reason_code == "BASE_MISMATCH"
    assert acme.registry.adapters.version(admin, "acme", "sup", 2).refusal == "BASE_MISMATCH"


@pytest.mark.parametrize("claim", [{}, {"base_unverified": True}, {"base_fingerprint": BASE.fingerprint}])
def test_a_file_that_names_the_served_base_is_verified(acme: World, claim: dict[str, object]) -> None:
    version = publish(acme, BASE.fingerprint, **claim)
    assert (version.base_verified, version.base_override_by) == (True, None)
    assert version.facts is not None
    assert version.facts.names_base
    assert acme.registry.adapters.version(OPERATOR, "acme", "sup", 1) == version
    (entry,) = [one for one in acme.registry.audit_entries(OPERATOR, "acme") if one.action == "version.publish"]
    assert (entry.details["base_verified"], entry.details["base_named_by_file"]) == (True, True)


def test_a_file_that_names_nothing_does_as_before(acme: World) -> None:
    version = publish(acme, None, base_fingerprint=BASE.fingerprint)
    assert version.facts is not None
    assert (version.base_verified, version.facts.names_base) == (True, False)


@pytest.mark.parametrize("claim", [{}, {"base_unverified": True}, {"base_fingerprint": BASE.fingerprint}])
@pytest.mark.parametrize("named", [OTHER, "", "tiny", BASE.fingerprint + " ", BASE.fingerprint[:-1]])
def test_a_file_that_names_another_base_is_refused(acme: World, named: str, claim: dict[str, object]) -> None:
    """Whatever the caller says: an argument that contradicts the file does not win."""
    with pytest.raises(AdapterRefused) as caught:
        publish(acme, named, **claim)
    assert (caught.value.reason_code, caught.value.subject) == ("BASE_MISMATCH", "base_fingerprint")
    refused = acme.registry.adapters.version(OPERATOR, "acme", "sup", 1)
    assert (refused.refusal, refused.base_verified) == ("BASE_MISMATCH", False)
    assert (refused.base_override_by is not None) == ("base_unverified" in claim)


def test_an_argument_that_names_another_base_is_refused_whatever_the_file_says(acme: World) -> None:
    with pytest.raises(AdapterRefused) as caught:
        publish(acme, BASE.fingerprint, base_fingerprint=OTHER)
    assert caught.value.reason_code == "BASE_MISMATCH"


@pytest.mark.parametrize(
    "weights",
    [b"", b"\x00" * 7, with_header(b"{"), with_header(b"[]"), (2**63).to_bytes(8, "little") + b"{}", b"\x80\x02" * 8]
    + [with_header(json.dumps({"__metadata__": value}).encode()) for value in ([], "x", None, {"format": "pt"})],
)
def test_what_is_no_header_names_nothing(weights: bytes) -> None:
    assert sandbox_child.names_the_base(memoryview(weights), BASE) is False


def test_in_the_real_sandbox(tmp_path: Path) -> None:
    """Also for an adapter that does not fit: that it is of another base says more than its shapes."""
    with Registry(RegistryConfig(tmp_path / "data")) as registry:
        registry.tenants.create(OPERATOR, "acme")
        directory = labelled_dir(tmp_path, {"base_fingerprint": BASE.fingerprint})
        assert registry.publish(OPERATOR, "acme", "sup", directory, BASE).base_verified
        labelled_dir(tmp_path, {"base_fingerprint": BaseFingerprint(OTHER)}, rank=5)
        with pytest.raises(AdapterRefused) as caught:
            registry.publish(OPERATOR, "acme", "sup", directory, BASE, base_unverified=True)
        assert caught.value.reason_code == "BASE_MISMATCH"
