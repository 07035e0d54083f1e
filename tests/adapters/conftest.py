"""Packages of other libraries, in an environment of their own.

make test-adapters    makes the environment and runs this folder
"""

import os
import sys

import pytest
from documented import ROOT
from played import write_files


@pytest.fixture
def packages(request, monkeypatch):
    """Processes of environments find the packages; this process imports none of them.

    A test file that needs another environment than `.venv-adapters` names it in ``PACKAGES``.
    """
    environment = ROOT / getattr(request.module, "PACKAGES", ".venv-adapters")
    if not (environment / "bin" / "python").exists():
        pytest.skip("needs the environments that `make adapters-env` makes")
    (folder,) = (environment / "lib").glob("python*/site-packages")
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    monkeypatch.setenv("PATH", f"{environment / 'bin'}:{os.environ['PATH']}")


@pytest.fixture
def folder(packages, tmp_path, monkeypatch):
    """The current folder, with the files that docs/environments_adapters.md shows."""
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path
