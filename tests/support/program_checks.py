"""Checks of programs that tests run: refused calls, and forked children."""

import contextlib
import os
import sys


@contextlib.contextmanager
def refused(kind, text):
    """The block raises an error of this kind whose message has the text."""
    try:
        yield
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError("it was accepted")


def in_child(work, fork=os.fork):
    """The exit status of a forked child that runs work(): 0, or 1 if it raised."""
    sys.stdout.flush()
    pid = fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException as error:
            print("child:", type(error).__name__, error, file=sys.stderr)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
