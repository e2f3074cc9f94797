"""When what is taken becomes free again: an estimate from how long it was taken lately."""

MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0
_WEIGHT = 1 / 8  # of the latest in the mean


class Pace:
    """Of places of one kind that are taken for a while each, one by one."""

    __slots__ = ("_mean_s",)

    def __init__(self) -> None:
        self._mean_s: float | None = None

    def note(self, seconds: float) -> None:
        """A place was taken for so long and is free."""
        self._mean_s = seconds if self._mean_s is None else self._mean_s + _WEIGHT * (seconds - self._mean_s)

    def wait_s(self, num_ahead: int, num_taken: int) -> float:
        """Seconds until `num_ahead` of `num_taken` places have become free for others and one more has, from 1 to 60.

        1 where none has become free yet.
        """
        if self._mean_s is None:
            return MIN_RETRY_S
        return min(max((num_ahead + 1) * self._mean_s / max(num_taken, 1), MIN_RETRY_S), MAX_RETRY_S)
