"""`managedmem.numpy_allocator()`: NumPy arrays that are born in managed memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, SupportsIndex

from managedmem._managedmem import _numpy_handler, _set_numpy_handler

if TYPE_CHECKING:
    from typing_extensions import CapsuleType

    from managedmem._managedmem import MigrationPolicy


def numpy_allocator(
    *, policy: MigrationPolicy | None = None, minimum: SupportsIndex = 1 << 20
) -> AbstractContextManager[None]:
    """Give the NumPy arrays that are made in a `with` block managed memory.

    >>> with managedmem.numpy_allocator():
    ...     weights = np.load("weights.npy")
    >>> managedmem.prefetch(weights, managedmem.Device(0))

    Parameters
    ----------
    policy : MigrationPolicy, optional
        The advice that each array has from the start.
    minimum : int
        Arrays of fewer bytes have the system's memory, because managed memory costs each array a
        driver call and at least a page.

    Arrays of np.load(), pandas and SciPy get it too, where NumPy allocates them: mapped files and
    the memory of Arrow stay as they are. Each array has pages of its own. It may outlive the
    block; its pages are freed with it. np.zeros() writes its zeros on the host.

    As with all handlers of NumPy, a block is in force for the thread or the asyncio task that
    entered it. Blocks nest; each needs a call of its own. In a forked child, which cannot use CUDA,
    new arrays have the system's memory.

    Raises TypeError and ValueError for bad arguments, CUDAError if the driver refuses the advice to
    a page on trial; ImportError at the block without NumPy 1.22 or newer. In
    the block NumPy raises MemoryError for every failure; if memory did not run out, a line on the
    standard error has the reason. Safe from every thread. Releases the GIL, except in
    ndarray.resize().
    Driver: cuMemAllocManaged and cuMemAdvise for each array, cuMemFree.
    """
    return _set(_numpy_handler(policy, minimum))


@contextmanager
def _set(handler: CapsuleType) -> Iterator[None]:
    try:
        before = _set_numpy_handler(handler)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "numpy":
            raise
        raise ImportError(
            "numpy_allocator() needs NumPy, which is not installed: pip install numpy", name="numpy"
        ) from None
    try:
        yield
    finally:
        _set_numpy_handler(before)
