"""What the rooms export."""

import importlib
import pkgutil

import pytest

import loraplex

ROOMS = sorted(info.name for info in pkgutil.iter_modules(loraplex.__path__, "loraplex.") if info.ispkg)


def exports(room: str) -> list[str]:
    return list(getattr(importlib.import_module(room), "__all__", []))


def isort_order(name: str) -> tuple[int, str]:
    """Constants, classes, the rest: the order that ruff's RUF022 keeps."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


def test_rooms_are_found() -> None:
    assert "loraplex.core" in ROOMS


@pytest.mark.parametrize("room", ROOMS)
def test_exports_are_sorted_and_exist(room: str) -> None:
    module, names = importlib.import_module(room), exports(room)
    assert names == sorted(set(names), key=isort_order)
    assert [name for name in names if not hasattr(module, name)] == []


@pytest.mark.parametrize("room", [room for room in ROOMS if room != "loraplex.cli"])
def test_rooms_list_their_public_names(room: str) -> None:
    assert exports(room), f"{room} has no __all__"
