"""The code that a PPO step of the tiny recipe runs through.

    python -m benchmarks.step_trace

Prints the frames of this repository that are open at the first step of torch's optimizer, from the
script's first line on, and the files of the library that a whole step (the second one) calls into.
Runs in one process on the CPU, in a temporary directory. Needs `models/tiny.nemo` (`make setup
models/tiny.nemo`), or another copy of it as `--model`.
"""

import argparse
import json
import runpy
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from aligner.algorithms.callbacks import Callback, CallbackRun
from benchmarks.common import ROOT

# Of the run. The callback below is imported a second time, under this module's own name.
FRAMES: list[str] = []
CALLED: set[str] = set()


class CalledFiles(Callback):
    """Collects the files that functions of the second step are in."""

    def on_step_end(self, run: CallbackRun, step: int, metrics: Mapping[str, float]) -> None:
        """Begin after the first step, end after the second."""
        profile = _note_call if step == 1 else None
        threading.setprofile(profile)
        sys.setprofile(profile)


def _note_call(frame: FrameType, event: str, argument: Any) -> None:
    del argument
    if event == "call":
        CALLED.add(frame.f_code.co_filename)


def _ours(file: str, *folders: str) -> str | None:
    """Return the path of ``file`` in the repository, or None outside ``folders``."""
    path = Path(file)
    if not path.is_relative_to(ROOT):
        return None
    inside = path.relative_to(ROOT)
    return str(inside) if inside.parts[0] in folders else None


def _note_frames(*step: Any) -> None:
    del step
    for frame in [] if FRAMES else traceback.extract_stack():
        if source_file := _ours(frame.filename, "aligner", "examples"):
            FRAMES.append(f"{source_file}:{frame.lineno} {frame.name}")


def trace(model: Path) -> dict[str, Any]:
    """Run three steps of ``model``. The frames from the outermost on, the files in order."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    from benchmarks import step_trace

    script = ROOT / "examples" / "train_gpt_ppo.py"
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "model.restore_from_path": model,
            "exp_manager.explicit_log_dir": folder,
            "trainer.ppo.max_steps": 3,
            "trainer.callbacks": "[benchmarks.step_trace:CalledFiles]",
        }
        words = [f"{key}={value}" for key, value in options.items()]
        sys.argv = [str(script), "--config-name", "recipes/ppo_tiny_cpu", *words]
        hook = register_optimizer_step_pre_hook(step_trace._note_frames)
        try:
            runpy.run_path(str(script), run_name="__main__")
        finally:
            hook.remove()
    frames = step_trace.FRAMES
    files = sorted(filter(None, (_ours(file, "aligner") for file in step_trace.CALLED)))
    lines = sum(len((ROOT / file).read_text().splitlines()) for file in files)
    in_files = len({frame.partition(":")[0] for frame in frames})
    return {"frames": frames, "frames_in_files": in_files, "files": files, "lines": lines}


def main() -> None:
    """Print what was found, as words or as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one line of JSON, the last one")
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "tiny.nemo")
    arguments = parser.parse_args()
    traced = trace(arguments.model)
    if arguments.json:
        print(json.dumps(traced))
        return
    print(*traced["frames"], sep="\n")
    print(f"\n{len(traced['frames'])} frames in {traced['frames_in_files']} files\n")
    print(*traced["files"], sep="\n")
    print(f"\n{len(traced['files'])} files of {traced['lines']:,} lines")


if __name__ == "__main__":
    main()
