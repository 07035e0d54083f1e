"""Common parts of the formulas' comparisons: inputs in float64, comparing, absent modules."""

import abc
import importlib.abc
import importlib.machinery
import importlib.util
import json
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from aligner.types import Denominators, LossFunction, TokenOutputs
from benchmarks.common import stdout_reserved

LIMIT = 1e-6
ROWS, LENGTH, GROUP = 12, 17, 4


@dataclass
class Comparison:
    """One formula, ours and a peer's. ``why``: how they differ, where they are known to."""

    formula: str
    peer: str
    difference: float
    gradient: float | None
    why: str = ""

    @property
    def as_expected(self) -> bool:
        worst = max(self.difference, self.gradient or 0.0)
        return worst > LIMIT if self.why else worst <= LIMIT


@dataclass
class Comparisons:
    peer: str
    found: list[Comparison] = field(default_factory=list)

    def add(
        self,
        formula: str,
        ours: Callable[..., Tensor],
        theirs: Callable[..., Tensor],
        leaf: Tensor | None = None,
        why: str = "",
    ) -> None:
        """Compare results, and with ``leaf`` (the argument of both) the gradient of a scalar."""
        if leaf is None:
            difference, gradient = distance(ours(), theirs()), None
        else:
            (a, slope_a), (b, slope_b) = _with_gradient(ours, leaf), _with_gradient(theirs, leaf)
            difference, gradient = distance(a, b), distance(slope_a, slope_b)
        self.found.append(Comparison(formula, self.peer, difference, gradient, why))

    def print(self) -> None:
        print(json.dumps({"found": [asdict(entry) for entry in self.found]}))


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Compute the largest absolute difference, relative to our largest value if above 1."""
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    scale = max(1.0, ours.abs().max().item())
    return (ours - theirs).abs().max().item() / scale


def _with_gradient(function: Callable[[Tensor], Tensor], leaf: Tensor) -> tuple[Tensor, Tensor]:
    copy = leaf.detach().clone().requires_grad_()
    value = function(copy)
    value.sum().backward()
    assert copy.grad is not None
    return value.detach(), copy.grad


class Inputs:
    """A batch of ``ROWS`` responses, all that any of the formulas takes. Always the same numbers.

    Prompts of 2 tokens, responses of 1 to 15. Rows ``GROUP`` by ``GROUP`` answer the same prompt.
    Rows 2i and 2i + 1 are a pair.
    """

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        ends = torch.randint(3, LENGTH + 1, (ROWS, 1), generator=generator)
        position = torch.arange(LENGTH)
        self.mask = ((position >= 2) & (position < ends)).double()
        keep = torch.rand(ROWS, LENGTH, generator=generator) < 0.7
        self.holes = self.mask * (keep | (position == 2))
        self.logprobs = -torch.rand(ROWS, LENGTH, generator=generator, dtype=torch.float64) - 0.1
        self.prev_logprobs = self.logprobs + 0.3 * normal(ROWS, LENGTH)
        self.ref_logprobs = self.logprobs + 0.3 * normal(ROWS, LENGTH)
        self.token_advantages = normal(ROWS, LENGTH)
        self.row_advantages = normal(ROWS, 1).expand(ROWS, LENGTH)
        self.values, self.returns = normal(ROWS, LENGTH), normal(ROWS, LENGTH)
        self.old_values = self.values + 0.3 * normal(ROWS, LENGTH)
        self.rewards = normal(ROWS)
        self.groups = torch.arange(ROWS) // GROUP
        self.uneven_groups = torch.tensor([0, 1, 1, 2, 2, 2, 3, 3, 3, 3, 3, 3])[:ROWS]
        self.ones = torch.ones(ROWS, dtype=torch.float64)

    def loss(self, function: LossFunction, leaf: Tensor, **columns: Tensor) -> Tensor:
        """Compute one of our losses on the whole batch. ``columns`` are added or replaced."""
        batch = {
            "token_mask": self.mask,
            "sample_mask": self.ones,
            "prev_logprobs": self.prev_logprobs,
            "ref_logprobs": self.ref_logprobs,
            "returns": self.returns,
            "values": self.old_values,
            **columns,
        }
        denominators = Denominators(batch["token_mask"].sum(), batch["sample_mask"].sum())
        return function(TokenOutputs(leaf), batch, denominators)[0]

    def sums(self, values: Tensor) -> Tensor:
        """Sum over the response of each row: [ROWS]."""
        return (values * self.mask).sum(1)


class Nothing(abc.ABCMeta):
    """The type of what a placeholder module holds: classes that are there and do nothing."""

    def __getattr__(cls, name: str) -> "Nothing":
        return nothing(name)


def nothing(name: str) -> Nothing:
    """Return a class that can be named, called and inherited from."""
    if name.startswith("__"):
        raise AttributeError(name)
    return Nothing(name, (), {"__init__": lambda self, *_, **__: None})


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Replace packages that a peer's module imports and its formulas do not use."""

    def __init__(self, packages: Iterable[str]) -> None:
        self.packages = set(packages)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] in self.packages:
            return importlib.util.spec_from_loader(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__getattr__ = nothing  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def without(*packages: str) -> None:
    """Import placeholders for ``packages`` from now on, whether they are there or not."""
    sys.meta_path.insert(0, Absent(packages))


def main(peer: str, compare: Callable[[Comparisons], None]) -> None:
    """Run a peer's comparisons and print them as one line of JSON."""
    torch.set_num_threads(1)
    comparisons = Comparisons(peer)
    with stdout_reserved():
        compare(comparisons)
    comparisons.print()
