"""`.nemo` files of whole state dicts take no memory of their own in a process that reads them."""

import ctypes
import dataclasses
import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import nemo_writers as writers
import pytest
import torch
from test_nemo_kinds import (
    GPT,
    GPT_KEYS,
    LLAMA,
    LLAMA_KEYS,
    assert_same,
    distinct_weights,
    read_back,
)

from aligner.checkpoint.canonical import split
from aligner.checkpoint.nemo import inflated
from aligner.checkpoint.nemo.archive import ArchiveReader
from aligner.checkpoint.nemo.model_file import open_nemo
from aligner.errors import CheckpointError

MIB = 1 << 20
LARGE_SIZES = {"num_layers": 2, "hidden_size": 1024, "ffn_hidden_size": 4096, "kv_channels": 64}
LARGE = dataclasses.replace(LLAMA, **LARGE_SIZES)


def own_bytes():
    """Memory of this process that belongs to no file, without what the allocator keeps free."""
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"RssAnon:\s+(\d+)", status)[1])


def mapped_bytes(path):
    """Pages of a mapped file that this process has touched."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


@pytest.mark.integration
def test_a_rank_reads_its_part_of_the_file_and_holds_nothing(tmp_path):
    path = tmp_path / "large.nemo"
    weights = distinct_weights(LARGE)
    members = writers.rank_files(weights, LARGE, 2, 1)
    writers.write_archive(path, writers.config_members(21, **LLAMA_KEYS | LARGE_SIZES) | members)
    del members
    size = path.stat().st_size
    assert size > 100 * MIB
    with open_nemo(path) as nemo:
        assert nemo.weights  # imports what reading needs, of this library and others
    before = own_bytes()
    with open_nemo(path) as nemo:
        found = nemo.weights
        assert set(found) == set(weights)
        assert mapped_bytes(path) < 8 * MIB
        for name, whole in weights.items():
            wanted = split(name, whole, LARGE, 1, 2)
            assert torch.equal(found.share(name, 1, 2), wanted), name
        del wanted
        assert mapped_bytes(path) < size / 2 + 8 * MIB
    assert own_bytes() - before < 16 * MIB
    del found


@pytest.mark.parametrize("before", [1, 2, 4])
@pytest.mark.parametrize(("architecture", "keys"), [(LLAMA, LLAMA_KEYS), (GPT, GPT_KEYS)])
def test_parts_are_those_of_the_whole(tmp_path, architecture, keys, before):
    """The padding depends on TP. The GPT is tied, so its last stage has a copy."""
    architecture = dataclasses.replace(architecture, num_query_groups=4)
    weights = distinct_weights(architecture)
    path = tmp_path / "m.nemo"
    members = writers.config_members(21, **{**keys, "num_query_groups": 4})
    writers.write_archive(path, members | writers.rank_files(weights, architecture, before, 2))
    with open_nemo(path) as nemo:
        found = nemo.weights
    for rank, now in [(0, 1), (0, 2), (1, 2), (1, 4), (3, 4)]:
        for name, whole in weights.items():
            wanted = split(name, whole, architecture, rank, now)
            assert torch.equal(found.share(name, rank, now), wanted), (name, rank)


def test_what_is_written_stays_out_of_the_file(tmp_path):
    path = tmp_path / "m.nemo"
    members = writers.config_members(21, **LLAMA_KEYS)
    writers.write_archive(path, members | writers.single_file(distinct_weights(LLAMA)))
    content = path.read_bytes()
    with open_nemo(path) as nemo:
        nemo.weights["decoder.layers.0.mlp.linear_fc2.weight"].zero_()
    assert path.read_bytes() == content


def rewritten(data, change, compression=zipfile.ZIP_STORED):
    """A file of `torch.save` whose records went through ``change(name, bytes)``."""
    buffer = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(data)) as source,
        zipfile.ZipFile(buffer, "w", compression) as target,
    ):
        for info in source.infolist():
            target.writestr(info.filename, change(info.filename, source.read(info)))
    return buffer.getvalue()


def swapped(name, content):
    if name.endswith("/byteorder"):
        return b"big"
    if "/data/" in name:
        return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, 4).flip(1).numpy()
    return content


def on_a_gpu(name, content):
    """As saved by a process whose weights were on a device that is not here."""
    cpu, gpu = b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:0"
    return content.replace(cpu, gpu) if name.endswith("/data.pkl") else content


def before_alignment(name, content):
    """As of a torch that did not write how records are aligned."""
    return b"0" if name.endswith("/.format_version") else on_a_gpu(name, content)


def old_format(data):
    buffer = io.BytesIO()
    state = torch.load(io.BytesIO(data), weights_only=True)
    torch.save(state, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "rewrite",
    [
        old_format,
        lambda data: rewritten(data, lambda _, content: content, zipfile.ZIP_DEFLATED),
        lambda data: rewritten(data, lambda name, content: bytes(swapped(name, content))),
        lambda data: rewritten(data, lambda _, content: content),  # not where torch expects them
        lambda data: rewritten(data, on_a_gpu),
        lambda data: rewritten(data, before_alignment),  # is mapped
    ],
    ids=["old", "compressed", "swapped", "moved", "gpu", "unaligned"],
)
def test_other_files_of_torch(tmp_path, rewrite):
    weights = distinct_weights(LLAMA)
    members = writers.single_file(writers.padded(weights, 8), extra=False)
    members = {name: rewrite(data) for name, data in members.items()}
    assert_same(read_back(tmp_path, members)[1], weights)


def test_a_storage_that_is_cut_short_is_named(tmp_path):
    members = writers.single_file(distinct_weights(LLAMA), extra=False)

    def cut(name, content):
        return content[: len(content) // 2] if name.endswith("/data/3") else content

    members = {name: rewritten(data, cut) for name, data in members.items()}
    with pytest.raises(CheckpointError, match=r"model_weights\.ckpt .* damaged"):
        read_back(tmp_path, members)


@pytest.fixture
def packed(tmp_path):
    path = tmp_path / "packed.nemo"
    members = writers.config_members(21, **LLAMA_KEYS)
    members |= writers.single_file(distinct_weights(LLAMA))
    writers.write_archive(path, members, mode="w:gz")
    return path


def test_two_readers_inflate_once_and_neither_waits_for_the_other(packed, temporary, monkeypatch):
    """The second reader looks at the file just before the first one has finished it."""
    is_complete, closed, looks, names = inflated._Shared._is_complete, threading.Event(), [], []
    inflate, inflations = inflated._inflate, []

    def counted(path, target):
        inflations.append(target)
        time.sleep(0.2)
        inflate(path, target)

    monkeypatch.setattr(inflated, "_inflate", counted)

    def looked_too_early(shared):
        if threading.current_thread() is second:
            looks.append(shared)
            return len(looks) > 1 and is_complete(shared)
        return is_complete(shared)

    def read_first():
        with ArchiveReader(packed):
            closed.wait(20)

    def read_second():
        with ArchiveReader(packed) as archive:
            pass
        names.append(archive.names)

    first, second = threading.Thread(target=read_first), threading.Thread(target=read_second)
    monkeypatch.setattr(inflated._Shared, "_is_complete", looked_too_early)
    first.start()
    time.sleep(0.1)  # the first one inflates
    second.start()
    second.join(10)
    waited = second.is_alive()
    closed.set()
    for reader in (first, second):
        reader.join(30)
    assert not waited
    assert len(names) == len(inflations) == 1
    assert list(temporary.iterdir()) == []


@pytest.mark.integration
def test_what_a_killed_reader_left_is_removed(packed, temporary, tmp_path):
    script = """import sys, time
from aligner.checkpoint.nemo.archive import ArchiveReader
reader = ArchiveReader(sys.argv[1])
print('open', flush=True)
time.sleep(300)"""
    command = [sys.executable, "-c", script, str(packed)]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    reader = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
    try:
        assert reader.stdout.readline() == b"open\n"
        other = tmp_path / "other.nemo"
        other.write_bytes(packed.read_bytes())
        with ArchiveReader(other):
            assert len(list(temporary.iterdir())) == 2  # the first is being read
        reader.send_signal(signal.SIGKILL)
        reader.wait(30)
        (left,) = temporary.iterdir()
        assert left.stat().st_mode & 0o777 == 0o400
        with ArchiveReader(other):
            assert left not in temporary.iterdir()
    finally:
        reader.kill()
        reader.wait(30)
    assert list(temporary.iterdir()) == []


def test_unfinished_copies_and_links_are_not_read(packed, temporary, tmp_path):
    place = Path(inflated._shared_path(packed))
    assert place.parent == temporary
    place.write_bytes(b"half")  # its writer was killed
    place.chmod(0o600)
    with ArchiveReader(packed) as archive:
        assert "model_weights.ckpt" in archive.names
    assert list(temporary.iterdir()) == []
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    place = Path(inflated._shared_path(packed))
    place.symlink_to(victim)
    with ArchiveReader(packed) as archive:
        assert "model_weights.ckpt" in archive.names
    assert victim.read_bytes() == b"precious"
    place.unlink()
