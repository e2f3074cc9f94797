"""Loads inside the step: what the engine is compared with. The step that needs an adapter waits for its copies."""

from dataclasses import replace
from typing import Any

from loraplex.engine import Engine
from loraplex.engine.runner import Step, StepInFlight


class SynchronousLoads:
    """While entered, an engine starts requests whose adapter is absent, and fills the pages before it launches."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._runner: Any = engine._runner
        self.num_loads = 0

    def __enter__(self) -> "SynchronousLoads":
        engine = self._engine
        assert not engine.scheduler.sequences, "loads are switched while requests run"
        self._set_load_ahead(is_on=False)
        engine._runner = self
        return self

    def __exit__(self, *exception: object) -> None:
        self._set_load_ahead(is_on=True)
        self._engine._runner = self._runner

    def _set_load_ahead(self, *, is_on: bool) -> None:
        """In every part of the scheduler that reads it."""
        scheduler: Any = self._engine.scheduler
        config = replace(scheduler.config, load_ahead=is_on)
        scheduler.config = scheduler._parts.config = config
        scheduler._admission._config = scheduler._load_ahead._config = config

    def launch(self, step: Step) -> StepInFlight:
        """Copy what the plan lacks, wait until it is there, and launch."""
        for load in step.plan.loads:
            self._runner.load(load.pages, step.packed[load.digest].image)
        if step.plan.loads:
            mark = self._runner.load_mark()
            while not mark.is_done():
                pass
            self.num_loads += len(step.plan.loads)
        return self._runner.launch(step)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)
