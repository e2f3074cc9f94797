"""One step's input to the model."""

from dataclasses import dataclass

from torch import Tensor

from loraplex.kernels import KvBatch, LoraBatch


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """Rows of all sequences of a step, ordered by adapter. `lora` None: no row has one."""

    token_ids: Tensor  # [num_rows] int64
    logit_rows: Tensor | None  # [num_logits] int64: rows whose logits are wanted; None is all in order
    kv: KvBatch
    lora: LoraBatch | None
