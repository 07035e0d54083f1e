"""Refit inside vLLM's worker; vLLM mixes this class into it by its dotted path.

A layer is loaded when all its weights have come, so the groups of a refit may cut anywhere.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn


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
        """Load some weights; layers that are complete are packed and put in force.

        ``weights``: Hugging Face's names and whole tensors, [out, in] or [out], in any float dtype.
        """
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config):
            self.model_runner.get_model().load_weights(weights)

    def finish_refit(self) -> None:
        """Finish what could not be finished layer by layer."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(model, self.vllm_config.model_config)
            if self.vllm_config.model_config.hf_config.tie_word_embeddings:
                _tie_again(model)


def _tie_again(model: nn.Module) -> None:
    """Have the output layer take the embedding's weights.

    No weights of its own come for it, so vLLM leaves it as it was: on CPU, with a packed copy of
    the embedding of before.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )

    tables = [each for each in model.modules() if isinstance(each, VocabParallelEmbedding)]
    embedding = next(each for each in tables if not isinstance(each, ParallelLMHead))
    for head in (each for each in tables if isinstance(each, ParallelLMHead)):
        head.tie_weights(embedding)
        head.quant_method.process_weights_after_loading(head)
