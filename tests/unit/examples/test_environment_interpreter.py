"""The Python interpreter: what programs may, and that they may no more, by kernel and by hook."""

import ctypes
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from played import Game
from reward_cases import gone, soon

from aligner.environments.pool import Failure
from aligner.errors import ConfigError
from aligner.examples.tasks import sandbox, sandbox_process
from aligner.examples.tasks.python_tool import Interpreter

pytestmark = pytest.mark.integration

# Asked of the kernel here too, so that a layer that fails to close is no skipped test.
HAS_LAYERS = (
    sys.platform == "linux"
    and os.uname().machine in ("x86_64", "aarch64")
    and ctypes.CDLL(None).syscall(444, None, 0, 1) >= 3
)
KERNEL = pytest.param(
    "kernel", marks=pytest.mark.skipif(not HAS_LAYERS, reason="Linux from 6.2 with Landlock")
)
both = pytest.mark.parametrize("isolation", [KERNEL, "python"])


def run(isolation, code, **settings):
    return Interpreter(isolation=isolation, **{"timeout_s": 30.0, **settings}).python(code)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("print('a')\nx = 6\nx * 7", "a\n42"),
        ("x = 1", "(no output)"),
        ("import math, json, decimal; math.factorial(5)", "120"),
        (
            "def f(): return 1 / 0\nf()",
            'Traceback (most recent call last):\n  File "<code>", line 2',
        ),
        ("1 +", '  File "<code>", line 1'),
        ("import sys; print('a'); sys.exit(3); print('b')", "a"),
        ("import os; os.abort()", "error: ended by SIG"),
    ],
)
def test_output_value_and_errors(code, text):
    found = run("python", code)
    assert found.startswith(text), found
    assert "sandbox" not in found


ATTEMPTS = """
import os, socket, subprocess
def attempt(name, call):
    try:
        call()
        print(name, "done")
    except (PermissionError, ValueError):
        print(name, "refused")
attempt("socket", lambda: socket.socket())
attempt("read", lambda: open(SECRET).read())
attempt("write", lambda: open(SECRET, "a"))
attempt("list", lambda: os.listdir(os.path.dirname(SECRET)))
attempt("remove", lambda: os.remove(SECRET))
attempt("mode", lambda: os.chmod(SECRET, 0o777))
attempt("etc", lambda: open("/etc/passwd"))
attempt("proc", lambda: open(f"/proc/{os.getppid()}/environ"))
attempt("fork", lambda: os.fork())
attempt("program", lambda: subprocess.run(["/bin/true"]))
attempt("kill", lambda: os.kill(os.getppid(), 0))
attempt("limits", lambda: __import__("resource").setrlimit(7, (999, 999)))
def keep():
    with open("mine.txt", "w") as file:
        file.write("kept")
    assert open("mine.txt").read() == "kept"
    os.mkdir("folder"); os.rename("mine.txt", "folder/mine.txt"); os.listdir("folder")
attempt("own", keep)
attempt("library", lambda: __import__("hashlib").sha256(b"a"))
print(sorted(os.environ), os.listdir("."))
"""


@both
def test_nothing_outside_is_reached(isolation, tmp_path, monkeypatch):
    secret = tmp_path / "secret.txt"
    secret.write_text("a key")
    monkeypatch.setenv("WANDB_API_KEY", "a key")
    *found, last = run(isolation, f"SECRET = {str(secret)!r}\n{ATTEMPTS}").splitlines()
    names = re.findall(r'attempt\("(\w+)"', ATTEMPTS)
    own = {"own", "library"}
    assert found == [f"{name} {'done' if name in own else 'refused'}" for name in names]
    assert "WANDB" not in last
    assert last.endswith("['folder']")
    assert secret.read_text() == "a key"


# Below Python, where no audit hook hears of it: each must fail for want of rights.
BELOW = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
path = os.fsencode(SECRET)
reader, writer = os.pipe()
for name, call in {
    "socket": lambda: libc.socket(2, 1, 0),
    "open": lambda: libc.open(path, 0),
    "truncate": lambda: libc.truncate(path, 0),
    "chmod": lambda: libc.chmod(path, 0o777),
    "utimes": lambda: libc.utimes(path, None),
    "fork": lambda: libc.fork(),
    "kill": lambda: libc.kill(os.getppid(), 0),
    "owner of signals": lambda: libc.fcntl(reader, 8, os.getppid()),
    "signal that is sent": lambda: libc.fcntl(reader, 10, 9),
    "limits": lambda: libc.setrlimit(7, (ctypes.c_ulong * 2)(999, 999)),
    "limits of others": lambda: libc.prlimit(os.getppid(), 7, None, None),
    "trace": lambda: libc.ptrace(0, 0, 0, 0),
    "rights again": lambda: libc.prctl(1, 0, 0, 0, 0),
    "namespaces": lambda: libc.unshare(0x10000000),
    "ring": lambda: libc.syscall(425, 8, None),
}.items():
    ctypes.set_errno(0)
    if (call(), ctypes.get_errno()) not in ((-1, 1), (-1, 13)):
        print(name, "was done", ctypes.get_errno())
import threading
try:
    threading.Thread(target=print).start()
except RuntimeError:
    print("no threads")
"""


@pytest.mark.parametrize("isolation", [KERNEL])
def test_the_kernel_holds_below_python(isolation, tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("a key")
    mode = secret.stat().st_mode
    assert run(isolation, f"SECRET = {str(secret)!r}\n{BELOW}") == "no threads"
    assert (secret.read_text(), secret.stat().st_mode) == ("a key", mode)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("while True: pass", "error: stopped after 1 seconds"),
        ("import os, time; os.close(1); os.close(2); time.sleep(60)", "error: stopped after 1 sec"),
        ("print('x' * 2000); print('y' * 2000)", "error: stopped after 3000 bytes of output"),
        ("while True: print('x' * 10**6)", "error: stopped after 3000 bytes of output"),
    ],
)
def test_programs_end_in_time_and_say_little(code, words):
    before = time.monotonic()
    found = run("python", code, timeout_s=1.0 if "sec" in words else 30.0)
    assert found.splitlines()[-1].startswith(words)
    assert len(found) < 3100
    assert time.monotonic() - before < 10


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("x = [0]\nwhile True: x += x", "MemoryError"),
        ("open('f', 'wb').write(bytes(20 * 2**20))", "OSError: [Errno 27]"),
        ("files = [open('f', 'w') for _ in range(100)]", "OSError: [Errno 24]"),
        ("import os\nwhile True: os.fork()", "PermissionError"),
        ("import ctypes; ctypes.CDLL(None)", "ctypes"),
    ],
)
def test_memory_files_processes_and_libraries_are_bounded(code, error):
    assert error in run("python", code).splitlines()[-1]


def test_nothing_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tool = Interpreter(isolation="python", timeout_s=30.0)
    assert tool.python("import os; open('a', 'w'); x = 1; os.getcwd()").startswith(str(tmp_path))
    assert "NameError" in tool.python("x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "code",
    [
        "import os\nfor n in range(3000):\n    os.mkdir('d'); os.chdir('d')\nwhile True: pass",
        "import os\nwhile True: os.mkdir('d' * 250); os.chdir('d' * 250)",
        "import os\nos.close(1); os.close(2); n = 0\nwhile True: os.mkdir(str(n)); n += 1",
        "n = 0\nwhile True: open(str(n), 'w').close(); n += 1",
    ],
)
@both
def test_files_and_folders_are_bounded(isolation, code, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sandbox, "_MAX_ENTRIES", 500)  # disks take their time for folders
    found = run(isolation, code)
    assert found == "error: stopped at 500 files, or 100 nested folders"
    assert soon(lambda: not list(tmp_path.iterdir()))  # not within the answer's time


def test_a_program_ends_with_the_process_that_asked():
    code = (
        "from aligner.examples.tasks.python_tool import Interpreter as I; I(timeout_s=60.0, "
        "isolation='python').python('open(\\'ready\\', \\'w\\'); import time; time.sleep(60)')"
    )
    asking = subprocess.Popen([sys.executable, "-c", code])

    def running():
        pids = [child.pid for child in psutil.Process(asking.pid).children()]
        return [pid for pid in pids if Path(f"/proc/{pid}/cwd/ready").exists()]

    try:
        (pid,) = soon(running)
        os.kill(asking.pid, signal.SIGKILL)
        assert gone(pid)
    finally:
        asking.kill()
        asking.wait()


def test_settings_and_kernels_that_cannot_work_are_refused(monkeypatch):
    for settings in ({"isolation": "none"}, {"timeout_s": 0}, {"memory_mb": 10}):
        with pytest.raises(ConfigError, match=f"interpreter: .*{next(iter(settings))}="):
            Interpreter(**settings)
    monkeypatch.setitem(sandbox._LAYERS, "python", "python and more")
    sandbox.check_isolation.cache_clear()
    with pytest.raises(ConfigError, match=r"cannot be had here \(active layers: python\)"):
        Interpreter(isolation="python")
    with pytest.raises(ValueError, match="longer than"):
        Interpreter.python(object.__new__(Interpreter), "x" * 20_001)


HEADERS = {
    0: Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    1: Path("/usr/include/asm-generic/unistd.h"),
}
FORBIDDEN = (
    *("socket", "socketpair", "connect", "bind", "accept", "sendto", "sendmsg", "io_uring_setup"),
    *("clone", "clone3", "fork", "vfork", "execve", "execveat", "kill", "tkill", "tgkill"),
    *("ptrace", "process_vm_writev", "pidfd_send_signal", "prlimit64", "setrlimit", "prctl"),
    *("chmod", "fchmodat", "chown", "fchownat", "truncate", "utimensat", "mknod", "mount", "bpf"),
    *("link", "linkat", "symlink", "symlinkat", "unshare", "setns", "open_by_handle_at"),
)


@pytest.mark.parametrize("column", HEADERS)
def test_numbers_are_those_of_the_system(column):
    call_numbers = sandbox_process.call_numbers
    ours = call_numbers(sandbox_process._CALLS, column)
    ours |= call_numbers(sandbox_process._CHECKED_CALLS, column)
    assert ours.keys() & set(FORBIDDEN) == set()
    if not HEADERS[column].exists():
        pytest.skip("no header of the system calls")
    defined = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", HEADERS[column].read_text())
    known = {"newfstatat" if name == "fstatat" else name: int(number) for name, number in defined}
    assert ours == {name: known.get(name) for name in ours}


@both
def test_a_program_is_killed_with_its_environment(isolation):
    kwargs = {"form": "plain", "isolation": isolation, "timeout_s": 60.0}
    columns = {"prompt": "1+1=", "ground_truth": "2"}
    with Game("aligner.examples.tasks.python_tool:Programming", kwargs, columns) as game:
        game.begin()
        (said,) = game.say('call python {"code": "6 * 7"}').messages
        assert said["content"] == "result of python: 42"
        worker = psutil.Process(game.pool.pid(0))
        with ThreadPoolExecutor() as pool:
            found = pool.submit(soon, worker.children, 30.0)
            sleeps = 'call python {"code": "import time; time.sleep(60)"}'
            assert isinstance(game.call("step", {"content": sleeps}, 1.0), Failure)
        (child,) = found.result()
        assert gone(child.pid)
