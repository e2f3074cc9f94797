"""What the verification gate measures: the engine's logits with an adapter beside those of a merged reference."""

import math
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class AdapterComparison:
    """Figures of one comparison over all positions of the probe prompts. All are finite and none is negative.

    Logits that are not finite on either side count as `LARGEST`, so that such an adapter never passes.
    """

    max_logit_difference: float  # largest |engine - reference| of any logit
    kl: float  # mean over positions of KL(reference || engine), in nats
    effect: float  # largest change of a logit that the adapter makes to the base; 0 for one that does nothing
    tolerance: float  # what `max_logit_difference` may be
    failure: str | None = None  # what is wrong whatever the logits say: what the pages hold, or what a linear adds

    LARGEST: ClassVar[float] = 3.4028234663852886e38  # of float32: stands for what is not finite

    @property
    def passed(self) -> bool:
        """Whether the engine serves the adapter as its merged reference does."""
        return self.failure is None and self.max_logit_difference <= self.tolerance

    @classmethod
    def of(
        cls, max_logit_difference: float, kl: float, effect: float, tolerance: float, failure: str | None = None
    ) -> "AdapterComparison":
        """With `LARGEST` in place of figures that are not finite; a tolerance that is not finite becomes 0."""
        difference, divergence, change = (
            value if math.isfinite(value) else cls.LARGEST for value in (max_logit_difference, kl, effect)
        )
        return cls(difference, divergence, change, tolerance if math.isfinite(tolerance) else 0.0, failure)
