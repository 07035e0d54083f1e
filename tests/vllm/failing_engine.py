"""A vLLM engine that fails once, in the middle of a batch."""

from typing import Any

from aligner.generation.vllm.worker import VllmWorker

FAILS_AT = 5  # of the engine's steps


class FailingWorker(VllmWorker):
    """Its engine has sampled some tokens of the batch when it raises."""

    def __init__(self, *arguments: Any, **given: Any) -> None:
        super().__init__(*arguments, **given)
        core = self._engine._llm.llm_engine
        step, steps = core.step, 0

        def fails() -> Any:
            nonlocal steps
            steps += 1
            if steps == FAILS_AT:
                raise RuntimeError("the engine's device is gone for a moment")
            return step()

        core.step = fails
