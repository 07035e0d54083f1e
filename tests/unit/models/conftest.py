"""Fixtures of tests of models."""

import pytest
from tiny_transformers import tiny_model


@pytest.fixture
def folder_of(tmp_path):
    """Returns a function that writes a directory with a tiny model of a type."""

    def write(model_type, **more):
        folder = tmp_path / model_type
        tiny_model(model_type, **more).save_pretrained(folder)
        return folder

    return write
