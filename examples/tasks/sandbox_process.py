"""The process of `aligner.examples.tasks.sandbox`: drops its privileges, then runs a program.

This script imports only the standard library. Its argument is the settings as JSON, its standard
input the program. The first line of output names the active layers of isolation. If a layer is
missing, the process then ends.

The kernel enforces the layers of ``isolation=kernel``:

* Landlock: files can be opened in the working folder, and for reading among the libraries of Python
  and the system (https://docs.kernel.org/userspace-api/landlock.html).
* seccomp: system calls that are not in `_CALLS` fail with EPERM. `_CALLS` contains none for
  sockets, processes, threads, signals to other processes, limits, or owners and modes of files
  (https://docs.kernel.org/userspace-api/seccomp_filter.html).

The layer of ``isolation=python`` is an audit hook (PEP 578). Malicious programs can evade it.
"""

import ast
import ctypes
import errno
import json
import os
import resource
import signal
import struct
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

_FILE_NAME = "<code>"  # of the program, in tracebacks
_FILE_BYTES = 16 * 2**20
_OPEN_FILES = 64

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_SECCOMP_MODE_FILTER = 2

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_LANDLOCK_VERSION, _LANDLOCK_PATH_BENEATH = 1, 1
_MIN_LANDLOCK = 3  # Linux 6.2: the first version that restricts truncating
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_ALL_RIGHTS = (1 << 15) - 1  # of version 3

# Allowed system calls: name, number on x86_64 and number on aarch64 (- if it does not exist).
_CALLS = """
access 21 -, arch_prctl 158 -, brk 12 214, chdir 80 49, clock_getres 229 114, clock_gettime 228 113,
clock_nanosleep 230 115, close 3 57, copy_file_range 326 285, dup 32 23, dup2 33 -, dup3 292 24,
exit 60 93, exit_group 231 94, faccessat 269 48, faccessat2 439 439, fadvise64 221 223,
fdatasync 75 83, flock 73 32, fstat 5 80, fsync 74 82, ftruncate 77 46, futex 202 98,
getcpu 309 168, getcwd 79 17, getdents 78 -, getdents64 217 61, getegid 108 177, geteuid 107 175,
getgid 104 176, getpid 39 172, getppid 110 173, getrandom 318 278, getrusage 98 165,
gettid 186 178, gettimeofday 96 169, getuid 102 174, lseek 8 62, lstat 6 -, madvise 28 233,
membarrier 324 283, mincore 27 232, mkdir 83 -, mkdirat 258 34, mmap 9 222, mprotect 10 226,
mremap 25 216, msync 26 227, munmap 11 215, nanosleep 35 101, newfstatat 262 79, open 2 -,
openat 257 56, pipe 22 -, pipe2 293 59, poll 7 -, ppoll 271 73, pread64 17 67, pselect6 270 72,
pwrite64 18 68, read 0 63, readlink 89 -, readlinkat 267 78, readv 19 65, rename 82 -,
renameat 264 38, renameat2 316 276, restart_syscall 219 128, rmdir 84 -, rseq 334 293,
rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, sched_getaffinity 204 123,
sched_yield 24 124, select 23 -, sendfile 40 71, set_robust_list 273 99, set_tid_address 218 96,
sigaltstack 131 132, stat 4 -, statx 332 291, sysinfo 99 179, time 201 -, times 100 153,
umask 95 166, uname 63 160, unlink 87 -, unlinkat 263 35, write 1 64, writev 20 66
"""
# Calls with a restricted second argument, as fcntl can have signals sent to other processes.
_CHECKED_CALLS = """
fcntl 72 25, ioctl 16 29
"""
_SECOND_ARGUMENTS = {
    "fcntl": (0, 1, 2, 3, 4, 5, 6, 7, 1030),  # duplicates, flags and locks
    "ioctl": (0x5401, 0x5413, 0x5421, 0x5450, 0x5451, 0x541B),  # is it a terminal, and flags
}
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column, AUDIT_ARCH

_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06  # BPF
_ALLOW, _FAIL, _KILL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000
# Offsets in struct seccomp_data.
_NUMBER_OFFSET, _MACHINE_OFFSET, _SECOND_ARGUMENT_OFFSET = 0, 4, 24

# Prefixes of audit events: always refused, and events that change or list files.
_REFUSED = (
    *("ctypes.", "os.exec", "os.fork", "os.kill", "os.posix_spawn", "os.spawn", "os.system"),
    *("pty.", "resource.", "signal.pthread_kill", "socket.", "subprocess."),
)
_CHANGING = (
    *("os.chflags", "os.chmod", "os.chown", "os.link", "os.mkdir", "os.remove", "os.rename"),
    *("os.rmdir", "os.setxattr", "os.symlink", "os.truncate", "os.utime"),
)
_LISTING = ("os.chdir", "os.listdir", "os.scandir")


def main() -> None:
    """Run the program on standard input with the settings of the first argument."""
    settings = json.loads(sys.argv[1])
    code = sys.stdin.buffer.read().decode()
    end_with(settings["parent"])
    set_limits(settings["memory_mb"], settings["cpu_s"])
    folder = os.getcwd()
    layers: dict[str, Callable[[], bool]] = {
        "landlock": lambda: restrict_files(folder, readable_paths()),
        "seccomp": restrict_calls,
    }
    if settings["isolation"] == "python":
        layers = {"python": lambda: add_hook(folder, readable_paths())}
    # Activate the layers, and run the program only if all are active.
    active = [name for name, activate in layers.items() if activate()]
    print(*active, flush=True)
    if len(active) == len(layers):
        run(code)


def end_with(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends, on Linux."""
    if sys.platform == "linux":
        _libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("the parent process has ended")


def set_limits(memory_mb: int, cpu_s: int) -> None:
    """Limit memory, processor time, the size of a file and the number of open files."""
    for kind, value in (
        (resource.RLIMIT_AS, memory_mb * 2**20),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_FSIZE, _FILE_BYTES),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (value, value))


def readable_paths() -> list[str]:
    """Return folders and files that Python itself reads: modules, libraries, time zones."""
    paths = [os.path.join(sys.base_prefix, "lib"), os.path.dirname(os.__file__)]
    paths += ["/lib", "/lib64", "/usr/lib", "/usr/lib64"]
    paths += ["/etc/ld.so.cache", "/usr/share/zoneinfo"]
    return [path for path in paths if os.path.exists(path)]


def restrict_files(folder: str, readable: list[str]) -> bool:
    """Activate Landlock: all rights below ``folder``, reading below ``readable``.

    Returns False if the kernel does not support it (before Linux 6.2).
    """
    if sys.platform != "linux":
        return False
    libc = _libc()
    if libc.syscall(_LANDLOCK_CREATE, None, 0, _LANDLOCK_VERSION) < _MIN_LANDLOCK:
        return False
    # A rule for each path.
    handled = struct.pack("Q", _ALL_RIGHTS)
    rules = libc.syscall(_LANDLOCK_CREATE, handled, len(handled), 0)
    if rules < 0:
        return False
    for path in (folder, *readable):
        rights = _READ_FILE | (_READ_DIR if os.path.isdir(path) else 0)
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", _ALL_RIGHTS if path == folder else rights, descriptor)
        failed = libc.syscall(_LANDLOCK_ADD, rules, _LANDLOCK_PATH_BENEATH, rule, 0)
        os.close(descriptor)
        if failed:
            return False
    # The kernel requires that the process cannot gain privileges.
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    is_active = bool(libc.syscall(_LANDLOCK_RESTRICT, rules, 0) == 0)
    os.close(rules)
    return is_active


def restrict_calls() -> bool:
    """Activate seccomp: calls that are not in `_CALLS` fail. Returns False if not supported."""
    machine = os.uname().machine
    if sys.platform != "linux" or machine not in _MACHINES:
        return False
    instructions = seccomp_filter(machine)
    code = ctypes.create_string_buffer(b"".join(instructions))
    # struct sock_fprog: number of instructions, padding, address.
    program = struct.pack("HxxxxxxP", len(instructions), ctypes.addressof(code))
    libc = _libc()
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    return bool(libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, program, 0, 0) == 0)


def seccomp_filter(machine: str) -> list[bytes]:
    """Return the instructions of the filter, as ``struct sock_filter``: code, jumps and operand."""
    column, audit = _MACHINES[machine]

    def step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("HBBI", code, if_true, if_false, value)

    # Kill a process that makes calls of another architecture, which have other numbers.
    program = [step(_LOAD, _MACHINE_OFFSET), step(_EQUAL, audit, 1, 0), step(_RETURN, _KILL)]
    program.append(step(_LOAD, _NUMBER_OFFSET))
    for number in call_numbers(_CALLS, column).values():
        program += [step(_EQUAL, number, 0, 1), step(_RETURN, _ALLOW)]
    # Calls with a restricted second argument.
    for name, number in call_numbers(_CHECKED_CALLS, column).items():
        values = _SECOND_ARGUMENTS[name]
        program.append(step(_EQUAL, number, 0, 2 * len(values) + 2))
        program.append(step(_LOAD, _SECOND_ARGUMENT_OFFSET))
        for value in values:
            program += [step(_EQUAL, value, 0, 1), step(_RETURN, _ALLOW)]
        program.append(step(_RETURN, _FAIL))
    return [*program, step(_RETURN, _FAIL)]


def call_numbers(table: str, column: int) -> dict[str, int]:
    """Return the numbers of a table's system calls. ``column``: 0 for x86_64, 1 for aarch64."""
    rows = (row.split() for row in table.replace("\n", " ").split(","))
    return {name: int(numbers[column]) for name, *numbers in rows if numbers[column] != "-"}


def add_hook(folder: str, readable: list[str]) -> bool:
    """Add an audit hook: refuse sockets, processes, signals, ctypes, and other files."""
    # Local names, as the program may change the module os.
    realpath, join = os.path.realpath, os.path.join
    writable_roots = [realpath(folder)]
    readable_roots = [*writable_roots, *map(realpath, readable)]

    def is_below(path: Any, roots: list[str]) -> bool:
        if path is None or isinstance(path, int):  # the working folder, or a descriptor
            return True
        path = realpath(os.fsdecode(path))
        return any(path == root or path.startswith(join(root, "")) for root in roots)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event.startswith(_REFUSED):
            raise PermissionError(errno.EPERM, f"{event} is not allowed here")
        # Files: reading below the readable roots, writing only in the folder.
        if event == "open":
            path, mode, flags = arguments
            writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            writes = writes or set(mode or "") & set("wax+")
            allowed = is_below(path, writable_roots if writes else readable_roots)
        elif event in _LISTING:
            allowed = is_below(arguments[0], readable_roots)
        elif event in _CHANGING:
            paths = [path for path in arguments if isinstance(path, str | bytes | os.PathLike)]
            allowed = all(is_below(path, writable_roots) for path in paths)
        else:
            return
        if not allowed:
            raise PermissionError(errno.EACCES, "Permission denied", str(arguments[0]))

    sys.addaudithook(hook)
    return True


def run(code: str) -> NoReturn:
    """Run a program, print the value of its last line if that is an expression, and exit."""
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        tree = ast.parse(code, _FILE_NAME)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, _FILE_NAME, "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), _FILE_NAME, "eval"), names)
            if value is not None:
                print(value if isinstance(value, str) else repr(value))
    except SystemExit:
        raise
    except BaseException as error:
        # Print the traceback from the program's code on.
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != _FILE_NAME:
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace)
        sys.exit(1)
    sys.exit(0)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


if __name__ == "__main__":
    main()
