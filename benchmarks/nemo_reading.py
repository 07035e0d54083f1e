"""Cost of comparing CRC-32 while a `.nemo` is read.

    python -m benchmarks.nemo_reading --megabytes 400 --repetitions 9
    python -m benchmarks.nemo_reading --model models/smollm2-135m-instruct.nemo

Two files of random weights are written, one with a file per rank and one as torch_dist. Each is
read with and without the comparison in turns: every weight is copied into memory of a model. With
``--model``, an actor is built and loaded from this file instead. The medians and minima of the wall
time and of the process's CPU time (all threads) are printed, and the ratios of the medians.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from aligner.architecture import GPTArchitecture
from aligner.checkpoint.canonical import expected_shapes
from aligner.checkpoint.nemo.archive import ArchiveWriter
from aligner.checkpoint.nemo.config import config_from_architecture, dump_config
from aligner.checkpoint.nemo.model_file import CONFIG_FILE, open_nemo, save_nemo
from aligner.checkpoint.nemo.tensor_file import Record
from aligner.checkpoint.nemo.torch_dist import saved_bytes
from aligner.checkpoint.nemo.weights import WEIGHTS_FILE
from aligner.models.gpt import MegatronGPTActorModel, load_from_nemo
from aligner.models.gpt.role.settings import RoleSettings

HIDDEN = 1024


def shape_of(megabytes: int) -> GPTArchitecture:
    """Model with layers of 48 MB, as many as make up the size, and an embedding of 33 MB."""
    return GPTArchitecture(
        num_layers=max(1, (megabytes - 33) // 48),
        hidden_size=HIDDEN,
        ffn_hidden_size=4 * HIDDEN,
        num_attention_heads=16,
        num_query_groups=16,
        kv_channels=64,
        vocab_size=8192,
        max_position_embeddings=2048,
        activation="squared_relu",
        normalization="rmsnorm",
        position_embedding="rope",
        bias_linear=False,
        tie_embeddings=True,
    )


def write_files(folder: Path, architecture: GPTArchitecture) -> dict[str, Path]:
    """The same random weights in two layouts."""
    weights = {name: torch.randn(shape) for name, shape in expected_shapes(architecture).items()}
    files = {kind: folder / f"{kind}.nemo" for kind in ("rank file", "torch_dist")}
    save_nemo(files["torch_dist"], weights, architecture, {})
    with files["rank file"].open("wb") as stream:
        archive = ArchiveWriter(stream)
        archive.add(CONFIG_FILE, dump_config(config_from_architecture(architecture)))
        state = {f"model.{name}": tensor for name, tensor in weights.items()}
        with archive.open(WEIGHTS_FILE) as member:
            member.write(saved_bytes(state))
        archive.finish()
    return files


def read(path: Path, targets: dict[str, Tensor]) -> tuple[float, float]:
    """Wall time and CPU time in seconds of one reading."""
    wall, cpu = time.perf_counter(), time.process_time()
    with open_nemo(path) as nemo:
        for name, target in targets.items():
            target.copy_(nemo.weights[name])
    return time.perf_counter() - wall, time.process_time() - cpu


def start_role(path: Path) -> tuple[float, float]:
    """Wall time and CPU time in seconds of building and loading an actor."""
    wall, cpu = time.perf_counter(), time.process_time()
    load_from_nemo(MegatronGPTActorModel, RoleSettings(), restore_path=path)
    return time.perf_counter() - wall, time.process_time() - cpu


def compare(name: str, measure: Callable[[], tuple[float, float]], repetitions: int) -> None:
    """Measure with and without the comparison in turns, and print the medians and minima."""
    without = mock.patch.multiple(Record, begin=lambda *_: None, check=lambda _: None)
    measure()  # fills the page cache
    times: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for _ in range(repetitions):
        times[True].append(measure())
        with without:
            times[False].append(measure())
    print(name)
    for index, kind in enumerate(("wall", "CPU")):
        seconds = {key: [pair[index] for pair in pairs] for key, pairs in times.items()}
        compared, plain = (statistics.median(seconds[key]) for key in (True, False))
        print(
            f"  {kind}: {compared:.3f} s with, {plain:.3f} s without, "
            f"ratio {compared / plain:.2f}, "
            f"minima {min(seconds[True]):.3f} s, {min(seconds[False]):.3f} s"
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--model", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.model is not None:
        name = f"start of an actor from {arguments.model.name}"
        compare(name, partial(start_role, arguments.model), arguments.repetitions)
        return
    architecture = shape_of(arguments.megabytes)
    targets = {name: torch.zeros(shape) for name, shape in expected_shapes(architecture).items()}
    with tempfile.TemporaryDirectory() as folder:
        for kind, path in write_files(Path(folder), architecture).items():
            name = f"{kind}, {path.stat().st_size / 1e6:.0f} MB"
            compare(name, partial(read, path, targets), arguments.repetitions)


if __name__ == "__main__":
    main()
