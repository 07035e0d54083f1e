"""Workers of the tests: they tell what they were given and where they are."""

import os
import signal
import sys
import time

import numpy as np

from aligner.distributed.named_sharding import NamedSharding
from aligner.errors import DataError

TELLER = "ray_workers.Teller"
GRID = NamedSharding(np.arange(4).reshape(2, 2), ["data_parallel", "tensor_parallel"])


def teller_on(cluster):
    """Four of them: two data-parallel pairs."""
    from aligner.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup

    builder = RayWorkerBuilder(TELLER, factor=10)
    return RayWorkerGroup(cluster, builder, "teller", sharding_annotations=GRID)


class Teller:
    def __init__(self, factor=1, fail=False):
        if fail:
            raise DataError("column x is missing")
        self.factor = factor

    def place(self):
        names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "ANOTHER_PYTHON")
        names += ("ALIGNER_SHARED_DEVICE", "PYTORCH_ALLOC_CONF", "CUDA_VISIBLE_DEVICES")
        return {name: os.environ.get(name) for name in names} | {"folder": os.getcwd()}

    def echo(self, data=None, plus=0):
        rows = None if data is None else [x * self.factor + plus for x in data]
        return int(os.environ["RANK"]), rows

    def step(self):
        from aligner.errors import current_step

        return current_step()

    def refuse(self, error):
        raise error

    def stumble(self):
        print("about to stumble")
        raise KeyError("nowhere")

    def need(self, extra):
        """Ask for an extra whose packages this process lacks."""
        from aligner.packages import OPTIONAL_PACKAGES, require_extra

        for package in OPTIONAL_PACKAGES:
            if package.extra == extra:
                sys.modules[package.name] = None
        require_extra(extra, "x.gguf")

    def die(self):
        print("these are my last words")
        os.kill(os.getpid(), signal.SIGKILL)

    def sleep(self, ranks, seconds=60):
        if int(os.environ["RANK"]) in ranks:
            time.sleep(seconds)


class Closing(Teller):
    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def shutdown(self):
        (self.folder / os.environ["RANK"]).write_text("closed")


class Summer:
    """A training worker: it has a place in a torch.distributed world."""

    def __init__(self, parallel):
        self.parallel = parallel

    def sum_of_ranks(self):
        import torch
        import torch.distributed as dist

        ranks = torch.tensor([float(self.parallel.rank)])
        dist.all_reduce(ranks)
        return ranks

    def place(self):
        return self.parallel.dp_rank, self.parallel.tp_rank

    def wait_for_the_dead(self, dying):
        if self.parallel.rank == dying:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.sum_of_ranks()
