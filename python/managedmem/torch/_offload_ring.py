"""The scratch on a device through which gradients and state pass during a step of the optimizer.

A ring buffer holds regions of any size. A copy engine fills them several parts ahead, and another
empties them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from managedmem.torch._offload_places import Target


@dataclass(slots=True, eq=False)
class Region:
    """A piece of the ring, from its filling to the end of its copies home."""

    start: int
    end: int
    scratch: Tensor
    filled: torch.cuda.Event | None = None
    free: torch.cuda.Event | None = None
    is_over: bool = False


class Ring:
    """Memory for parts, first in, first out."""

    def __init__(self, target: Target, nbytes: int) -> None:
        self.place = target.place
        self.scratch = torch.empty(nbytes, dtype=torch.uint8, device=target.place)
        self.size = nbytes
        self.head = 0
        self.regions: deque[Region] = deque()
        self.inward: torch.cuda.Stream | None = None
        self.outward: torch.cuda.Stream | None = None
        self.filled = 0  # the number of regions since the start
        if target.place.type == "cuda":
            self.inward = torch.cuda.Stream(target.place)
            self.outward = torch.cuda.Stream(target.place)

    def begin(self) -> None:
        """Begin a step, behind the work of the current stream."""
        self.regions.clear()  # followed() let the stream wait for them
        self.head = 0
        self.follow_home()

    def follow_home(self) -> None:
        """Let later work, and later copies into the ring, wait for earlier copies home."""
        if self.inward is not None and self.outward is not None:
            current = torch.cuda.current_stream(self.place)
            current.wait_stream(self.outward)
            self.inward.wait_stream(current)

    def fill(self, nbytes: int, copy: Callable[[Tensor], None]) -> Region | None:
        """Take a region, and let a function queue copies into it; None while it is in use."""
        wraps = self.head + nbytes > self.size
        start = 0 if wraps else self.head
        end = start + nbytes
        while self.regions:
            oldest = self.regions[0]
            is_skipped = wraps and oldest.start >= self.head
            if not is_skipped and (oldest.start >= end or oldest.end <= start):
                break
            if not oldest.is_over:
                return None
            if self.inward is not None and oldest.free is not None:
                self.inward.wait_event(oldest.free)
            self.regions.popleft()
        region = Region(start, end, self.scratch[start:end])
        self.regions.append(region)
        self.head = end
        self.filled += 1
        with torch.no_grad(), torch.cuda.stream(self.inward):
            copy(region.scratch)
            if self.inward is not None:
                region.filled = self.inward.record_event()
        return region

    def use(self, region: Region) -> None:
        """Let the current stream wait until a region is filled."""
        if region.filled is not None:
            torch.cuda.current_stream(self.place).wait_event(region.filled)

    def empty(self, region: Region, copy: Callable[[Tensor], None]) -> None:
        """Let a function queue the copies home, behind the current stream."""
        if self.outward is not None:
            self.outward.wait_stream(torch.cuda.current_stream(self.place))
        with torch.no_grad(), torch.cuda.stream(self.outward):
            copy(region.scratch)
            if self.outward is not None:
                region.free = self.outward.record_event()
        region.is_over = True

    def followed(self) -> None:
        """Make the current stream wait for all copies, before others use the memory."""
        for stream in (self.inward, self.outward):
            if stream is not None:
                torch.cuda.current_stream(self.place).wait_stream(stream)
