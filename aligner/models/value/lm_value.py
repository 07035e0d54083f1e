"""`Value`, the handle of a critic, which starts and calls the workers."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from aligner.config import CriticConfig, TrainedModelConfig
from aligner.config.roles.policy import check_policy_backend
from aligner.data.tokenizers.loading import as_tokenizer
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.distributed.interfaces import Cluster
from aligner.distributed.workers import scored_rows
from aligner.models.gpt.role.settings import RunSettings
from aligner.models.handle import RoleHandle
from aligner.models.interfaces import ValueInterface
from aligner.models.value.workers.value_worker import ValueWorker, read_critic


class Value(RoleHandle, ValueInterface):
    """A critic that predicts the return from every token on, and trains on returns."""

    workers: ClassVar[Mapping[str, str]] = {
        "megatron": "aligner.models.value.workers.megatron_value_worker.MegatronValueWorker",
        "dtensor": "aligner.models.value.workers.dtensor_value_worker_v2.DTensorValueWorkerV2",
    }

    def __init__(
        self,
        cluster: Cluster,
        config: CriticConfig | Mapping[str, Any],
        tokenizer: Tokenizer,
        name_prefix: str = "lm_value",
        workers_per_node: int | Sequence[int] | None = None,
        init_optimizer: bool = True,
        weights_path: str | os.PathLike[str] | None = None,
        optimizer_path: str | os.PathLike[str] | None = None,
        *,
        model: TrainedModelConfig | None = None,
        run: RunSettings | None = None,
        backend: str = "megatron",
    ) -> None:
        """Start the workers on ``cluster``.

        They load ``weights_path``, by default ``config.restore_from_path``, by default the policy's
        weights with a new head. ``config``: the critic's section of a configuration, which requires
        ``model``, or a mapping with the keys of `ValueConfig`. ``model``: the policy's section,
        whose micro-batch settings and, unless ``config`` sets a layout, layout are used. For the
        other arguments and the errors see `Policy`.
        """
        self.cfg = config
        config, section, run, published = read_critic(config, model, run)
        backend = backend if published is None else published.backend
        check_policy_backend(backend, section)
        super().__init__(
            cluster,
            config,
            section,
            name_prefix,
            backend,
            weights_path,
            optimizer_path,
            parallel=section.parallel,
            workers_per_node=workers_per_node,
            env_vars=None if published is None else published.env_vars,
            model=section,
            tokenizer=as_tokenizer(tokenizer),
            run=run,
            init_optimizer=init_optimizer,
        )

    get_values = scored_rows(ValueWorker.get_values, ("input_ids", "input_lengths"))
