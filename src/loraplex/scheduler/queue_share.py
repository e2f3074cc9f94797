"""How much of the queue one tenant may hold: as much as it leaves free.

Dynamic thresholds (Choudhury and Hahne, 1998), as switches share memory among their ports: alone a tenant may fill half
of the queue, two together two thirds, and whoever comes finds a place.
"""

from dataclasses import dataclass

from loraplex.core import CallerLimitReached, Request
from loraplex.scheduler.queue import WaitingQueue


@dataclass(frozen=True, slots=True)
class QueueShare:
    """The bounds of the whole queue: sequences, and prompt tokens if they are bounded."""

    max_waiting: int
    max_waiting_tokens: int | None = None

    def check(self, waiting: WaitingQueue, request: Request, retry_after_s: float) -> None:
        """Raise CallerLimitReached if a request would give its tenant more of the queue than is left then.

        A tenant of whom nothing waits may queue any request, and so may a request of no tenant. From any thread.
        """
        num_new = request.params.n
        self.check_sequences(waiting, request.tenant, num_new, retry_after_s)
        held, held_tokens = waiting.held_by(request.tenant)
        if not request.tenant or not held or self.max_waiting_tokens is None:
            return
        num_tokens = num_new * len(request.prompt_token_ids)
        if held_tokens + num_tokens > self.max_waiting_tokens - waiting.num_prompt_tokens - num_tokens:
            limit = f"--max-waiting-tokens {self.max_waiting_tokens}"
            _refuse(request.tenant, held_tokens, num_tokens, "prompt tokens", limit, retry_after_s)

    def check_sequences(
        self,
        waiting: WaitingQueue,
        tenant: str | None,
        num_new: int,
        retry_after_s: float,
        num_before: int = 0,
        num_own: int = 0,
    ) -> None:
        """As `check`, for sequences alone. `num_before`, `num_own` of the tenant, count as if they waited here."""
        held = waiting.held_by(tenant)[0] + num_own
        if tenant and held and held + num_new > self.max_waiting - len(waiting) - num_before - num_new:
            _refuse(tenant, held, num_new, "sequences", f"--max-waiting {self.max_waiting}", retry_after_s)


def _refuse(tenant: str, num_held: int, num_new: int, unit: str, limit: str, retry_after_s: float) -> None:
    message = f"The tenant {tenant!r} has {num_held} {unit} in the queue and the request has {num_new}; a tenant"
    raise CallerLimitReached(f"{message} may have as many as it leaves free ({limit}).", retry_after_s)
