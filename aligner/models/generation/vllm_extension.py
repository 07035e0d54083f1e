"""What a refit does inside vLLM's worker; vLLM mixes this class into it by its dotted path.

A layer is loaded when all its weights have come, so the groups of a refit may cut anywhere.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor


class RefitExtension:
    """Methods for ``collective_rpc``; ``self`` is vLLM's worker."""

    model_runner: Any
    vllm_config: Any

    def begin_refit(self) -> None:
        """Make room for weights in the form of a checkpoint."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(self.model_runner.get_model())

    def load_refit_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load some weights; layers that are complete are packed and put in force."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config):
            self.model_runner.get_model().load_weights(weights)

    def finish_refit(self) -> None:
        """Finish what could not be finished layer by layer."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(self.model_runner.get_model(), self.vllm_config.model_config)
