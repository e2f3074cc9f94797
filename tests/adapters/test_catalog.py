"""Names of one server: random operations against a plain model, then threads."""

import threading
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from loraplex.adapters import AdapterCatalog
from loraplex.core import AdapterDigest, AdapterRef, AdapterRefused, ModelNotFound

from .factories import check, make_config

ADAPTER = check(make_config(base_model_name_or_path="org/base"))


def make_catalog() -> AdapterCatalog:
    return AdapterCatalog("the-base")


@pytest.mark.parametrize("name", ["a", "tenant-a", "Tenant_7.v2", "n" * 64, "7"])
def test_good_names_are_taken(name: str) -> None:
    catalog = make_catalog()
    catalog.check_name(name)
    assert catalog.add(name, ADAPTER, created=1.0) == AdapterRef(name, 1, ADAPTER.digest)


@pytest.mark.parametrize(
    "name",
    [
        "",
        " ",
        ".",
        "..",
        "../x",
        "x/../y",
        "/etc/hostname",
        "a\0b",
        "a\nb",
        "a\n",
        "a\tb",
        "n" * 65,
        "..\\w",
        "a..b",
        "a@1",
        "org/adapter",
        "with space",
        "café",
        "-a",
        "a,b",
    ],
)
def test_bad_names_are_invalid(name: str) -> None:
    with pytest.raises(AdapterRefused) as caught:
        make_catalog().check_name(name)
    assert caught.value.reason_code == "NAME_INVALID"


def test_name_of_the_base_is_a_conflict_even_to_replace() -> None:
    with pytest.raises(AdapterRefused) as caught:
        make_catalog().add("the-base", ADAPTER, created=1.0, replace=True)
    assert caught.value.reason_code == "NAME_CONFLICT"


def test_taken_name_is_a_conflict_and_the_old_stays() -> None:
    catalog = make_catalog()
    ref = catalog.add("a", ADAPTER, created=1.0)
    with pytest.raises(AdapterRefused) as caught:
        catalog.add("a", replace(ADAPTER, digest=AdapterDigest("f" * 64)), created=2.0)
    assert caught.value.reason_code == "NAME_CONFLICT"
    assert caught.value.message == "Adapter name 'a' is taken; choose another name."
    assert catalog.resolve("a") == ref


def test_versions_count_up_also_after_removal() -> None:
    catalog = make_catalog()
    assert catalog.add("a", ADAPTER, created=1.0).version == 1
    assert catalog.add("a", ADAPTER, created=2.0, replace=True).version == 2
    assert catalog.remove("a").version == 2
    assert catalog.add("a", ADAPTER, created=3.0).version == 3


def test_base_is_resolved_by_its_exact_name_only() -> None:
    catalog = make_catalog()
    assert catalog.resolve("the-base") is None
    for name in ("", "The-Base", "the-base@1", "the-base ", "@", "nope"):
        with pytest.raises(ModelNotFound):
            catalog.resolve(name)


def test_only_the_current_version_is_resolved() -> None:
    catalog = make_catalog()
    catalog.add("a", ADAPTER, created=1.0)
    ref = catalog.add("a", ADAPTER, created=1.0, replace=True)
    assert catalog.resolve("a@2") == ref
    for name in ("a@1", "a@02", "a@", "a@2@2", "a@+2", "A", "a@²"):
        with pytest.raises(ModelNotFound):
            catalog.resolve(name)


def test_unknown_name_cannot_be_removed() -> None:
    with pytest.raises(AdapterRefused) as caught:
        make_catalog().remove("the-base")
    assert caught.value.reason_code == "NOT_FOUND"


def test_list_is_sorted_and_says_what_is_known() -> None:
    catalog = make_catalog()
    for name in ("b", "a"):
        catalog.add(name, ADAPTER, created=7.5)
    first, second = catalog.list()
    assert (first.ref.name, second.ref.name) == ("a", "b")
    assert (first.rank, first.targets, first.declared_base, first.created) == (2, ("q_proj", "v_proj"), "org/base", 7.5)
    assert first.num_bytes == ADAPTER.num_bytes


def test_threads_that_race_for_a_name_get_one_winner() -> None:
    catalog = make_catalog()
    results: list[AdapterRef | AdapterRefused] = []

    def add() -> None:
        try:
            results.append(catalog.add("a", ADAPTER, created=1.0))
        except AdapterRefused as error:
            results.append(error)

    threads = [threading.Thread(target=add) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(isinstance(result, AdapterRef) for result in results) == 1


class CatalogMachine(RuleBasedStateMachine):
    """The catalog against two dicts."""

    names = st.sampled_from(["a", "b", "A"])

    def __init__(self) -> None:
        super().__init__()
        self.catalog = make_catalog()
        self.current: dict[str, int] = {}
        self.newest: dict[str, int] = {}

    @rule(name=names, in_place=st.booleans())
    def add(self, name: str, in_place: bool) -> None:
        if name in self.current and not in_place:
            with pytest.raises(AdapterRefused):
                self.catalog.add(name, ADAPTER, created=1.0, replace=in_place)
            return
        self.newest[name] = self.current[name] = self.newest.get(name, 0) + 1
        assert self.catalog.add(name, ADAPTER, created=1.0, replace=in_place).version == self.newest[name]

    @rule(name=names)
    def remove(self, name: str) -> None:
        if name in self.current:
            assert self.catalog.remove(name).version == self.current.pop(name)
        else:
            with pytest.raises(AdapterRefused):
                self.catalog.remove(name)

    @invariant()
    def agrees(self) -> None:
        assert {entry.ref.name: entry.ref.version for entry in self.catalog.list()} == self.current
        for name in ("a", "b", "A"):
            if name in self.current:
                assert self.catalog.resolve(f"{name}@{self.current[name]}") == self.catalog.resolve(name)
            else:
                with pytest.raises(ModelNotFound):
                    self.catalog.resolve(name)


TestCatalogMachine = CatalogMachine.TestCase
TestCatalogMachine.settings = settings(max_examples=50, stateful_step_count=20, deadline=None)
