"""`managedmem.result_cache`: the page-locked memory that numpy(copy=True) uses again."""

from managedmem._managedmem import _results_limit, _results_trim, _results_usage
from managedmem._units import size_text


class ResultCache:
    """The page-locked host memory of results, which later results use again.

    A device copies to page-locked memory at the speed of the link. ManagedBuffer.numpy(copy=True)
    takes its memory from this cache, and the memory returns to it when the array and its views have
    died. There is one cache for the process. Safe from every thread.
    """

    __slots__ = ()

    @property
    def max_nbytes(self) -> int:
        """The limit of page-locked memory in bytes, including living arrays.

        256 MiB at first. A result that does not fit has ordinary memory, to which a copy takes
        several times as long; with a limit of 0, all results have ordinary memory. A lower limit
        frees idle memory at once. Living arrays beyond the limit keep their memory; once they have
        died, a later result or clear() frees it. Raises TypeError for anything but an int,
        ValueError below 0. Driver: cuMemFreeHost.
        """
        return _results_usage()[0]

    @max_nbytes.setter
    def max_nbytes(self, value: int) -> None:
        _results_limit(value)

    @property
    def nbytes(self) -> int:
        """The bytes of page-locked memory that results have now, idle memory included.

        Optimizer state of managedmem.torch.offload is counted only once it is idle. Driver: none.
        """
        return _results_usage()[1]

    @property
    def idle_nbytes(self) -> int:
        """The bytes of page-locked memory that no array uses, and that clear() frees.

        Driver: none.
        """
        return _results_usage()[2]

    def clear(self, keep: int = 0) -> None:
        """Free idle memory, the longest idle first, until at most `keep` bytes are idle.

        The driver waits for devices before it frees page-locked memory. Frees nothing while a
        stream is known to capture a graph. Raises TypeError and ValueError as max_nbytes does.
        Releases the GIL. Driver: cuMemFreeHost.
        """
        _results_trim(keep)

    def __repr__(self) -> str:
        limit, held, idle = map(size_text, _results_usage())
        return f"<ResultCache of at most {limit}: {held} page-locked, {idle} of it idle>"

    def __reduce__(self) -> str:
        return "result_cache"


ResultCache.__module__ = "managedmem"
result_cache = ResultCache()
