"""Sweeping a registry's store while its server runs."""

import threading
from typing import TYPE_CHECKING

from loraplex.core import ServerError

if TYPE_CHECKING:
    from loraplex.engine.packed_files import PackedFiles
    from loraplex.registry import Registry

SWEEP_EVERY_S = 3600.0


class PeriodicSweep:
    """Removes what no version needs any more, every `every_s` seconds, in a thread of its own until `close`.

    Otherwise a tenant that publishes and deletes again and again fills the disk.
    """

    def __init__(
        self, registry: "Registry", packed: "PackedFiles | None" = None, every_s: float = SWEEP_EVERY_S
    ) -> None:
        self._registry = registry
        self._packed = packed
        self._every_s = every_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="loraplex-sweep", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, after the sweep at hand."""
        self._ended.set()
        self._thread.join()

    def _sweep_packed(self) -> None:
        """Packed weights go with the last version that has them."""
        if self._packed is not None:
            wanted = self._registry.digests()
            self._packed.sweep(lambda digest: digest in wanted)

    def _run(self) -> None:
        while not self._ended.wait(self._every_s):
            try:
                self._registry.sweep()
                self._sweep_packed()
            except ServerError:  # old files stay until the next time, which harms nobody
                continue
