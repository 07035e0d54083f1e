"""Hostile, damaged and foreign archives are refused by name and leave nothing behind."""

import gzip
import io
import os
import pickle
import random
import tarfile
import warnings
from pathlib import Path

import nemo_writers as writers
import pytest
import torch
from test_nemo_kinds import LLAMA, LLAMA_KEYS, assert_same, distinct_weights

from aligner.checkpoint.nemo import tensor_file
from aligner.checkpoint.nemo.model_file import open_nemo, save_nemo
from aligner.checkpoint.nemo.torch_dist import read_metadata
from aligner.errors import CheckpointError, CheckpointNotFoundError
from aligner.models.gpt import MegatronGPTActorModel, load_from_nemo
from aligner.models.gpt.role.settings import RoleSettings


@pytest.fixture
def good(tmp_path):
    path = tmp_path / "good.nemo"
    save_nemo(path, distinct_weights(LLAMA), LLAMA, {})
    return path


@pytest.fixture(autouse=True)
def nothing_left_behind(tmp_path, monkeypatch):
    """Temporary files go to a folder of their own, which must be empty afterwards."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    yield
    assert list(folder.iterdir()) == []


def add_member(path, name, kind=tarfile.REGTYPE, link=""):
    with tarfile.open(path, "a") as tar:
        info = tarfile.TarInfo(name)
        info.type, info.linkname = kind, link
        info.size = 1 if kind == tarfile.REGTYPE else 0
        tar.addfile(info, io.BytesIO(b"x"))


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("../evil", tarfile.REGTYPE, "'../evil', an unsafe path"),
        ("./a/../../evil", tarfile.REGTYPE, "unsafe path"),
        ("/etc/evil", tarfile.REGTYPE, "'/etc/evil', an unsafe path"),
        ("a\\..\\evil", tarfile.REGTYPE, "unsafe path"),
        ("./link", tarfile.SYMTYPE, "'link', a link"),
        ("./hard", tarfile.LNKTYPE, "link or a device"),
        ("./pipe", tarfile.FIFOTYPE, "link or a device"),
        ("./model_config.yaml", tarfile.REGTYPE, "contains 'model_config.yaml' twice"),
    ],
)
def test_unsafe_members(good, name, kind, message):
    add_member(good, name, kind, link="/etc/passwd")
    with pytest.raises(CheckpointError, match=message), open_nemo(good):
        pass


@pytest.mark.parametrize("packed", [False, True])
def test_truncated_anywhere(good, tmp_path, packed):
    data = good.read_bytes()
    data = gzip.compress(data, 1) if packed else data
    cut = tmp_path / "cut.nemo"
    last = len(data.rstrip(b"\0"))  # beyond it there is only padding
    for length in range(0, last, max(1, last // 100)):
        cut.write_bytes(data[:length])
        with pytest.raises(CheckpointError), open_nemo(cut) as nemo:
            dict(nemo.weights)


@pytest.mark.parametrize("content", [b"", b"not a tar", b"PK\x03\x04" + bytes(4000)])
def test_foreign_files(tmp_path, content):
    path = tmp_path / "foreign.nemo"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"not a \.nemo archive"), open_nemo(path):
        pass
    with pytest.raises(CheckpointNotFoundError, match=r"restore_from_path"):
        open_nemo(tmp_path / "none.nemo").__enter__()


class Evil:
    """Creates a file when unpickled."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (self.target,)


def test_code_in_a_rank_file_is_not_run(tmp_path):
    mark = tmp_path / "mark"
    members = writers.config_members(21, **LLAMA_KEYS)
    members["model_weights.ckpt"] = writers.saved({"model.x": Evil(str(mark))})
    path = tmp_path / "evil.nemo"
    writers.write_archive(path, members)
    with (
        pytest.raises(CheckpointError, match="objects that are no tensors"),
        open_nemo(path) as nemo,
    ):
        dict(nemo.weights)
    assert not mark.exists()


@pytest.mark.parametrize("evil", [os.system, eval, torch.load])
def test_code_in_metadata_is_not_run(evil):
    with pytest.raises(CheckpointError, match="refused as malicious"):
        read_metadata(pickle.dumps(evil))


CONFIG = "model_config.yaml"


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"photo.jpg": b"\xff"}, r"no 'model_config\.yaml'"),
        ({CONFIG: b"!!python/object/apply:os.system ['true']"}, r"model_config\.yaml"),
        ({CONFIG: b"[" * 5000}, r"model_config\.yaml cannot be parsed"),
        ({CONFIG: b"- 1"}, r"model_config\.yaml lacks num_layers, hidden_size"),
        (writers.config_members(21, **LLAMA_KEYS), "contains no weights"),
    ],
    ids=["photo", "code", "nested", "list", "no weights"],
)
def test_archives_that_lack_something(tmp_path, members, message):
    writers.write_archive(tmp_path / "m.nemo", members)
    with pytest.raises(CheckpointError, match=message), open_nemo(tmp_path / "m.nemo") as nemo:
        _ = nemo.weights


def test_a_directory_without_a_model_is_not_listed(tmp_path, monkeypatch):
    """Such as the root of the file system, whose files vanish while they are listed."""
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.setattr(Path, "rglob", None)
    with pytest.raises(CheckpointError, match=r"model_config\.yaml"), open_nemo(tmp_path) as nemo:
        _ = nemo.architecture


def test_an_unpacked_directory_reads_the_same(good, tmp_path):
    folder = tmp_path / "unpacked"
    with tarfile.open(good) as tar:
        tar.extractall(folder, filter="data")
    with open_nemo(good) as packed, open_nemo(folder) as unpacked:
        assert unpacked.architecture == packed.architecture
        assert_same(unpacked.weights, packed.weights)
    (folder / "link").symlink_to("/etc/passwd")
    with pytest.raises(CheckpointError, match="contains the link"), open_nemo(folder):
        pass


# A flipped bit is seen: CRC-32 of the weights' records, SHA-256 of other members

NAME = "decoder.layers.1.mlp.linear_fc2.weight"


def content(path):
    with open_nemo(path) as model:
        weights = {name: model.weights[name].clone() for name in model.weights}
        return model.tokenizer.encode("hello 12"), model.architecture, weights


def test_no_flipped_bit_changes_what_is_read(tiny_nemo, tmp_path):
    good, expected = tiny_nemo.read_bytes(), content(tiny_nemo)
    draw = random.Random(0)
    for _ in range(60):
        data = bytearray(good)
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path = tmp_path / "flipped.nemo"
        path.write_bytes(data)
        try:
            tokens, architecture, weights = content(path)
        except Exception:  # tar's, torch's, and ours
            continue
        assert (tokens, architecture) == expected[:2]
        assert all(torch.equal(weights[name], value) for name, value in expected[2].items())


@pytest.mark.integration
def test_a_model_with_a_damaged_weight_is_not_built(tiny_nemo, tmp_path, monkeypatch):
    """Weights are copied before their CRC-32 is known, and refused before anything uses them."""
    data = bytearray(tiny_nemo.read_bytes())
    with open_nemo(tiny_nemo) as model:
        content_of_weight = model.weights[NAME].numpy().tobytes()
    data[data.index(content_of_weight) + 99] ^= 4
    path = tmp_path / "flipped.nemo"
    path.write_bytes(data)
    with open_nemo(path) as model:
        model.weights.share(NAME, 0, 1)
        with pytest.raises(CheckpointError, match=r"linear_fc2\.weight.*CRC-32"):
            model.weights.check()
    monkeypatch.setattr(tensor_file, "_THREAD_BYTES", 0)  # a thread computes each CRC-32
    with pytest.raises(CheckpointError, match=r"linear_fc2\.weight.*CRC-32"):
        load_from_nemo(MegatronGPTActorModel, RoleSettings(), restore_path=path)


def test_a_file_without_crcs_is_warned_of_once():
    tensor_file._warn_without_crc.cache_clear()
    before, stream = torch.serialization.get_crc32_options(), io.BytesIO()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"model.a": torch.arange(1000.0)}, stream)
    finally:
        torch.serialization.set_crc32_options(before)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            tensor_file.load_tensors(memoryview(bytearray(stream.getvalue())), "a file")
    assert len([w for w in caught if "CRC-32" in str(w.message)]) == 1
