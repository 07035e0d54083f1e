"""Run states: what is saved comes back bit-equal, the right states are kept, failures lose none."""

import errno
import json
import math
import os
import random
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from newest_state import newest
from ranks import FORKSERVER

from aligner.checkpoint import durable
from aligner.checkpoint.run_state import files as state_files
from aligner.checkpoint.run_state.store import RunStateStore
from aligner.checkpoint.run_state.tree import capture_rng, restore_rng
from aligner.device import accelerator
from aligner.errors import CheckpointError, CheckpointNotFoundError, DamagedStateError, StorageError
from aligner.parallel.groups import initialize_parallel


def small_state(seed: int) -> dict:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(3, 5, generator=generator)
    return {
        "policy": {"weight": weight, "tied": weight, "half": weight.bfloat16(), "none": None},
        "optimizer": {
            "state": {0: {"step": torch.tensor(3.0)}},
            "groups": [{"betas": (0.9, 0.95)}],
        },
        "counters": {"step": seed, "kl": 0.1 + 0.2, "done": False, "history": [1, 2**60]},
        "odd": {"nan": math.nan, "pair": (1, "a")},
    }


def test_every_entry_comes_back_bit_equal(tmp_path):
    state = small_state(7)
    store = RunStateStore(tmp_path)
    path = store.save(7, state)
    loaded = store.load(path)
    assert (path.name, loaded.step) == ("step_000007", 7)
    for name in ("weight", "tied", "half"):
        got, want = loaded.state["policy"][name], state["policy"][name]
        assert got.dtype == want.dtype
        assert torch.equal(got, want)
    assert loaded.state["policy"]["tied"].data_ptr() == loaded.state["policy"]["weight"].data_ptr()
    assert loaded.state["optimizer"]["groups"] == [{"betas": (0.9, 0.95)}]
    assert loaded.state["optimizer"]["state"][0]["step"] == 3.0
    assert loaded.state["counters"] == state["counters"]
    assert math.isnan(loaded.state["odd"]["nan"])
    assert loaded.state["odd"]["pair"] == (1, "a")
    assert json.loads((path / "state.json").read_text()) == {"counters": state["counters"]}


def test_numpy_scalars_become_plain_and_foreign_objects_are_refused_with_their_place(tmp_path):
    store = RunStateStore(tmp_path)
    path = store.save(1, {"counters": {"n": np.int64(3), "x": np.float32(0.5)}})
    assert store.load(path).state["counters"] == {"n": 3, "x": 0.5}
    with pytest.raises(CheckpointError, match=r"sampler\.rng\[1\] is a random\.Random"):
        store.save(2, {"sampler": {"rng": [1, random.Random()]}})
    with pytest.raises(CheckpointError, match=r"\.\./evil"):
        store.save(2, {"../evil": {}})
    assert [state.step for state in store.states()] == [1]


def test_nothing_is_unpickled(tmp_path):
    store = RunStateStore(tmp_path)
    path = store.save(1, {"policy": {"w": torch.ones(1)}})
    torch.save({"w": pytest.raises}, path / "policy.pt")
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["policy.pt"] = (path / "policy.pt").stat().st_size
    del manifest["checksums"]  # whoever forges one can forge the other
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"policy\.pt cannot be read"):
        store.load(path)


BEST = {"save_top_k": 2, "monitor": "val_rollouts/accuracy", "mode": "max"}
LEAST = {"save_top_k": 1, "monitor": "loss", "mode": "min"}


@pytest.mark.parametrize(
    ("options", "metrics", "kept"),
    [
        (BEST, [0.3, 0.9, None, 0.5, math.nan, 0.1], [2, 4, 6]),
        (LEAST, [0.5, 0.2, 0.2, 0.4], [3, 4]),
        ({"save_top_k": 2}, [None] * 4, [3, 4]),
        ({**LEAST, "save_last_k": 2}, [0.5, 0.1, 0.2, None, 0.4], [2, 4, 5]),
    ],
    ids=["best and newest", "ties prefer the later", "no monitor", "one before the last"],
)
def test_the_states_that_are_kept(tmp_path, options, metrics, kept):
    store = RunStateStore(tmp_path, **options)
    for step, metric in enumerate(metrics, 1):
        store.save(step, {"counters": {"step": step}}, metric)
    assert [state.step for state in store.states()] == kept
    assert newest(store) == tmp_path / f"step_{len(metrics):06d}"
    # Values of another metric are not compared.
    store = RunStateStore(tmp_path, monitor="another")
    store.save(7, {}, 0.0)
    store.save(8, {}, -1.0)
    assert [state.step for state in store.states()] == [7, 8]


def test_damaged_states_are_passed_over_and_leftovers_removed(tmp_path):
    store = RunStateStore(tmp_path, save_top_k=5)
    for step in (1, 2, 3):
        store.save(step, {"policy": {"w": torch.zeros(100)}})
    with open(tmp_path / "step_000003" / "policy.pt", "r+b") as file:
        file.truncate(50)
    (tmp_path / ".tmp-step_000009").mkdir()
    (tmp_path / "step_000002").rename(tmp_path / ".old-step_000002")  # between the two renames
    assert newest(store) == tmp_path / "step_000002"
    assert not list(tmp_path.glob(".*"))
    with pytest.raises(CheckpointError, match="damaged or incomplete"):
        store.load(tmp_path / "step_000003")
    with pytest.raises(CheckpointNotFoundError):
        store.load(tmp_path / "step_000099")


@pytest.mark.parametrize(
    ("key", "value"),
    [("step", 10**9), ("step", "3"), ("step", True), ("files", []), ("metric", "x")],
)
def test_a_manifest_that_cannot_be_is_passed_over(tmp_path, key, value):
    store = RunStateStore(tmp_path, save_last_k=2)
    store.save(1, {})
    path = store.save(2, {}) / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    assert newest(store) == tmp_path / "step_000001"
    assert str(path.parent) in store.survey()[1][0]


def test_states_of_earlier_versions_have_no_checksums_and_still_load(tmp_path):
    store = RunStateStore(tmp_path)
    path = store.save(7, small_state(7))
    manifest = json.loads((path / "manifest.json").read_text())
    files = ["odd.pt", "optimizer.pt", "policy.pt", "state.json"]
    assert sorted(manifest.pop("checksums")) == files
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert store.load(path).state["counters"] == small_state(7)["counters"]
    (path / "state.json").write_bytes(b"x" * (path / "state.json").stat().st_size)
    with pytest.raises(DamagedStateError, match=r"state\.json cannot be read"):
        store.load(path)


def test_a_state_of_another_format_is_refused_and_not_passed_over(tmp_path):
    store = RunStateStore(tmp_path)
    manifest = store.save(1, {"counters": {}}) / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 3', '"format": 1'))
    with pytest.raises(CheckpointError, match=r"format 1, but this version reads 3.*log_dir"):
        newest(store)
    assert newest(RunStateStore(tmp_path / "not" / "there")) is None


@pytest.mark.integration
def test_rng_states_come_back(tmp_path):
    """Also those of megatron-core's stream for tensor-parallel ranks, if the state has them."""
    initialize_parallel()

    def draw() -> tuple:
        plain = random.random(), np.random.rand(), torch.rand(1).item(), random.gauss(0, 1)  # noqa: NPY002
        with get_cuda_rng_tracker().fork():
            return plain, torch.rand(3).tolist()

    random.gauss(0, 1)  # leaves half a pair behind, which is part of the state
    draw()
    store = RunStateStore(tmp_path)
    path = store.save(1, {"rng": capture_rng(accelerator.rng_state)})
    plain, apart = draw()
    assert draw()[1] != apart
    state = store.load(path).state["rng"]
    restore_rng(state, accelerator.set_rng_state)
    assert draw() == (plain, apart)
    for device in (None, torch.zeros(16, dtype=torch.uint8)):  # of earlier versions
        restore_rng({**state, "device": device}, accelerator.set_rng_state)
        again, stream = draw()
        assert again == plain
        assert stream != apart  # the stream went on


def state_of(step: int, numbers: int = 100_000) -> dict:
    weight = torch.full((numbers,), float(step)) + torch.arange(numbers)
    return {"policy": {"weight": weight}, "counters": {"step": step}}


def assert_complete(path: Path, numbers: int = 100_000) -> int:
    """The state at ``path`` is bit-equal to what was saved; returns its step."""
    loaded = RunStateStore(path.parent).load(path)
    expected = state_of(loaded.step, numbers)
    assert torch.equal(loaded.state["policy"]["weight"], expected["policy"]["weight"])
    assert loaded.state["counters"] == expected["counters"]
    return loaded.step


@contextmanager
def size_limit(number: int) -> Iterator[None]:
    """Let no file grow beyond a number of bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (number, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_write_that_fails_half_way_leaves_the_previous_state(tmp_path):
    store = RunStateStore(tmp_path)
    store.save(1, state_of(1))
    with size_limit(150_000), pytest.raises(StorageError) as caught:
        store.save(2, state_of(2))
    assert caught.value.errno == errno.EFBIG
    file = str(tmp_path / ".tmp-step_000002" / "policy.pt")
    for part in (file, "bytes) needed", "bytes) free", "intact"):
        assert part in str(caught.value)
    assert [child.name for child in tmp_path.iterdir()] == ["step_000001"]
    assert assert_complete(newest(store)) == 1


def disk_is_full(path: Path) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("module", "name", "replacement", "message"),
    [
        (durable, "free_bytes", lambda path: 399_999, r"390\.62 KiB \(399999 bytes\) free"),
        (state_files, "sync_tree", disk_is_full, "No space left on device"),
    ],
    ids=["before anything is written", "while the manifest is flushed"],
)
def test_a_full_disk(tmp_path, monkeypatch, module, name, replacement, message):
    RunStateStore(tmp_path).save(1, state_of(1))
    monkeypatch.setattr(module, name, replacement)
    with pytest.raises(StorageError, match=message) as caught:
        RunStateStore(tmp_path).save(2, state_of(2))
    assert caught.value.errno == errno.ENOSPC
    assert [child.name for child in tmp_path.iterdir()] == ["step_000001"]


def test_unwritable_directory_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"file/states.*explicit_log_dir"):
        RunStateStore(tmp_path / "file" / "states").save(1, state_of(1))


def test_bytes_are_on_the_disk_before_the_name_and_the_name_before_the_old_state_goes(
    tmp_path, monkeypatch
):
    RunStateStore(tmp_path, save_top_k=0).save(1, state_of(1, 10))
    events = []

    def spy(module, name: str, shown) -> None:
        real = getattr(module, name)

        def call(*args, **kwargs):
            events.append((name, shown(*args)))
            return real(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    spy(os, "fsync", lambda file: os.path.basename(os.readlink(f"/proc/self/fd/{file}")))
    spy(os, "rename", lambda old, new: f"{old.name} {new.name}")
    RunStateStore(tmp_path, save_top_k=0).save(2, state_of(2, 10))
    named = events.index(("rename", ".tmp-step_000002 step_000002"))
    flushed = {what for name, what in events[:named] if name == "fsync"}
    assert flushed == {"manifest.json", "state.json", "policy.pt", ".tmp-step_000002"}
    assert events[named + 1] == ("fsync", tmp_path.name)
    assert events[named + 2] == ("rename", "step_000001 .del-step_000001")


def _save_and_die_at_call(root: str, fatal_call: int) -> None:
    """Save steps 2 and (again) 2, killing this process just before the n-th critical call."""
    calls = 0

    def deadly(function):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == fatal_call:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    for module, name in ((os, "fsync"), (os, "rename"), (state_files.shutil, "rmtree")):
        setattr(module, name, deadly(getattr(module, name)))
    store = RunStateStore(root, save_top_k=0)
    for _ in range(2):
        store.save(2, state_of(2, 10))


@pytest.mark.integration
def test_killed_at_every_critical_call_a_complete_state_remains(tmp_path):
    survived = set()
    for fatal_call in range(1, 100):
        root = tmp_path / str(fatal_call)
        RunStateStore(root).save(1, state_of(1, 10))
        child = FORKSERVER.Process(target=_save_and_die_at_call, args=(str(root), fatal_call))
        child.start()
        child.join()
        survived.add(assert_complete(newest(RunStateStore(root)), 10))
        assert not list(root.glob(".*"))
        if child.exitcode == 0:
            break
        assert child.exitcode == -signal.SIGKILL
    assert child.exitcode == 0
    assert fatal_call > 15
    assert survived == {1, 2}
