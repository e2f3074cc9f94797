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

        Those of its call that wait count as part of it. A tenant of whom nothing else waits may queue any request, and
        so may a request of no tenant. From any thread.
        """
        call, call_tokens = waiting.held_by_call(request.call_id)
        held, held_tokens = waiting.held_by(request.tenant)
        num_new = call + request.params.n
        self._check(request.tenant, held - call, num_new, len(waiting) - call, retry_after_s)
        if not request.tenant or held == call or self.max_waiting_tokens is None:
            return
        held_tokens -= call_tokens
        num_tokens = call_tokens + request.params.n * len(request.prompt_token_ids)
        if held_tokens + num_tokens > self.max_waiting_tokens - (waiting.num_prompt_tokens - call_tokens) - num_tokens:
            limit = f"--max-waiting-tokens {self.max_waiting_tokens}"
            _refuse(request.tenant, held_tokens, num_tokens, "prompt tokens", limit, retry_after_s)

    def check_sequences(
        self, waiting: WaitingQueue, tenant: str, num_new: int, retry_after_s: float, num_before: int, num_own: int
    ) -> None:
        """As `check`, for sequences alone. `num_before`, `num_own` of the tenant, count as if they waited here."""
        held = waiting.held_by(tenant)[0] + num_own
        self._check(tenant, held, num_new, len(waiting) + num_before, retry_after_s)

    def _check(self, tenant: str | None, held: int, num_new: int, num_waiting: int, retry_after_s: float) -> None:
        if tenant and held and held + num_new > self.max_waiting - num_waiting - num_new:
            _refuse(tenant, held, num_new, "sequences", f"--max-waiting {self.max_waiting}", retry_after_s)


def _refuse(tenant: str, num_held: int, num_new: int, unit: str, limit: str, retry_after_s: float) -> None:
    message = f"The tenant {tenant!r} has {num_held} {unit} in the queue and the request has {num_new}; a tenant"
    raise CallerLimitReached(f"{message} may have as many as it leaves free ({limit}).", retry_after_s)
