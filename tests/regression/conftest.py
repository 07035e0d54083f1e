"""Runs in processes of their own."""

from pathlib import Path

import pytest
from ranks import start_script

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def start_run(tiny_nemo):
    """``start_run(script, folder, *arguments)`` begins or continues a run in ``folder``.

    No process outlives the tests of a file.
    """
    processes = []

    def launch(script, folder, *arguments):
        folder.mkdir(exist_ok=True)
        settings = [
            *arguments,
            f"model.restore_from_path={tiny_nemo}",
            f"exp_manager.explicit_log_dir={folder}",
            "exp_manager.create_tensorboard_logger=false",
        ]
        path = EXAMPLES / f"{script}.py"
        processes.append(start_script(path, settings, folder.with_suffix(".log"), {}))
        return processes[-1]

    yield launch
    for process in processes:
        process.kill()
