"""The store is swept while a server runs."""

import threading
from typing import cast

from loraplex.cli.sweeping import PeriodicSweep
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


def test_sweeps_go_on_after_one_that_failed_and_end_with_the_server() -> None:
    swept = Swept()
    sweep = PeriodicSweep(cast(Registry, swept), every_s=0.01)
    assert swept.third.wait(10)
    sweep.close()
    count = swept.count
    assert not any(thread.name == "loraplex-sweep" for thread in threading.enumerate())
    assert swept.count == count
