"""Kinds of environments: possible values of ``environment.kind``.

A kind is a class in `aligner.catalog.ENVIRONMENT_KINDS` or at ``package.module:Class`` or
``path/to/file.py:Class``. The configuration imports the module of the class. Modules that only a
run needs are named by ``rollouts`` and imported later.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, ClassVar

from aligner.config import SamplingRunConfig
from aligner.importing import load_function

if TYPE_CHECKING:
    from aligner.algorithms.rollout.rollout import RolloutSource
    from aligner.architecture import GPTArchitecture
    from aligner.data.tokenizers.tokenizer import Tokenizer


class EnvironmentKind:
    """Base of the kinds of environments.

    ``rollouts`` is the path of a class or function that returns a `RolloutSource` for the arguments
    of `open`. A `ConversationRollouts` brings retries and the limits of ``environment``. ``extra``
    is the extra of this package that a run needs, or None.
    """

    rollouts: ClassVar[str]
    extra: ClassVar[str | None] = None

    @classmethod
    def problems(cls, key: str, run: SamplingRunConfig) -> Iterator[str]:
        """Yield a message for each rule that a run with this kind breaks.

        ``key`` is the section's key, ``environment``.
        """
        yield from ()

    @classmethod
    def open(
        cls,
        config: SamplingRunConfig,
        tokenizer: "Tokenizer",
        architecture: "GPTArchitecture",
        columns: Mapping[str, str | None],
        closing: ExitStack,
    ) -> "RolloutSource":
        """Start the environments on all ranks, until ``closing`` closes.

        Settings of the kind are in ``config.environment.kwargs``. ``tokenizer`` and
        ``architecture`` are the policy's. ``columns`` are the data's (see `columns_of_rows` in
        `aligner.data.prompts`).
        """
        make = load_function(cls.rollouts, key="environment.kind")
        rollouts: RolloutSource = make(config, tokenizer, architecture, columns, closing)
        return rollouts
