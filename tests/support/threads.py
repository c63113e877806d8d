"""Calls in threads of their own."""

import threading


def at_once(*calls):
    """Make each call in a thread, all from one moment on: their results, or the first exception."""
    together = threading.Barrier(len(calls))
    results, errors = [None] * len(calls), []

    def make(number):
        try:
            together.wait()
            results[number] = calls[number]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=make, args=[number]) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
