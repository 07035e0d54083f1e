"""Runs in processes of their own."""

import pytest
from ranks import start_script
from recipes import ROOT, settings


@pytest.fixture(scope="module")
def start_run(tiny_nemo):
    """``start_run(script, folder, *arguments)`` begins or continues a run in ``folder``.

    No process outlives the tests of a file.
    """
    processes = []

    def launch(script, folder, *arguments):
        folder.mkdir(exist_ok=True)
        words = [*arguments, *settings(folder, tiny_nemo)]
        path = ROOT / "examples" / f"{script}.py"
        processes.append(start_script(path, words, folder.with_suffix(".log"), {}))
        return processes[-1]

    yield launch
    for process in processes:
        process.kill()
