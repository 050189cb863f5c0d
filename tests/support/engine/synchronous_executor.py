"""The base of executors for tests that run a step at once."""

from concurrent.futures import Future

from common.step_plan import StepPlan, StepResult


class SynchronousExecutor:
    is_asynchronous = False

    def run(self, plan: StepPlan) -> StepResult:
        raise NotImplementedError

    def launch(self, plan: StepPlan) -> "Future[StepResult]":
        ended: Future[StepResult] = Future()
        ended.set_result(self.run(plan))
        return ended
