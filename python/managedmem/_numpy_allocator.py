"""`managedmem.numpy_allocator()`: NumPy arrays that are born in managed memory."""

from __future__ import annotations

from contextlib import AbstractContextManager, ContextDecorator
from typing import TYPE_CHECKING, SupportsIndex

from managedmem._managedmem import _numpy_handler, _set_numpy_handler

if TYPE_CHECKING:
    from typing_extensions import CapsuleType

    from managedmem._managedmem import MigrationPolicy


def numpy_allocator(
    *, policy: MigrationPolicy | None = None, minimum: SupportsIndex = 1 << 20
) -> AbstractContextManager[None]:
    """Give managed memory to the NumPy arrays that are made in a `with` block.

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

    Arrays of np.load(), pandas and SciPy get managed memory too, where NumPy allocates them: mapped
    files and the memory of Arrow stay as they are. The array that to_numpy() of a pandas column
    returns can be a target. Each array has pages of its own. An array may outlive the block; its
    pages are freed with the array. np.zeros() writes its zeros on the host.

    As with all handlers of NumPy, a block is in force for the thread or the asyncio task that
    entered it. Blocks nest; each block needs a call of numpy_allocator(). In a forked child, which
    cannot use CUDA, new arrays have the system's memory.

    Raises TypeError and ValueError for bad arguments, CUDAError if the driver refuses the advice
    for a trial page; on entering the block, ImportError without NumPy 1.22 or newer, and
    RuntimeError the second time. In the block NumPy raises MemoryError for every failure; if memory
    did not run out, a line on standard error gives the reason. Safe from every thread. Releases the
    GIL, except in ndarray.resize(). Driver: cuMemAllocManaged and cuMemAdvise for each array,
    cuMemFree.
    """
    return _Block(_numpy_handler(policy, minimum))


class _Block(ContextDecorator, AbstractContextManager[None]):
    """A `with` block; as a decorator, a block around each call."""

    def __init__(self, handler: CapsuleType) -> None:
        self._handler = handler
        self._before: CapsuleType | None = None

    def _recreate_cm(self) -> _Block:  # contextlib calls it for each call of a decorated function
        return _Block(self._handler)

    def __enter__(self) -> None:
        if self._before is not None:
            raise RuntimeError("this block was entered before: call numpy_allocator() for each")
        try:
            self._before = _set_numpy_handler(self._handler)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] != "numpy":
                raise
            raise ImportError(
                "numpy_allocator() needs NumPy, which is not installed: pip install numpy",
                name="numpy",
            ) from None

    def __exit__(self, *_: object) -> None:
        assert self._before is not None
        _set_numpy_handler(self._before)
