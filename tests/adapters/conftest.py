"""Packages of other libraries, in an environment of their own.

make test-adapters    makes the environment and runs this folder
"""

import os
import sys

import pytest
from documented import ROOT

ENVIRONMENT = ROOT / ".venv-adapters"


@pytest.fixture
def packages(monkeypatch):
    """Processes of environments find the packages; this process imports none of them."""
    if not (ENVIRONMENT / "bin" / "python").exists():
        pytest.skip("needs the environment that `make adapters-env` makes")
    (folder,) = (ENVIRONMENT / "lib").glob("python*/site-packages")
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    monkeypatch.setenv("PATH", f"{ENVIRONMENT / 'bin'}:{os.environ['PATH']}")
