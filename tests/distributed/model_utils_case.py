"""What the cases of `test_model_utils_tp` share: a layout, random inputs, a plain reference."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from aligner.distributed import model_utils as mu

DTYPES = {
    # Inputs are exact in both; what is rounded is arithmetic (and for bfloat16 the gradient, once).
    torch.float64: ({"atol": 1e-9, "rtol": 1e-9}, {"atol": 1e-9, "rtol": 1e-9}),
    torch.float32: ({"atol": 2e-5, "rtol": 2e-5}, {"atol": 1e-5, "rtol": 1e-4}),
    torch.bfloat16: ({"atol": 2e-5, "rtol": 2e-5}, {"atol": 1e-4, "rtol": 2**-8}),
}


class Layout:
    """This rank's place: tensor parallel ranks are neighbours, context parallel ones stride."""

    def __init__(self, tp, cp):
        self.tp, self.cp = tp, cp
        self.mesh = init_device_mesh("cpu", (cp, tp), mesh_dim_names=("cp", "tp"))
        self.tp_group, self.cp_group = self.mesh.get_group("tp"), self.mesh.get_group("cp")
        self.tp_rank, self.cp_rank = self.tp_group.rank(), self.cp_group.rank()

    def columns(self, whole):
        """This rank's part of the last dimension."""
        return whole.chunk(self.tp, dim=-1)[self.tp_rank]

    def rows(self, whole):
        """This rank's part of the first dimension."""
        return whole.chunk(self.tp)[self.tp_rank]

    def positions(self, length, rank=None):
        """Positions that a context-parallel rank holds of a sequence, by the definition."""
        rank = self.cp_rank if rank is None else rank
        if self.cp == 1:
            return list(range(length))
        size = length // (2 * self.cp)
        assert size * 2 * self.cp == length
        return [chunk * size + i for chunk in (rank, 2 * self.cp - 1 - rank) for i in range(size)]


class Case:
    """Random shapes and inputs, the same on all ranks."""

    def __init__(self, layout, seed, dtype, one_position=False):
        self.layout, self.dtype, self.group = layout, dtype, layout.tp_group
        self.random = torch.Generator().manual_seed(seed)
        self.batch = self.integer(1, 4)
        self.length = 2 * layout.cp * self.integer(1, 5)
        if one_position:
            self.length = 2 * layout.cp if layout.cp > 1 else 1
        self.columns = self.integer(3, 12)  # per rank
        self.vocab = self.columns * layout.tp
        start = self.columns * layout.tp_rank
        self.span = start, start + self.columns
        self.chunk = self.integer(1, self.length + 2)  # rarely a divisor
        self.forward, self.backward = DTYPES[dtype]

    def integer(self, low, high):
        return int(torch.randint(low, high + 1, (), generator=self.random))

    def normal(self, *shape, scale=3.0):
        values = torch.randn(*shape, generator=self.random, dtype=torch.float64) * scale
        return values.to(self.dtype).double()  # exact in every dtype used

    def upstream(self, *shape):
        return torch.randn(*shape, generator=self.random, dtype=torch.float64).float().double()

    def tokens(self, *shape):
        tokens = torch.randint(0, self.vocab, shape, generator=self.random)
        edges = [edge % self.vocab for edge in range(0, self.vocab + 1, self.columns)]
        edges += [(edge - 1) % self.vocab for edge in edges]  # first and last id of every shard
        flat = tokens.view(-1)
        flat[: len(edges)] = torch.tensor(edges)[: len(flat)]
        return tokens

    def logits(self):
        """[B, S, V] of the whole vocabulary."""
        return self.normal(self.batch, self.length, self.vocab).requires_grad_()

    def hidden(self, length, batch):
        """Hidden states [S, B, 5] and the weight [V, 5] of the whole output layer."""
        shapes = (length, batch, 5), (self.vocab, 5)
        return [self.normal(*shape, scale=1.0).requires_grad_() for shape in shapes]

    def leaf(self, part):
        """A part in the dtype under test, with a gradient of its own."""
        return part.detach().to(self.dtype).clone().requires_grad_()

    def local(self, logits):
        """This rank's columns of [B, S, V], in the dtype under test."""
        return self.leaf(self.layout.columns(logits))

    def check(self, logits, wanted, *functions, held=None):
        """Functions of this rank's logits, and their gradients, against ``wanted`` of the whole.

        ``held``: positions of this context-parallel rank, whose gradients count once for each rank.
        """
        upstream, mine = self.upstream(*wanted.shape), logits.detach()
        whole = self.layout.columns(gradient(wanted, logits, upstream))
        if held is not None:
            whole, mine = whole[:, held] * self.layout.cp, mine[:, held]
        for function in functions:
            local = self.local(mine)
            output = function(local)
            torch.testing.assert_close(output.double(), wanted.detach(), **self.forward)
            (back,) = torch.autograd.grad(output, local, upstream.to(output.dtype))
            assert back.dtype == local.dtype
            torch.testing.assert_close(back.double(), whole, **self.backward)

    def check_fused(self, output, wanted, inputs, upstream, wanted_grads, ranks=1):
        """Values, gradients of hidden states and weight, over so many context-parallel ranks."""
        torch.testing.assert_close(output.double(), wanted.detach(), **self.forward)
        grad_hidden, grad_weight = torch.autograd.grad(output, inputs, upstream.to(output.dtype))
        grad_weight = grad_weight.double()
        if ranks > 1:  # each has the part of its own tokens
            dist.all_reduce(grad_weight, group=self.layout.cp_group)
        for actual, whole in zip((grad_hidden, grad_weight), wanted_grads, strict=True):
            # bfloat16: each rank rounds its part before they are added up.
            is_rounded = self.dtype == torch.bfloat16
            loose = {"rtol": 2**-5, "atol": 0.2} if is_rounded else self.backward
            torch.testing.assert_close(actual.double(), whole * ranks, **loose)


def gradient(output, inputs, upstream):
    return torch.autograd.grad(output, inputs, upstream, retain_graph=True)[0]


# The reference: plain torch on whole float64 tensors --------------------------------------------


def picked(logits, tokens):
    return logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)


def negative_entropy(logits):
    """Σ p log p; a logit of -inf counts 0."""
    logprob = logits.log_softmax(-1)
    return (logprob.exp() * logprob.masked_fill(logprob.isneginf(), 0)).sum(-1)


def filtered(logits, tokens, top_k=None, top_p=1.0, temperature=1.0, keep_target=False):
    """-inf outside the kept set, found row by row by sorting."""
    logits = logits / temperature
    mask = torch.ones(logits.shape, dtype=torch.bool)
    for row, kept, token in zip(
        logits.detach().flatten(0, -2), mask.flatten(0, -2), tokens.flatten(), strict=True
    ):
        order = row.argsort(descending=True)
        order = order[: top_k if top_k and top_k > 0 else None]
        probability = row[order].softmax(0)
        before = probability.cumsum(0) - probability
        order = order[(before < top_p) | (torch.arange(len(order)) == 0)]
        kept[:] = row >= row[order[-1]]  # equal logits stay together
        if keep_target:
            kept[token] = True
    return picked(logits.masked_fill(~mask, -torch.inf), tokens)


SAMPLING = [
    None,
    {"temperature": 0.7},
    {"top_k": 3},
    {"top_p": 0.8, "temperature": 1.3, "keep_target": True},
    {"top_k": 3, "keep_target": True},
]


def reference(logits, tokens, options):
    return filtered(logits, tokens, **options) if options else picked(logits, tokens)


def params_of(options):
    return options and mu.TrainingSamplingParams(**options)
