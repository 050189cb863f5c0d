"""Makes a process end with its parent, and a program that does so before it becomes another program.

    bound_process.py PARENT SIGNAL CPUS PROGRAM [ARGUMENT ...]

``preexec_fn`` of ``subprocess`` would do the same in a fork of the parent. That can hang: a lock that another thread of
the parent holds at the fork is never released in the child.
"""

import signal
import sys

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as ``bind_to``, before anything takes time

import ctypes
import os
from collections.abc import Iterable

PR_SET_PDEATHSIG = 1
CANNOT_RUN = 127  # exit status, as that of a shell


def bind_to(parent: int, number: int) -> None:
    """Have the kernel send this process a signal when ``parent``, which has just started it, dies.

    Ctrl-C in a terminal reaches all of its processes. This one ignores it until it has a handler of its own, because a
    process that is still importing modules would print a traceback.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # the parent died before the line above
        os._exit(1)


def bound_command(argv: Iterable[str], number: int = signal.SIGKILL, *, cpus: Iterable[int] = ()) -> list[str]:
    """Return a command that runs ``argv`` in a process bound to this one.

    Args:
        number: the signal that it gets when this process, or the thread that starts it, ends.
        cpus: the CPUs that it is pinned to; none for any.
    """
    own = [str(os.getpid()), f"{number:d}", ",".join(map(str, cpus))]
    return [sys.executable, "-I", "-S", __file__, *own, *argv]  # so that it starts in a hundredth of a second


def _run(parent: str, number: str, cpus: str, *argv: str) -> None:
    bind_to(int(parent), int(number))
    if cpus:
        os.sched_setaffinity(0, map(int, cpus.split(",")))
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by this interpreter
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        print(f"cannot run {argv[0]}: {error.strerror}", file=sys.stderr)
        os._exit(CANNOT_RUN)


if __name__ == "__main__":
    _run(*sys.argv[1:])
