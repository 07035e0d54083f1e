"""Refit inside vLLM's worker. vLLM adds this class to its worker class by dotted path.

A layer is loaded once all its weights have arrived, so groups of a refit may split layers.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn


class RefitExtension:
    """Methods for ``collective_rpc``, called with vLLM's worker as ``self``."""

    model_runner: Any
    vllm_config: Any

    def begin_refit(self) -> None:
        """Allocate memory for new weights, in the layout of checkpoints."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        model = self.model_runner.get_model()
        for module in model.modules():
            method: Any = getattr(module, "quant_method", None)
            # vLLM packs experts on a CPU only when it makes their kernel.
            if next(model.parameters()).is_cpu and hasattr(method, "moe_kernel"):
                method.moe_kernel = None
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)

    def load_refit_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load a part of the weights (see `VllmEngine.load_weights`). Activate complete layers."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config):
            self.model_runner.get_model().load_weights(weights)

    def finish_refit(self) -> None:
        """Activate weights that span several layers, and tie the output layer."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(model, self.vllm_config.model_config)
            if self.vllm_config.model_config.hf_config.tie_word_embeddings:
                _tie_again(model)


def _tie_again(model: nn.Module) -> None:
    """Tie the output layer to the embedding. On CPU it still uses a packed copy of old weights."""
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )

    tables = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]
    embedding = next(table for table in tables if not isinstance(table, ParallelLMHead))
    for head in (table for table in tables if isinstance(table, ParallelLMHead)):
        head.tie_weights(embedding)
        head.quant_method.process_weights_after_loading(head)
