"""Common parts of the benchmarks: a peer's environment, readings in own processes, ratios.

Standard library only: a process that is started inherits nothing large from the one that starts it,
and a peer's environment can import this too.
"""

import contextlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def make_environment(folder: Path, packages: Sequence[Sequence[str]]) -> Path:
    """Create a virtual environment with ``packages``, installed group by group, once.

    Returns its interpreter. A half-made environment is continued.
    """
    python = folder / "bin" / "python"
    required = json.dumps([list(group) for group in packages])
    ready = folder / ".ready"
    if ready.exists() and ready.read_text() == required:
        return python
    log(f"making {folder.name}: {', '.join(name for group in packages for name in group)}")
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=300)
    install = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    for group in packages:
        subprocess.run([*install, *group], check=True, timeout=1800, stdout=sys.stderr)
    ready.write_text(required)
    return python


def with_repository() -> dict[str, str]:
    """Return this process's environment with the repository on the import path."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path}


def read_json(
    python: Path | str,
    module: str,
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 3600,
) -> dict[str, Any]:
    """Run ``python -m module arguments`` from the repository's root. Its one line of JSON."""
    completed = subprocess.run(
        [str(python), "-m", module, *arguments],
        check=True,
        timeout=timeout_s,
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(completed.stdout)


@contextlib.contextmanager
def stdout_reserved() -> Iterator[None]:
    """Send everything written to standard output inside, by whomever, to standard error."""
    sys.stdout.flush()
    saved_stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(saved_stdout, 1)
        os.close(saved_stdout)


def peak_mb() -> float:
    """Return the largest resident memory of this process so far, in MiB.

    Where the kernel has it, of this program only: `getrusage` on Linux also remembers the size that
    the parent had when it started us.
    """
    with contextlib.suppress(OSError), open("/proc/self/status") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    unit = 1024**2 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def log(text: str) -> None:
    """Print to standard error: standard output is for results."""
    print(text, file=sys.stderr, flush=True)


def verdict(name: str, ratio: float, mark: float | None) -> str:
    """Format a result, such as ``time 0.43 (mark 0.50: kept)``."""
    if mark is None:
        return f"{name} {ratio:.3f}"
    return f"{name} {ratio:.3f} (mark {mark:.2f}: {'kept' if ratio <= mark else 'MISSED'})"
