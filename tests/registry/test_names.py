"""Names, and the forms of `model` (RELIABILITY.md, T06)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.core import AdapterRefused, InvalidRequest, ModelNotFound
from loraplex.registry.names import ModelAddress, check_adapter_name, check_tenant_name, parse_model

HOSTILE = ["", ".", "..", "../x", "/etc/passwd", "a/../b", "a\\b", "a%2fb", "a%252e", "a\0", "a\n", " a", "a b", "-a"]
HOSTILE += [
    "_a",
    "a..b",
    "\uff0e\uff0e",
    "caf\u00e9",
    "\u212aelvin",
    "a" * 65,
    "x" * 4096,
    "a@1",
    "a:b",
    "a?b",
    "\ud800",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequest):
        check_tenant_name(name)
    with pytest.raises(AdapterRefused) as caught:
        check_adapter_name(name, "acme", "base")
    assert caught.value.reason_code == "NAME_INVALID"
    assert len(caught.value.message) < 400


@pytest.mark.parametrize(
    ("model", "address"),
    [
        ("sup", ModelAddress(None, "sup", None)),
        ("Sup_7.v2@3", ModelAddress(None, "Sup_7.v2", 3)),
        ("acme/sup", ModelAddress("acme", "sup", None)),
        ("acme/sup@999999999", ModelAddress("acme", "sup", 999_999_999)),
    ],
)
def test_the_four_forms(model: str, address: ModelAddress) -> None:
    assert parse_model(model) == address


BAD_FORMS = ["", "@1", "a@", "a@0", "a@01", "a@-1", "a@+1", "a@1.0", "a@\u0661", "a@1@2", "a@1000000000", "/a", "a/"]
BAD_FORMS += ["a/b/c", "A/b", "a//b", "a/b@x", "x" * 300, "a\n", "a/b\0", "\u00e9/a", "acme/..", "../acme/a"]


@pytest.mark.parametrize("model", BAD_FORMS)
def test_other_forms_name_nothing(model: str) -> None:
    with pytest.raises(ModelNotFound):
        parse_model(model)


@given(st.text(max_size=300))
def test_parsing_never_fails_otherwise_and_is_exact(model: str) -> None:
    try:
        address = parse_model(model)
    except ModelNotFound:
        return
    tenant = f"{address.tenant}/" if address.tenant is not None else ""
    version = f"@{address.version}" if address.version is not None else ""
    assert f"{tenant}{address.name}{version}" == model


@pytest.mark.parametrize(("name", "tenant", "base"), [("llama", "acme", "llama"), ("Llama-3", "meta", "meta/Llama-3")])
def test_an_adapter_cannot_stand_for_the_base(name: str, tenant: str, base: str) -> None:
    with pytest.raises(AdapterRefused) as caught:
        check_adapter_name(name, tenant, base)
    assert caught.value.reason_code == "NAME_CONFLICT"
    check_adapter_name(name, "other", "other-base")
