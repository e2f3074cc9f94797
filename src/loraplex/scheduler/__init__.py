"""Queues, admission and continuous batching. Plans steps as values; knows no tensors, clocks or threads."""

from loraplex.scheduler.config import SchedulerConfig
from loraplex.scheduler.plan import AdapterLoad, Committed, ScheduledChunk, StepPlan
from loraplex.scheduler.scheduler import Scheduler
from loraplex.scheduler.sequence import UNKNOWN_TOKEN, Sequence, SequenceStatus

__all__ = [
    "UNKNOWN_TOKEN",
    "AdapterLoad",
    "Committed",
    "ScheduledChunk",
    "Scheduler",
    "SchedulerConfig",
    "Sequence",
    "SequenceStatus",
    "StepPlan",
]
