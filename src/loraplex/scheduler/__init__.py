"""Queues, admission and continuous batching. Plans steps as values; knows no tensors, clocks or threads."""

from loraplex.scheduler.config import SchedulerConfig
from loraplex.scheduler.cost import H200_8B, Calibrator, CostModel, StepShape
from loraplex.scheduler.fairness import FairShares, in_turn
from loraplex.scheduler.plan import AdapterLoad, Committed, ScheduledChunk, StepPlan
from loraplex.scheduler.queue_share import QueueShare
from loraplex.scheduler.scheduler import Scheduler
from loraplex.scheduler.sequence import UNKNOWN_TOKEN, Sequence, SequenceStatus, WaitReason

__all__ = [
    "H200_8B",
    "UNKNOWN_TOKEN",
    "AdapterLoad",
    "Calibrator",
    "Committed",
    "CostModel",
    "FairShares",
    "QueueShare",
    "ScheduledChunk",
    "Scheduler",
    "SchedulerConfig",
    "Sequence",
    "SequenceStatus",
    "StepPlan",
    "StepShape",
    "WaitReason",
    "in_turn",
]
