"""NeMo's own connector opens the files that are written here, checksums included."""

import tarfile

import pytest
import torch
from omegaconf import OmegaConf

from aligner.checkpoint.nemo.model_file import open_nemo


@pytest.mark.integration
def test_nemo_reads_the_configuration_and_unpacks_the_rest(tiny_nemo, tmp_path):
    from nemo.core import ModelPT
    from nemo.core.connectors.save_restore_connector import SaveRestoreConnector

    with tarfile.open(tiny_nemo) as archive:
        assert any(name.endswith("checksums.json") for name in archive.getnames())
    theirs = SaveRestoreConnector()
    found = theirs.restore_from(ModelPT, str(tiny_nemo), return_config=True)
    theirs._unpack_nemo_file(str(tiny_nemo), str(tmp_path))
    with open_nemo(tiny_nemo) as packed, open_nemo(tmp_path) as unpacked:
        assert OmegaConf.to_container(found) == packed.config
        assert set(packed.weights) == set(unpacked.weights)
        for name in packed.weights:
            assert torch.equal(packed.weights[name], unpacked.weights[name])
