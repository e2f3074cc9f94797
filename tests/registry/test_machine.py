"""Random operations against a model in dictionaries; after each one the registry must say what the model says."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from loraplex.core import ModelNotFound
from loraplex.registry import (
    AdapterDeleted,
    AdapterNotActive,
    AdapterNotVerified,
    Principal,
    Registry,
    RegistryConfig,
    VersionConflict,
    VersionState,
    VersionStateError,
)

from .helpers import BASE, FAILED, OPERATOR, PASSED, World, check_here

TENANTS, NAMES = ("acme", "globex"), ("one", "two")
tenant_names, adapter_names = st.sampled_from(TENANTS), st.sampled_from(NAMES)
numbers = st.integers(1, 4)
Place = tuple[str, str]
QUICK = settings(
    max_examples=10,
    stateful_step_count=20,
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
)


class RegistryMachine(RuleBasedStateMachine):
    """The model: states of versions, the pointer, deleted names and grants."""

    def __init__(self) -> None:
        super().__init__()
        self.temporary = tempfile.TemporaryDirectory()
        folder = Path(self.temporary.name)
        config = RegistryConfig(folder / "data")
        self.registry = Registry(config, validate=check_here)
        self.world = World(self.registry, folder, config)
        self.callers: dict[str, Principal] = {}
        for tenant in TENANTS:
            self.world.tenant(tenant)
            self.callers[tenant] = self.world.principal(tenant)
        self.states: dict[Place, list[VersionState]] = {}
        self.active: dict[Place, int | None] = {}
        self.deleted: set[Place] = set()
        self.granted: set[Place] = set()
        self.changes = 0

    def teardown(self) -> None:
        assert self.registry.verify_audit(OPERATOR).ok
        self.registry.close()
        self.temporary.cleanup()

    def lives(self, place: Place) -> bool:
        return place in self.states and place not in self.deleted

    @rule(tenant=tenant_names, name=adapter_names)
    def publish(self, tenant: str, name: str) -> None:
        place = (tenant, name)
        version = self.world.publish(tenant, name, seed=len(self.states.get(place, [])))
        self.states.setdefault(place, []).append(VersionState.VALIDATED)
        self.active.setdefault(place, None)
        self.deleted.discard(place)
        assert version.number == len(self.states[place])
        self.changes += 1

    @precondition(lambda self: self.states)
    @rule(tenant=tenant_names, name=adapter_names, number=numbers, event=st.sampled_from(["pass", "fail", "skip"]))
    def verify(self, tenant: str, name: str, number: int, event: str) -> None:
        place, adapters = (tenant, name), self.registry.adapters

        def call() -> object:
            if event == "skip":
                return adapters.skip_verification(OPERATOR, tenant, name, number)
            result = PASSED if event == "pass" else FAILED
            return adapters.record_verification(OPERATOR, tenant, name, number, result)

        if not self.lives(place) or number > len(self.states[place]):
            with pytest.raises(ModelNotFound):
                call()
            return
        state = self.states[place][number - 1]
        if state is VersionState.DELETED:
            with pytest.raises(AdapterDeleted):
                call()
        elif event == "skip" and state is not VersionState.VALIDATED:
            with pytest.raises(VersionStateError):
                call()
        else:
            call()
            after = {"pass": VersionState.VERIFIED, "fail": VersionState.VALIDATED, "skip": VersionState.SKIPPED}
            self.states[place][number - 1] = after[event]
            self.changes += 1

    @precondition(lambda self: self.states)
    @rule(tenant=tenant_names, name=adapter_names, number=numbers, expected=st.one_of(st.none(), numbers))
    def activate(self, tenant: str, name: str, number: int, expected: int | None) -> None:
        place = (tenant, name)

        def call() -> object:
            return self.registry.adapters.activate(OPERATOR, tenant, name, number, expected=expected)

        if not self.lives(place):
            with pytest.raises(ModelNotFound):
                call()
        elif expected != self.active[place]:
            with pytest.raises(VersionConflict):
                call()
        elif number > len(self.states[place]):
            with pytest.raises(ModelNotFound):
                call()
        elif self.states[place][number - 1] is VersionState.DELETED:
            with pytest.raises(AdapterDeleted):
                call()
        elif not self.states[place][number - 1].usable:
            with pytest.raises(AdapterNotVerified):
                call()
        else:
            call()
            self.active[place] = number
            self.changes += 1

    @precondition(lambda self: self.states)
    @rule(tenant=tenant_names, name=adapter_names)
    def delete(self, tenant: str, name: str) -> None:
        place = (tenant, name)
        if not self.lives(place):
            with pytest.raises(ModelNotFound):
                self.registry.adapters.delete(OPERATOR, tenant, name)
            return
        self.registry.adapters.delete(OPERATOR, tenant, name)
        self.states[place] = [VersionState.DELETED] * len(self.states[place])
        self.active[place] = None
        self.deleted.add(place)
        self.granted.discard(place)
        self.changes += 1

    @precondition(lambda self: self.states)
    @rule(tenant=tenant_names, name=adapter_names, grant=st.booleans())
    def set_grant(self, tenant: str, name: str, grant: bool) -> None:
        place, other = (tenant, name), TENANTS[tenant == TENANTS[0]]
        if grant and self.lives(place):
            self.registry.adapters.grant(OPERATOR, tenant, name, other)
            self.granted.add(place)
        elif not grant and place in self.granted:
            self.registry.adapters.revoke_grant(OPERATOR, tenant, name, other)
            self.granted.discard(place)

    def expected(self, caller: str, place: Place, number: int | None) -> type[Exception] | int:
        """The version that resolving gives, or the class of its error."""
        if caller != place[0] and place not in self.granted:
            return ModelNotFound
        if place not in self.states:
            return ModelNotFound
        if number is None and self.active[place] is None:
            return AdapterDeleted if place in self.deleted else AdapterNotActive
        wanted = number or self.active[place] or 0
        if wanted > len(self.states[place]):
            return AdapterDeleted if place in self.deleted else ModelNotFound
        state = self.states[place][wanted - 1]
        if state is VersionState.DELETED:
            return AdapterDeleted
        return wanted if state.usable else AdapterNotVerified

    @invariant()
    def resolving_says_what_the_model_says(self) -> None:
        for caller, principal in self.callers.items():
            for place in [(tenant, name) for tenant in TENANTS for name in NAMES]:
                for number in (None, 1, 2, 5):
                    model = "/".join(place) + (f"@{number}" if number else "")
                    try:
                        resolved = self.registry.resolve(principal, model, BASE)
                        assert resolved is not None
                        got: type[Exception] | int = resolved.ref.version
                    except Exception as error:
                        got = type(error)
                    assert got == self.expected(caller, place, number), model

    @invariant()
    def listing_says_what_the_model_says(self) -> None:
        for caller, principal in self.callers.items():
            mine = {
                name if tenant == caller else f"{tenant}/{name}"
                for tenant, name in self.states
                if isinstance(self.expected(caller, (tenant, name), None), int)
            }
            assert [model.ref.name for model in self.registry.list_models(principal, BASE).models] == sorted(mine)


def test_the_registry_does_what_its_model_does() -> None:
    changes: list[int] = []

    class Counted(RegistryMachine):
        def teardown(self) -> None:
            changes.append(self.changes)
            super().teardown()

    run_state_machine_as_test(Counted, settings=QUICK)
    assert sum(changes) >= 40  # the floor: the runs changed something


def test_a_cache_that_is_not_told_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: without invalidation the registry and its model part."""
    from loraplex.registry.cache import TenantCache

    monkeypatch.setattr(TenantCache, "note", lambda self, epoch, changed: None)
    monkeypatch.setattr("loraplex.registry.cache.POLL_EVERY_S", 1e9)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(RegistryMachine, settings=settings(QUICK, phases=[Phase.generate]))
