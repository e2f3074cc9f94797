"""What the registry does for those who may: tenants, keys, versions, pointers, grants."""

from dataclasses import replace
from pathlib import Path

import pytest

from loraplex.adapters import AdapterLimits
from loraplex.core import AdapterRefused, BaseFingerprint, ConfigError, InvalidRequest, ModelNotFound
from loraplex.registry import (
    AdapterDeleted,
    AdapterNotActive,
    AdapterNotVerified,
    AliasInfo,
    AliasMove,
    ArtifactCorrupt,
    ArtifactMissing,
    KeyId,
    KeyNotFound,
    PermissionDenied,
    Registry,
    RegistryConfig,
    Role,
    TenantExists,
    TenantNotFound,
    VersionConflict,
    VersionState,
    VersionStateError,
    WrongBase,
)
from loraplex.registry.adapter_admin import previous_version

from .helpers import BASE, FAILED, OPERATOR, PASSED, MakeWorld, World, adapter_dir, bad_adapter_dir

OTHER_BASE = replace(BASE, fingerprint=BaseFingerprint("1" * 64))


@pytest.fixture
def acme(world: World) -> World:
    world.tenant("acme")
    return world


# ---------------------------------------------------------------------- tenants
def test_tenants_are_made_once_and_listed_in_pages(world: World) -> None:
    for name in ("b", "a", "c.d"):
        world.registry.tenants.create(OPERATOR, name)
    with pytest.raises(TenantExists):
        world.registry.tenants.create(OPERATOR, "a")
    with pytest.raises(InvalidRequest):
        world.registry.tenants.create(OPERATOR, "Upper")
    assert [tenant.name for tenant in world.registry.tenants.list(OPERATOR, limit=2)] == ["a", "b"]
    assert [tenant.name for tenant in world.registry.tenants.list(OPERATOR, after="b")] == ["c.d"]


def test_a_disabled_tenant_is_gone_for_all_until_enabled(acme: World) -> None:
    acme.tenant("globex")
    acme.active("acme", "sup")
    acme.registry.adapters.grant(OPERATOR, "acme", "sup", "globex")
    key, other = acme.key("acme"), acme.principal("globex")
    principal = acme.registry.authenticate(key)
    assert acme.registry.resolve(other, "acme/sup", BASE) is not None
    acme.registry.tenants.disable(OPERATOR, "acme")
    with pytest.raises(Exception, match="valid API key"):
        acme.registry.authenticate(key)
    for caller, model in ((other, "acme/sup"), (principal, "sup")):
        with pytest.raises(ModelNotFound):
            acme.registry.resolve(caller, model, BASE)
    assert acme.registry.list_models(other, BASE).models == ()
    with pytest.raises(InvalidRequest, match="disabled"):
        acme.publish("acme", "sup")
    acme.registry.tenants.enable(OPERATOR, "acme")
    assert acme.registry.authenticate(key) == principal
    assert acme.registry.resolve(other, "acme/sup", BASE) is not None


# ---------------------------------------------------------------------- publishing
def test_versions_count_up_and_keep_what_validation_found(acme: World) -> None:
    first, second = acme.publish("acme", "sup", seed=1), acme.publish("acme", "sup", seed=2)
    assert (first.number, second.number, first.state) == (1, 2, VersionState.VALIDATED)
    assert first.facts is not None
    assert second.facts is not None
    assert first.facts.digest != second.facts.digest
    assert (first.facts.max_rank, first.facts.targets) == (2, ("q_proj", "v_proj"))
    assert (first.base_fingerprint, first.base_verified, first.base_override_by) == (BASE.fingerprint, True, None)
    assert acme.registry.load(first, BASE, AdapterLimits()).digest == first.facts.digest


def test_a_refusal_is_recorded_and_changes_nothing_else(acme: World) -> None:
    active = acme.active("acme", "sup")
    principal = acme.principal("acme")
    with pytest.raises(AdapterRefused) as caught:
        acme.registry.publish(OPERATOR, "acme", "sup", bad_adapter_dir(acme.folder), BASE, base_unverified=True)
    assert caught.value.reason_code == "NONFINITE"
    refused = acme.registry.adapters.version(OPERATOR, "acme", "sup", 2)
    assert (refused.state, refused.refusal, refused.facts) == (VersionState.REFUSED, "NONFINITE", None)
    resolved = acme.registry.resolve(principal, "sup", BASE)
    assert resolved is not None
    assert resolved.ref.version == active.number
    with pytest.raises(AdapterNotVerified, match="NONFINITE"):
        acme.registry.resolve(principal, "sup@2", BASE)
    with pytest.raises(AdapterNotVerified, match="NONFINITE"):
        acme.registry.adapters.activate(OPERATOR, "acme", "sup", 2, expected=1)
    with pytest.raises(InvalidRequest, match="no files"):
        acme.registry.load(refused, BASE, AdapterLimits())
    entries = acme.registry.audit_entries(OPERATOR, "acme")
    assert [entry.details["refusal"] for entry in entries if entry.action == "version.refuse"] == ["NONFINITE"]
    assert len(list((acme.config.data_dir / "artifacts" / "tmp").iterdir())) == 0


@pytest.mark.parametrize("name", ["../x", "a/b", "", "tiny"])
def test_names_that_cannot_be_are_refused_before_anything_is_read(acme: World, name: str) -> None:
    with pytest.raises(AdapterRefused, match="name"):
        acme.registry.publish(OPERATOR, "acme", name, Path("/nowhere"), BASE, base_unverified=True)
    assert acme.registry.adapters.list(OPERATOR, "acme") == ()


# ---------------------------------------------------------------------- verification
def test_only_verified_versions_can_be_activated(acme: World) -> None:
    acme.publish("acme", "sup")
    adapters, principal = acme.registry.adapters, acme.principal("acme")
    with pytest.raises(AdapterNotVerified, match="validated"):
        adapters.activate(OPERATOR, "acme", "sup", 1, expected=None)
    with pytest.raises(AdapterNotActive):
        acme.registry.resolve(principal, "sup", BASE)
    with pytest.raises(AdapterNotVerified):
        acme.registry.resolve(principal, "sup@1", BASE)
    assert adapters.record_verification(OPERATOR, "acme", "sup", 1, FAILED).state is VersionState.VALIDATED
    with pytest.raises(AdapterNotVerified):
        adapters.activate(OPERATOR, "acme", "sup", 1, expected=None)
    assert adapters.record_verification(OPERATOR, "acme", "sup", 1, PASSED).state is VersionState.VERIFIED
    assert adapters.activate(OPERATOR, "acme", "sup", 1, expected=None) == AliasInfo(1, 1)
    attempts = adapters.show(OPERATOR, "acme", "sup").verifications[1]
    assert [(attempt.attempt, attempt.result) for attempt in attempts] == [(1, FAILED), (2, PASSED)]


def test_a_failed_verification_takes_an_active_version_out_of_service(acme: World) -> None:
    acme.active("acme", "sup")
    principal = acme.principal("acme")
    assert acme.registry.resolve(principal, "sup", BASE) is not None
    acme.registry.adapters.record_verification(OPERATOR, "acme", "sup", 1, FAILED)
    with pytest.raises(AdapterNotVerified):
        acme.registry.resolve(principal, "sup", BASE)
    assert acme.registry.list_models(principal, BASE).models == ()


def test_doing_without_verification_is_recorded(acme: World) -> None:
    acme.publish("acme", "sup")
    operator = acme.principal("acme", Role.OPERATOR)
    version = acme.registry.adapters.skip_verification(operator, "acme", "sup", 1)
    assert version.state is VersionState.SKIPPED
    acme.registry.adapters.activate(OPERATOR, "acme", "sup", 1, expected=None)
    (attempt,) = acme.registry.adapters.show(OPERATOR, "acme", "sup").verifications[1]
    assert (attempt.skipped, attempt.by) == (True, operator.key_id)
    with pytest.raises(VersionStateError, match="is skipped"):
        acme.registry.adapters.skip_verification(operator, "acme", "sup", 1)


@pytest.mark.parametrize("field", ["max_logit_difference", "kl", "effect", "tolerance"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_figures_that_are_not_finite_verify_nothing(acme: World, field: str, value: float) -> None:
    acme.publish("acme", "sup")
    with pytest.raises(InvalidRequest, match=field):
        acme.registry.adapters.record_verification(OPERATOR, "acme", "sup", 1, replace(PASSED, **{field: value}))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="does not pass"):
        result = replace(PASSED, max_logit_difference=1.0)
        acme.registry.adapters.record_verification(OPERATOR, "acme", "sup", 1, result)


def test_what_was_wrong_is_kept_and_is_for_failures_only(acme: World) -> None:
    acme.publish("acme", "sup")
    adapters, wrong = acme.registry.adapters, "model.layers.0.self_attn.q_proj adds something else than the adapter"
    result = replace(PASSED, passed=False, failure=wrong)
    assert adapters.record_verification(OPERATOR, "acme", "sup", 1, result).state is VersionState.VALIDATED
    assert adapters.show(OPERATOR, "acme", "sup").verifications[1][0].result == result
    for bad in (replace(PASSED, failure=wrong), replace(FAILED, failure="x" * 301)):
        with pytest.raises(InvalidRequest, match="did not pass"):
            adapters.record_verification(OPERATOR, "acme", "sup", 1, bad)


# ---------------------------------------------------------------------- pointers
def test_activation_and_rollback_compare_before_they_set(acme: World) -> None:
    adapters = acme.registry.adapters
    for seed in (1, 2, 3):
        acme.verified("acme", "sup", seed)
    adapters.activate(OPERATOR, "acme", "sup", 1, expected=None)
    for expected in (None, 2, 3):
        with pytest.raises(VersionConflict, match="is version 1, not") as caught:
            adapters.activate(OPERATOR, "acme", "sup", 2, expected=expected)
        assert caught.value.current == 1
        with pytest.raises(VersionConflict):
            adapters.rollback(OPERATOR, "acme", "sup", expected=expected)
    adapters.activate(OPERATOR, "acme", "sup", 2, expected=1)
    adapters.activate(OPERATOR, "acme", "sup", 3, expected=2)
    assert adapters.rollback(OPERATOR, "acme", "sup", expected=3) == AliasInfo(2, 4)
    assert adapters.rollback(OPERATOR, "acme", "sup", expected=2) == AliasInfo(1, 5)
    with pytest.raises(VersionStateError, match="no earlier version"):
        adapters.rollback(OPERATOR, "acme", "sup", expected=1)
    moves = adapters.show(OPERATOR, "acme", "sup").moves
    assert [(move.action, move.from_version, move.to_version) for move in moves] == [
        ("activate", None, 1),
        ("activate", 1, 2),
        ("activate", 2, 3),
        ("rollback", 3, 2),
        ("rollback", 2, 1),
    ]
    assert {move.by for move in moves} == {KeyId("local")}


def moves_of(*steps: tuple[str, int | None]) -> list[AliasMove]:
    return [AliasMove(index, action, None, to, 0.0, KeyId("local")) for index, (action, to) in enumerate(steps, 1)]


def test_where_a_rollback_goes() -> None:
    up = moves_of(("activate", 1), ("activate", 2), ("activate", 3))
    assert previous_version(up, {1, 2, 3}) == 2
    assert previous_version(up, {1, 3}) == 1
    assert previous_version(up, {3}) is None
    assert previous_version([*up, *moves_of(("rollback", 2))], {1, 2, 3}) == 1
    assert previous_version([*up, *moves_of(("rollback", 2), ("activate", 3))], {1, 2, 3}) == 2
    assert previous_version(moves_of(("activate", 1), ("activate", 1)), {1}) is None
    assert previous_version(moves_of(("activate", 1), ("activate", 2), ("activate", 1)), {1, 2}) == 2
    assert previous_version([*up, *moves_of(("delete", None), ("activate", 4))], {1, 2, 3, 4}) is None
    assert previous_version([], set()) is None


# ---------------------------------------------------------------------- deletion
def test_a_deleted_adapter_leaves_tombstones_and_a_distinct_error(acme: World) -> None:
    acme.active("acme", "sup", seed=1)
    acme.publish("acme", "sup", seed=2)
    principal, adapters = acme.principal("acme"), acme.registry.adapters
    adapters.delete(OPERATOR, "acme", "sup")
    for model in ("sup", "sup@1", "sup@2", "sup@3", "acme/sup"):
        with pytest.raises(AdapterDeleted, match="was deleted"):
            acme.registry.resolve(principal, model, BASE)
    for call in (
        lambda: adapters.delete(OPERATOR, "acme", "sup"),
        lambda: adapters.activate(OPERATOR, "acme", "sup", 1, expected=None),
        lambda: adapters.record_verification(OPERATOR, "acme", "sup", 1, PASSED),
    ):
        with pytest.raises(AdapterDeleted):
            call()
    detail = adapters.show(OPERATOR, "acme", "sup")
    assert detail.info.deleted
    assert {version.state for version in detail.versions} == {VersionState.DELETED}
    assert detail.versions[0].facts is not None  # the past stays answerable
    assert acme.registry.list_models(principal, BASE).models == ()


def test_numbers_of_a_deleted_name_are_never_used_again(acme: World) -> None:
    acme.active("acme", "sup", seed=1)
    acme.registry.adapters.delete(OPERATOR, "acme", "sup")
    with pytest.raises(AdapterRefused):
        acme.registry.publish(OPERATOR, "acme", "sup", bad_adapter_dir(acme.folder), BASE, base_unverified=True)
    assert acme.registry.adapters.show(OPERATOR, "acme", "sup").info.deleted  # a refusal wakes nothing
    version = acme.active("acme", "sup", seed=2)
    assert version.number == 3
    principal = acme.principal("acme")
    resolved = acme.registry.resolve(principal, "sup", BASE)
    assert resolved is not None
    assert resolved.ref.version == 3
    with pytest.raises(AdapterDeleted):
        acme.registry.resolve(principal, "sup@1", BASE)


def test_one_version_can_be_deleted_unless_it_is_active(acme: World) -> None:
    acme.active("acme", "sup", seed=1)
    acme.verified("acme", "sup", seed=2)
    adapters, principal = acme.registry.adapters, acme.principal("acme")
    with pytest.raises(VersionConflict, match="is active"):
        adapters.delete_version(OPERATOR, "acme", "sup", 1)
    adapters.delete_version(OPERATOR, "acme", "sup", 2)
    with pytest.raises(AdapterDeleted):
        acme.registry.resolve(principal, "sup@2", BASE)
    with pytest.raises(AdapterDeleted):
        adapters.activate(OPERATOR, "acme", "sup", 2, expected=1)
    with pytest.raises(AdapterDeleted):
        adapters.delete_version(OPERATOR, "acme", "sup", 2)
    with pytest.raises(ModelNotFound):
        adapters.delete_version(OPERATOR, "acme", "sup", 3)
    assert acme.registry.resolve(principal, "sup", BASE) is not None


# ---------------------------------------------------------------------- artifacts
def test_the_sweep_takes_what_no_version_needs_and_only_that(acme: World) -> None:
    kept, gone = acme.publish("acme", "kept", seed=1), acme.publish("acme", "gone", seed=2)
    orphan = acme.registry._blobs.stage(b"orphan")
    acme.registry._blobs.publish(orphan)
    acme.registry.adapters.delete(OPERATOR, "acme", "gone")
    assert acme.registry.sweep() == 0
    assert acme.registry.sweep(older_than_s=-5) == 2  # the orphan, and the weights that were deleted
    acme.registry.load(kept, BASE, AdapterLimits())
    with pytest.raises(ArtifactMissing):
        acme.registry.load(gone, BASE, AdapterLimits())
    assert acme.registry.verify_audit(OPERATOR).ok


def test_a_file_swept_before_the_commit_is_put_back(acme: World, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs, real, taken = acme.registry._blobs, acme.registry._publisher._insert_in, []

    def insert_in(publisher: object, *args: object) -> object:
        if not taken:
            taken.extend(blob.key for blob in blobs.list())
            for key in taken:
                blobs.delete(key)
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(type(acme.registry._publisher), "_insert_in", insert_in)
    version = acme.publish("acme", "sup")
    assert (len(taken), version.number) == (2, 1)
    acme.registry.load(version, BASE, AdapterLimits())


def test_digests_are_those_of_versions_that_are_not_deleted(acme: World) -> None:
    kept, gone = acme.publish("acme", "sup", seed=1), acme.publish("acme", "sup", seed=2)
    assert kept.facts is not None
    assert gone.facts is not None
    assert acme.registry.digests() == {kept.facts.digest, gone.facts.digest}
    acme.registry.adapters.delete_version(OPERATOR, "acme", "sup", gone.number)
    assert acme.registry.digests() == {kept.facts.digest}


def test_loading_checks_the_digest_of_what_it_read(acme: World) -> None:
    first, second = acme.publish("acme", "sup", seed=1), acme.publish("acme", "sup", seed=2)
    crossed = replace(first, artifact=second.artifact)
    with pytest.raises(ArtifactCorrupt, match="as recorded"):
        acme.registry.load(crossed, BASE, AdapterLimits())


# ---------------------------------------------------------------------- resolving and listing
def test_the_four_forms_of_a_model(acme: World) -> None:
    acme.tenant("globex")
    acme.active("acme", "sup", seed=1)
    acme.verified("acme", "sup", seed=2)
    acme.registry.adapters.grant(OPERATOR, "acme", "sup", "globex")
    own, granted = acme.principal("acme"), acme.principal("globex")

    def label(caller: object, model: str) -> str:
        resolved = acme.registry.resolve(caller, model, BASE)  # type: ignore[arg-type]
        assert resolved is not None
        return resolved.ref.label

    assert [label(own, model) for model in ("sup", "sup@2", "acme/sup", "acme/sup@1")] == [
        "sup@1",
        "sup@2",
        "sup@1",
        "sup@1",
    ]
    assert [label(granted, model) for model in ("acme/sup", "acme/sup@2")] == ["acme/sup@1", "acme/sup@2"]
    with pytest.raises(ModelNotFound):
        label(granted, "sup")
    acme.registry.adapters.revoke_grant(OPERATOR, "acme", "sup", "globex")
    with pytest.raises(ModelNotFound):
        label(granted, "acme/sup")
    with pytest.raises(TenantNotFound):
        acme.registry.adapters.revoke_grant(OPERATOR, "acme", "sup", "globex")


def test_the_base_is_named_exactly_and_never_a_fallback(acme: World) -> None:
    principal = acme.principal("acme")
    assert acme.registry.resolve(principal, BASE.name, BASE) is None
    for model in (BASE.name.upper(), f"{BASE.name}@1", f"acme/{BASE.name}", "nothing"):
        with pytest.raises(ModelNotFound):
            acme.registry.resolve(principal, model, BASE)
    with pytest.raises(InvalidRequest, match="model is missing"):
        acme.registry.resolve(principal, None, BASE)


def test_a_version_of_another_base_is_refused_by_name(acme: World) -> None:
    acme.active("acme", "sup")
    principal = acme.principal("acme")
    with pytest.raises(WrongBase, match="111111111111"):
        acme.registry.resolve(principal, "sup", OTHER_BASE)
    assert acme.registry.list_models(principal, OTHER_BASE).models == ()
    assert acme.registry.resolve(principal, "sup", BASE) is not None


def test_models_come_in_pages(acme: World) -> None:
    acme.tenant("globex")
    for name in ("b", "a", "Z"):
        acme.active("acme", name)
    for name in ("x", "private", "y"):
        acme.active("globex", name)
    acme.publish("acme", "inactive")
    for name in ("x", "y"):
        acme.registry.adapters.grant(OPERATOR, "globex", name, "acme")
    principal, names, after = acme.principal("acme"), [], ""
    while True:
        page = acme.registry.list_models(principal, BASE, after, limit=2)
        names.append([model.ref.name for model in page.models])
        if page.next_after is None:
            break
        after = page.next_after
    assert names == [["Z", "a"], ["b", "globex/x"], ["globex/y"]]
    for limit in (0, 1001):
        with pytest.raises(InvalidRequest, match="1 and 1000"):
            acme.registry.list_models(principal, BASE, limit=limit)


def test_listing_shows_base_rank_targets_and_bytes(acme: World) -> None:
    acme.active("acme", "sup", seed=1)
    acme.publish("acme", "sup", seed=2)
    acme.publish("acme", "other")
    other, sup = acme.registry.adapters.list(OPERATOR, "acme")
    assert (other.name, other.active, sup.name) == ("other", None, "sup")
    assert sup.active is not None
    assert sup.latest is not None
    assert (sup.active.number, sup.latest.number) == (1, 2)
    assert sup.active.facts is not None
    assert (sup.active.facts.max_rank, sup.active.facts.targets) == (2, ("q_proj", "v_proj"))
    assert (sup.active.facts.num_bytes, sup.active.base_fingerprint) == (448, BASE.fingerprint)
    assert [info.name for info in acme.registry.adapters.list(OPERATOR, "acme", after="other")] == ["sup"]


# ---------------------------------------------------------------------- stale reads
def test_a_request_keeps_the_version_that_it_resolved(acme: World) -> None:
    """T18 at the level of the registry: the answer's digest is that of the version at admission."""
    acme.active("acme", "sup", seed=1)
    acme.verified("acme", "sup", seed=2)
    principal, adapters, digests = acme.principal("acme"), acme.registry.adapters, {}
    for number in (1, 2):
        facts = adapters.version(OPERATOR, "acme", "sup", number).facts
        assert facts is not None
        digests[number] = facts.digest
    current = 1
    for _ in range(20):
        pinned = acme.registry.resolve(principal, "sup", BASE)
        adapters.activate(OPERATOR, "acme", "sup", 3 - current, expected=current)
        assert pinned is not None
        assert pinned.ref.digest == digests[current]
        assert acme.registry.load(pinned, BASE, AdapterLimits()).digest == digests[current]
        current = 3 - current
        resolved = acme.registry.resolve(principal, "sup", BASE)
        assert resolved is not None
        assert resolved.ref.digest == digests[current]


def test_another_process_sees_a_change_within_a_quarter_of_a_second(make_world: MakeWorld) -> None:
    import time

    world = make_world()
    world.tenant("acme")
    world.active("acme", "sup", seed=1)
    world.verified("acme", "sup", seed=2)
    key = world.key("acme")
    with world.reopen() as other:
        principal = other.authenticate(key)
        assert other.resolve(principal, "sup", BASE) is not None
        world.registry.adapters.activate(OPERATOR, "acme", "sup", 2, expected=1)
        world.registry.keys.revoke(OPERATOR, "acme", principal.key_id)
        time.sleep(0.3)
        resolved = other.resolve(principal, "sup", BASE)
        assert resolved is not None
        assert resolved.ref.version == 2
        with pytest.raises(Exception, match="valid API key"):
            other.authenticate(key)


# ---------------------------------------------------------------------- keys
def test_keys_are_listed_without_secrets_and_revoked_for_good(acme: World) -> None:
    created = acme.registry.keys.create(OPERATOR, "acme", Role.TENANT)
    infos = {info.key_id: info for info in acme.registry.keys.list(OPERATOR, "acme")}
    assert infos[created.key.key_id] == created.info
    revoked = acme.registry.keys.revoke(OPERATOR, "acme", created.key.key_id)
    assert revoked.revoked_at is not None
    assert acme.registry.keys.revoke(OPERATOR, "acme", created.key.key_id) == revoked
    with pytest.raises(KeyNotFound):
        acme.registry.keys.revoke(OPERATOR, "acme", "nothing")


def test_an_operators_key_cannot_be_revoked_by_a_tenant(acme: World) -> None:
    operator, admin = acme.principal("acme", Role.OPERATOR), acme.principal("acme", Role.TENANT_ADMIN)
    with pytest.raises(PermissionDenied):
        acme.registry.keys.revoke(admin, "acme", operator.key_id)
    acme.registry.keys.revoke(operator, "acme", admin.key_id)


# ---------------------------------------------------------------------- the whole
def test_with_the_real_sandbox(tmp_path: Path) -> None:
    with Registry(RegistryConfig(tmp_path / "data")) as registry:
        registry.tenants.create(OPERATOR, "acme")
        version = registry.publish(OPERATOR, "acme", "sup", adapter_dir(tmp_path), BASE, base_unverified=True)
        assert version.facts is not None
        assert registry.load(version, BASE, AdapterLimits()).digest == version.facts.digest
        with pytest.raises(AdapterRefused) as caught:
            registry.publish(OPERATOR, "acme", "sup", bad_adapter_dir(tmp_path), BASE, base_unverified=True)
        assert caught.value.reason_code == "NONFINITE"


def test_a_data_directory_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        Registry(RegistryConfig(tmp_path / "file"))


def test_the_local_operator_can_call_no_model(acme: World) -> None:
    acme.active("acme", "sup")
    with pytest.raises(ModelNotFound):
        acme.registry.resolve(OPERATOR, "acme/sup", BASE)
    assert acme.registry.list_models(OPERATOR, BASE).models == ()
