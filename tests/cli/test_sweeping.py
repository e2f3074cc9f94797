"""The store is swept while a server runs."""

import threading
from collections.abc import Callable
from typing import cast

from loraplex.cli.sweeping import PeriodicSweep
from loraplex.core import AdapterDigest
from loraplex.engine.packed_files import PackedFiles
from loraplex.registry import Registry, StoreUnavailable


class Swept:
    """Counts sweeps; the second one fails."""

    def __init__(self) -> None:
        self.count = 0
        self.third = threading.Event()

    def sweep(self) -> int:
        self.count += 1
        if self.count == 2:
            raise StoreUnavailable("The store does not answer.")
        if self.count == 3:
            self.third.set()
        return 0

    def digests(self) -> frozenset[AdapterDigest]:
        return frozenset({AdapterDigest("kept")})


def test_sweeps_go_on_after_one_that_failed_and_end_with_the_server() -> None:
    swept = Swept()
    sweep = PeriodicSweep(cast(Registry, swept), every_s=0.01)
    assert swept.third.wait(10)
    sweep.close()
    count = swept.count
    assert not any(thread.name == "loraplex-sweep" for thread in threading.enumerate())
    assert swept.count == count


def test_packed_weights_go_with_the_last_version_that_has_them() -> None:
    wanted: dict[str, bool] = {}
    swept = threading.Event()

    class Packed:
        def sweep(self, is_wanted: Callable[[AdapterDigest], bool]) -> int:
            wanted.update((name, is_wanted(AdapterDigest(name))) for name in ("kept", "deleted"))
            swept.set()
            return 1

    sweep = PeriodicSweep(cast(Registry, Swept()), cast(PackedFiles, Packed()), every_s=0.01)
    assert swept.wait(10)
    sweep.close()
    assert wanted == {"kept": True, "deleted": False}
