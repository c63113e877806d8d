"""Threads that work at once, in tests and in their programs."""

import threading
from functools import partial

PATIENCE = 60  # seconds


def race(*workers):
    """Run the workers at once from a barrier; re-raise the first thing that any of them raised."""
    barrier = threading.Barrier(len(workers))
    failures = []
    results = [None] * len(workers)

    def run(index, worker):
        try:
            barrier.wait(30)
            results[index] = worker()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in enumerate(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    if failures:
        raise failures[0]
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    return results


def race_over(work, *arguments):
    """race() of the calls that map(work, *arguments) makes."""
    return race(*(partial(work, *given) for given in zip(*arguments, strict=True)))


def in_thread(work):
    """work() in a thread of its own."""
    return race(work)[0]
