"""Python code in a host function of a stream."""

import ctypes
import gc

from driver import raw_driver


def run_inside(action, stream):
    """Run the action in a host function on the stream; return its result or raise its exception.

    Makes no call of the library, because each could free memory late.
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
