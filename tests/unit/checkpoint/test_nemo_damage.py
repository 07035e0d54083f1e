"""A flipped bit of a `.nemo` is seen: CRC-32 of the weights' records, SHA-256 of other members."""

import io
import random
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from aligner.checkpoint.nemo import tensor_file
from aligner.checkpoint.nemo.model_file import open_nemo
from aligner.errors import CheckpointError
from aligner.examples.tasks.tiny_model import write_tiny_nemo
from aligner.models.gpt import MegatronGPTActorModel, load_from_nemo
from aligner.models.gpt.role.settings import RoleSettings

NAME = "decoder.layers.1.mlp.linear_fc2.weight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("nemo") / "whole.nemo"
    write_tiny_nemo(path)
    return path


def content(path):
    with open_nemo(path) as model:
        weights = {name: model.weights[name].clone() for name in model.weights}
        return model.tokenizer.encode("hello 12"), model.architecture, weights


def test_no_flipped_bit_changes_what_is_read(whole, tmp_path):
    good, expected = whole.read_bytes(), content(whole)
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


def test_bytes_that_a_thread_has_checked_are_refused():
    content = memoryview(bytearray(2 << 20))
    record = tensor_file.Record(content, zlib.crc32(content) ^ 1, "a record")
    with ThreadPoolExecutor(1) as threads:
        record.begin(threads)
    with pytest.raises(CheckpointError, match=r"a record .*CRC-32"):
        record.check()


@pytest.mark.integration
def test_a_model_with_a_damaged_weight_is_not_built(whole, tmp_path):
    """Weights are copied before their CRC-32 is known, and refused before anything uses them."""
    data = bytearray(whole.read_bytes())
    with open_nemo(whole) as model:
        content_of_weight = model.weights[NAME].numpy().tobytes()
    data[data.index(content_of_weight) + 99] ^= 4
    path = tmp_path / "flipped.nemo"
    path.write_bytes(data)
    with open_nemo(path) as model:
        model.weights.share(NAME, 0, 1)
        with pytest.raises(CheckpointError, match=r"linear_fc2\.weight.*CRC-32"):
            model.weights.check()
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
