"""One Ray for all tests here."""

import os
import sys
from pathlib import Path

import pytest
from ray_fixtures import own_ray, ray  # noqa: F401

# Workers on Ray import the tests' worker classes.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])
)


@pytest.fixture
def python_with_mark(tmp_path):
    """An interpreter that is not the driver's: it sets a variable of its own."""
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nexport ANOTHER_PYTHON=1\nexec {sys.executable} "$@"\n')
    script.chmod(0o755)
    return str(script)
