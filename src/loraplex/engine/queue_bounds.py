"""The bounds of the queue, of all tenants together and of each, for requests and for what is about to be one."""

from loraplex.core import InvalidRequest, Overloaded, Request
from loraplex.scheduler import QueueShare, Scheduler


class QueueBounds:
    """May be asked from any thread; what it says holds for the moment."""

    __slots__ = ("_max_waiting", "_scheduler", "_share")

    def __init__(self, scheduler: Scheduler, max_waiting: int, max_waiting_tokens: int | None) -> None:
        self._scheduler = scheduler
        self._max_waiting = max_waiting
        self._share = QueueShare(max_waiting, max_waiting_tokens)

    def check_request(self, request: Request) -> None:
        """Raise InvalidRequest, Overloaded or CallerLimitReached if there is no place for a request in the queue."""
        num_new = request.params.n
        if num_new > self._max_waiting:
            message = f"n is {num_new}; the queue holds {self._max_waiting} sequences (--max-waiting)."
            raise InvalidRequest(message, "n")
        self._check_full(num_new, 0)
        self._scheduler.check_queue(len(request.prompt_token_ids) * num_new, request.call_id)
        self._share.check(self._scheduler.waiting, request, self._scheduler.retry_after_s)

    def check_sequences(self, tenant: str, num_new: int, num_before: int, num_own: int) -> None:
        """As `check_request` for `num_new` sequences of prompts that are not known yet.

        `num_before` sequences, `num_own` of them the tenant's, are about to be queued and count as if they were.
        """
        if num_new > self._max_waiting:
            message = f"The request has {num_new} sequences (n for each prompt); the queue holds {self._max_waiting}"
            raise InvalidRequest(f"{message} (--max-waiting).", "n")
        self._check_full(num_new, num_before)
        scheduler = self._scheduler
        scheduler.check_queue(num_new)  # a token each, at least
        retry_after_s = scheduler.retry_after_with(num_before)
        self._share.check_sequences(scheduler.waiting, tenant, num_new, retry_after_s, num_before, num_own)

    def _check_full(self, num_new: int, num_before: int) -> None:
        if len(self._scheduler.waiting) + num_before + num_new > self._max_waiting:
            message = f"The queue of {self._max_waiting} waiting sequences is full (--max-waiting)."
            raise Overloaded(message, self._scheduler.retry_after_with(num_before))
