"""The process of `aligner.environments.sandbox`: gives its rights away, then runs a program.

A script that imports the standard library alone. It is given its settings as JSON, and the program
on its standard input. Its first line of output names the layers that hold; where one is missing
that was asked for, it ends there.

The layers of ``isolation=kernel`` are the kernel's, and hold whatever the process does:

* Landlock: files are opened in the working folder, and for reading among the libraries of Python
  and the system (https://docs.kernel.org/userspace-api/landlock.html).
* seccomp: system calls other than those of `_CALLS` fail with EPERM. There are none for sockets,
  processes, threads, signals to others, limits, owners or modes of files
  (https://docs.kernel.org/userspace-api/seccomp_filter.html).

That of ``isolation=python`` is an audit hook (PEP 578). It stops programs that do not mean to get
around it.
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

_NAME = "<code>"  # of the program, in tracebacks
_FILE_BYTES = 16 * 2**20
_OPEN_FILES = 64

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_SECCOMP_MODE_FILTER = 2

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_LANDLOCK_VERSION, _LANDLOCK_PATH_BENEATH = 1, 1
_LEAST_LANDLOCK = 3  # Linux 6.2: the first that knows of truncating
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_ALL_RIGHTS = (1 << 15) - 1  # of version 3

# Name and number on x86_64 and on aarch64 (-: none there) of system calls that are allowed.
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
# Calls whose second argument must be one of these: an fcntl can have signals sent to others.
_CHECKED = """
fcntl 72 25, ioctl 16 29
"""
_SECOND = {
    "fcntl": (0, 1, 2, 3, 4, 5, 6, 7, 1030),  # duplicates, flags and locks
    "ioctl": (0x5401, 0x5413, 0x5421, 0x5450, 0x5451, 0x541B),  # is it a terminal; flags
}
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column, AUDIT_ARCH

_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06  # BPF
_ALLOW, _FAIL, _KILL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000
_NUMBER_AT, _MACHINE_AT, _SECOND_AT = 0, 4, 24  # in struct seccomp_data

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
    """Run the program on standard input as the settings say."""
    settings = json.loads(sys.argv[1])
    code = sys.stdin.buffer.read().decode()
    end_with(settings["parent"])
    set_limits(settings["memory_mb"], settings["cpu_s"])
    folder = os.getcwd()
    asked: dict[str, Callable[[], bool]] = {
        "landlock": lambda: close_files(folder, readable()),
        "seccomp": close_calls,
    }
    if settings["isolation"] == "python":
        asked = {"python": lambda: add_hook(folder, readable())}
    held = [name for name, layer in asked.items() if layer()]
    print(*held, flush=True)
    if len(held) == len(asked):
        run(code)


def end_with(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends. Linux only."""
    if sys.platform == "linux":
        _libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("the process that asked is gone")


def set_limits(memory_mb: int, cpu_s: int) -> None:
    """Bound memory, processor time, the size of a file and the number of open ones."""
    for kind, value in (
        (resource.RLIMIT_AS, memory_mb * 2**20),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_FSIZE, _FILE_BYTES),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (value, value))


def readable() -> list[str]:
    """Folders and files that Python reads by itself: modules, shared libraries, time zones."""
    places = [os.path.join(sys.base_prefix, "lib"), os.path.dirname(os.__file__)]
    places += ["/lib", "/lib64", "/usr/lib", "/usr/lib64"]
    places += ["/etc/ld.so.cache", "/usr/share/zoneinfo"]
    return [place for place in places if os.path.exists(place)]


def close_files(folder: str, readable: list[str]) -> bool:
    """Landlock: all rights below ``folder``, to read below ``readable``, none elsewhere.

    False: the kernel has none, or one before Linux 6.2.
    """
    if sys.platform != "linux":
        return False
    libc = _libc()
    if libc.syscall(_LANDLOCK_CREATE, None, 0, _LANDLOCK_VERSION) < _LEAST_LANDLOCK:
        return False
    handled = struct.pack("Q", _ALL_RIGHTS)
    rules = libc.syscall(_LANDLOCK_CREATE, handled, len(handled), 0)
    if rules < 0:
        return False
    for place in (folder, *readable):
        rights = _READ_FILE | (_READ_DIR if os.path.isdir(place) else 0)
        opened = os.open(place, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", _ALL_RIGHTS if place == folder else rights, opened)
        failed = libc.syscall(_LANDLOCK_ADD, rules, _LANDLOCK_PATH_BENEATH, rule, 0)
        os.close(opened)
        if failed:
            return False
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    closed = bool(libc.syscall(_LANDLOCK_RESTRICT, rules, 0) == 0)
    os.close(rules)
    return closed


def close_calls() -> bool:
    """seccomp: system calls but for `_CALLS` fail. False: it cannot be had here."""
    machine = os.uname().machine
    if sys.platform != "linux" or machine not in _MACHINES:
        return False
    program = filter_of(machine)
    code = ctypes.create_string_buffer(b"".join(program))
    # struct sock_fprog: number of instructions, padding, address.
    given = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    libc = _libc()
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    return bool(libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, given, 0, 0) == 0)


def filter_of(machine: str) -> list[bytes]:
    """Instructions of the filter, ``struct sock_filter`` each: code, jumps if true and false, k."""
    column, audit = _MACHINES[machine]

    def step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("HBBI", code, if_true, if_false, value)

    program = [step(_LOAD, _MACHINE_AT), step(_EQUAL, audit, 1, 0), step(_RETURN, _KILL)]
    program.append(step(_LOAD, _NUMBER_AT))
    for number in numbers(_CALLS, column).values():
        program += [step(_EQUAL, number, 0, 1), step(_RETURN, _ALLOW)]
    for name, number in numbers(_CHECKED, column).items():
        seconds = _SECOND[name]
        program += [step(_EQUAL, number, 0, 2 * len(seconds) + 2), step(_LOAD, _SECOND_AT)]
        for second in seconds:
            program += [step(_EQUAL, second, 0, 1), step(_RETURN, _ALLOW)]
        program.append(step(_RETURN, _FAIL))
    return [*program, step(_RETURN, _FAIL)]


def numbers(table: str, column: int) -> dict[str, int]:
    """System calls of a table by name; ``column``: 0 of x86_64, 1 of aarch64."""
    rows = (row.split() for row in table.replace("\n", " ").split(","))
    return {name: int(found[column]) for name, *found in rows if found[column] != "-"}


def add_hook(folder: str, readable: list[str]) -> bool:
    """Audit hook: refuse sockets, processes, signals, ctypes, and files elsewhere."""
    root, places = os.path.realpath(folder), [os.path.realpath(place) for place in readable]
    realpath, join = os.path.realpath, os.path.join

    def is_below(path: Any, roots: list[str]) -> bool:
        if path is None or isinstance(path, int):  # the working folder; a descriptor
            return True
        found = realpath(os.fsdecode(path))
        return any(found == place or found.startswith(join(place, "")) for place in roots)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event.startswith(_REFUSED):
            raise PermissionError(errno.EPERM, f"{event} is not allowed here")
        if event == "open":
            path, mode, flags = arguments
            writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            allowed = is_below(path, [root] if writes or set(mode or "") & set("wax+") else there)
        elif event in _LISTING:
            allowed = is_below(arguments[0], there)
        elif event in _CHANGING:
            paths = [one for one in arguments if isinstance(one, str | bytes | os.PathLike)]
            allowed = all(is_below(path, [root]) for path in paths)
        else:
            return
        if not allowed:
            raise PermissionError(errno.EACCES, "Permission denied", str(arguments[0]))

    there = [root, *places]
    sys.addaudithook(hook)
    return True


def run(code: str) -> NoReturn:
    """Run a program, show the value of its last line if that is an expression, and end."""
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        tree = ast.parse(code, _NAME)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, _NAME, "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), _NAME, "eval"), names)
            if value is not None:
                print(value if isinstance(value, str) else repr(value))
    except SystemExit:
        raise
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != _NAME:
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace)
        sys.exit(1)
    sys.exit(0)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


if __name__ == "__main__":
    main()
