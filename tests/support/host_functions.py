"""Python code in a host function of a stream, and a host function that waits."""

import ctypes
import gc

from driver import raw_driver


def run_inside(action, stream):
    """Run the action in a host function on the stream; return its result or raise its exception.

    Makes no call of the library, because each call could free memory whose free was deferred.
    """
    ended = []

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def host_function(_):
        try:
            ended.append((action(), None))
        except BaseException as error:
            ended.append((None, error.with_traceback(None)))

    handle = ctypes.c_void_p(stream.handle)
    assert raw_driver().cuLaunchHostFunc(handle, host_function, None) == 0
    assert raw_driver().cuStreamSynchronize(handle) == 0
    ((result, error),) = ended
    if error is not None:
        raise error
    return result


def end_inside(box, stream):
    """Drop the contents of the box in a host function, and collect the garbage there."""

    def end():
        box.clear()
        gc.collect()

    gc.collect()
    gc.disable()
    try:
        run_inside(end, stream)
    finally:
        gc.enable()


class Gate:
    """Work on a stream that lasts until it is opened, and needs no GIL.

    Threads that wait for the stream are known to be inside their wait, without a look at a clock.
    """

    def __init__(self, stream):
        self.process = ctypes.CDLL(None)
        self.reached, self.opened = (ctypes.create_string_buffer(64) for _ in range(2))
        for semaphore in (self.reached, self.opened):
            assert self.process.sem_init(semaphore, 0, 0) == 0
        self._queue(stream, self.process.sem_post, self.reached)
        self._queue(stream, self.process.sem_wait, self.opened)

    def _queue(self, stream, function, semaphore):
        handle, called = ctypes.c_void_p(stream.handle), ctypes.cast(function, ctypes.c_void_p)
        assert raw_driver().cuLaunchHostFunc(handle, called, semaphore) == 0

    def wait_until_reached(self):
        assert self.process.sem_wait(self.reached) == 0

    def open(self):
        assert self.process.sem_post(self.opened) == 0
