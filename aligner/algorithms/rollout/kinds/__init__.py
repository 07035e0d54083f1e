"""Kinds of environments: what ``environment.kind`` may name.

A kind is a class, by a row of `aligner.catalog.ENVIRONMENT_KINDS` or as ``package.module:Class`` or
``path/to/file.py:Class``. Its module is imported with the configuration: modules that a run alone
needs are named by ``rollouts``.
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
    """A kind of environment.

    ``rollouts``: path of a class or function that makes the `RolloutSource` of the arguments of
    `open`; a `ConversationRollouts` has the retries, limits and clocks of all kinds. ``extra``: of
    the package, which a run needs; None: none.
    """

    rollouts: ClassVar[str]
    extra: ClassVar[str | None] = None

    @classmethod
    def problems(cls, key: str, run: SamplingRunConfig) -> Iterator[str]:
        """Yield a message for each rule that a run with this kind of environment breaks.

        ``key``: of the section, ``environment``.
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
        """Start the environments; collective.

        Args:
            config: of the run; the kind's own settings are in ``environment.kwargs``.
            tokenizer: the policy's.
            architecture: the policy's.
            columns: those of the data, of `aligner.data.prompts.columns_of_rows`.
            closing: ends the environments.
        """
        make = load_function(cls.rollouts, key="environment.kind")
        rollouts: RolloutSource = make(config, tokenizer, architecture, columns, closing)
        return rollouts
