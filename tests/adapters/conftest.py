"""Packages of other libraries, in an environment of their own.

make test-adapters    makes the environment and runs this folder
"""

import os
import sys

import pytest
from documented import ROOT


@pytest.fixture
def packages(monkeypatch):
    """Processes of environments find the packages; this process imports none of them."""
    use(".venv-adapters", monkeypatch)


@pytest.fixture
def packages_of_mcp1(monkeypatch):
    """The same for those that want version 1 of mcp."""
    use(".venv-adapters-mcp1", monkeypatch)


@pytest.fixture
def packages_of_verifiers(monkeypatch):
    """The same for verifiers from 0.4 on, which wants one version of mcp."""
    use(".venv-adapters-verifiers", monkeypatch)


def use(name, monkeypatch):
    environment = ROOT / name
    if not (environment / "bin" / "python").exists():
        pytest.skip("needs the environments that `make adapters-env` makes")
    (folder,) = (environment / "lib").glob("python*/site-packages")
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    monkeypatch.setenv("PATH", f"{environment / 'bin'}:{os.environ['PATH']}")
