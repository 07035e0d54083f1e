"""Four gloo ranks: one `.nemo` into any TP x PP layout, and out of it unchanged.

That each rank has the right part is seen by what it computes (`test_role_layouts`); rows that pad
the vocabulary are zero. On the way out
only the first replica's ranks make tensors, only rank 0 keeps them, and the file is the same to the
byte.
"""

import dataclasses
import weakref
from unittest import mock

import pytest
import torch
from ranks import on_ranks
from test_nemo_kinds import GPT, LLAMA, distinct_weights
from torch.utils._python_dispatch import TorchDispatchMode

from aligner.checkpoint.canonical import EMBEDDING
from aligner.checkpoint.gpt_weights import GatheredWeights, canonical_parameters, load_weights
from aligner.checkpoint.nemo.model_file import open_nemo, save_nemo
from aligner.models.gpt.megatron.build import build_gpt
from aligner.models.gpt.role.settings import RoleSettings
from aligner.parallel.groups import ParallelConfig, initialize_parallel

RANKS = 4
MODELS = {
    "llama": dataclasses.replace(LLAMA, num_query_groups=4),
    "gpt": GPT,  # tied
    # A rank's padded share of the vocabulary has as many rows as the vocabulary.
    "few tokens": dataclasses.replace(GPT, vocab_size=8),
}


class Watched(TorchDispatchMode):
    """What this rank does while weights are gathered."""

    def __init__(self):
        super().__init__()
        self.bytes = 0  # of new tensors
        self.sent = []
        self.held = 0  # most sent tensors that were alive when the next one was sent
        send = torch.distributed.send

        def watched(tensor, **options):
            self.sent.append(weakref.ref(tensor))
            self.held = max(self.held, sum(ref() is not None for ref in self.sent))
            send(tensor, **options)

        self.patch = mock.patch.object(torch.distributed, "send", watched)

    def __enter__(self):
        self.patch.start()
        return super().__enter__()

    def __exit__(self, *failure):
        self.patch.stop()
        return super().__exit__(*failure)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        given = {each.untyped_storage()._cdata for each in args if isinstance(each, torch.Tensor)}
        is_new = isinstance(result, torch.Tensor) and result.untyped_storage()._cdata not in given
        self.bytes += result.nbytes if is_new and result.dtype.is_floating_point else 0
        return result


def check_layout(folder, name, tp, pp):
    architecture = MODELS[name]
    weights = distinct_weights(architecture)
    parallel = initialize_parallel(ParallelConfig(tensor=tp, pipeline=pp))
    gpt = build_gpt(
        architecture,
        RoleSettings(parallel=parallel.config),
        pre_process=parallel.is_first_stage,
        post_process=parallel.is_last_stage,
    )
    with open_nemo(folder / f"{name}.nemo") as nemo:
        load_weights(gpt, nemo.weights, architecture, tp_rank=parallel.tp_rank, tp_size=tp)
    parameters = dict(canonical_parameters(gpt))
    for padded in parameters.keys() & {EMBEDDING, "output_layer.weight"}:
        rows = parameters[padded]
        assert not rows[max(0, architecture.vocab_size - parallel.tp_rank * len(rows)) :].any()

    if parallel.is_last_stage:  # a head, whole on every tensor rank of the last stage
        gpt.rm_head = torch.nn.Linear(architecture.hidden_size, 1)
        torch.nn.init.ones_(gpt.rm_head.weight)
    groups = {"tp_group": parallel.tp_group, "pp_group": parallel.pp_group}
    with Watched() as watched:
        gathered = GatheredWeights(gpt, architecture, **groups).on_rank_zero()
    assert watched.held <= 1  # of those that are sent to the first stage
    assert bool(watched.sent) == (parallel.rank in range(RANKS // pp, RANKS, RANKS // pp))
    assert (watched.bytes > 0) == (parallel.dp_rank == 0 and (tp > 1 or parallel.rank == 0))
    if parallel.rank != 0:
        assert gathered == {}
        return
    assert torch.equal(gathered.pop("rm_head.weight"), torch.ones(1, architecture.hidden_size))
    gathered.pop("rm_head.bias")
    assert list(gathered) == list(weights)
    for key, tensor in weights.items():
        assert torch.equal(gathered[key], tensor), key
    save_nemo(folder / "again.nemo", gathered, architecture, {})
    assert (folder / "again.nemo").read_bytes() == (folder / f"{name}.nemo").read_bytes()


def check_layouts(folder):
    for name in MODELS:
        for tp, pp in [(2, 2), (4, 1), (1, 4), (1, 2), (2, 1)]:
            check_layout(folder, name, tp, pp)


@pytest.mark.timeout(300)
def test_every_layout_loads_its_share_and_gives_it_back(tmp_path):
    for name, architecture in MODELS.items():
        save_nemo(tmp_path / f"{name}.nemo", distinct_weights(architecture), architecture, {})
    on_ranks(RANKS, check_layouts, tmp_path)
