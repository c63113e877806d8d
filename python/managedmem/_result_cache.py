"""`managedmem.result_cache`: the page-locked memory that numpy(copy=True) uses again."""

from managedmem._managedmem import _results_limit, _results_trim, _results_usage
from managedmem._units import size_text


class ResultCache:
    """The page-locked host memory of results, which is used again when their arrays die.

    A device copies to page-locked memory at the speed of the link, but making such memory takes the
    driver longer than the copy. ManagedBuffer.numpy(copy=True) takes its memory from this cache,
    and the memory returns to it when the array and its views die. There is one for the process.

    Safe from every thread.
    """

    __slots__ = ()

    @property
    def max_nbytes(self) -> int:
        """The limit of all page-locked results in bytes, those of living arrays included.

        256 MiB at first. A result that does not fit has ordinary memory, which takes the driver
        three to five times as long; 0 gives that to all. A lower limit frees idle memory at once,
        and that of arrays which live with a later result or clear(). Raises TypeError for what is
        no int, ValueError below 0. Driver: cuMemFreeHost.
        """
        return _results_usage()[0]

    @max_nbytes.setter
    def max_nbytes(self, value: int) -> None:
        _results_limit(value)

    @property
    def nbytes(self) -> int:
        """The bytes of page-locked memory that results have now, idle memory included.

        Driver: none.
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

        Waits for devices, as the driver does before it frees page-locked memory. Frees nothing
        while a stream is known to capture a graph. Raises TypeError and ValueError as max_nbytes
        does. Releases the GIL. Driver: cuMemFreeHost.
        """
        _results_trim(keep)

    def __repr__(self) -> str:
        limit, held, idle = map(size_text, _results_usage())
        return f"<ResultCache of at most {limit}: {held} page-locked, {idle} of it idle>"

    def __reduce__(self) -> str:
        return "result_cache"


ResultCache.__module__ = "managedmem"
result_cache = ResultCache()
