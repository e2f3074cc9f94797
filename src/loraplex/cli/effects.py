"""Whether an adapter changes anything: what the figures of the gate say, in words."""

from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loraplex.server.admin_views import VerificationView

NOTE = "no-op: changes nothing; faint: changes no logit by more than rounding may"


class Effect(StrEnum):
    """What an adapter does to the base's logits."""

    NO_OP = "no-op"  # nothing at all
    FAINT = "faint"  # no more than the engine's rounding may, so that the comparison proves little
    SEEN = "seen"


def effect_of(one: "VerificationView") -> Effect | None:
    """From the figures of one attempt of the gate; None where it was skipped or failed."""
    if not one.passed or one.effect is None or one.tolerance is None:
        return None
    if one.effect == 0:
        return Effect.NO_OP
    return Effect.FAINT if one.effect <= one.tolerance else Effect.SEEN


def effect_warning(one: "VerificationView", label: str) -> str | None:
    """A line for an adapter that does nothing, or little; None for others."""
    effect = effect_of(one)
    if effect is Effect.NO_OP:
        return f"warning: {label} changes nothing: its effect on every logit is 0, so answers are the base's."
    if effect is Effect.FAINT:
        return (
            f"warning: {label} changes no logit by more than {one.effect:.3g}, and rounding alone may change one by "
            f"{one.tolerance:.3g}: answers are nearly the base's, and the comparison proves little."
        )
    return None
