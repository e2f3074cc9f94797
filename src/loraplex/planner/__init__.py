"""Simulation: the engine's own scheduler and pool on a virtual clock, with the cost model in place of the model."""

from loraplex.planner.report import Report, make_report
from loraplex.planner.simulator import Outcome, Policy, SimDevice, Simulation, simulate
from loraplex.planner.workload import SimAdapter, SimRequest, Traffic, Workload, make_workload

__all__ = [
    "Outcome",
    "Policy",
    "Report",
    "SimAdapter",
    "SimDevice",
    "SimRequest",
    "Simulation",
    "Traffic",
    "Workload",
    "make_report",
    "make_workload",
    "simulate",
]
