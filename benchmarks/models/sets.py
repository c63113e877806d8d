"""Loads of a WorkingSet: a round over 4 GiB with a budget of an eighth, a sum of each group."""

from __future__ import annotations

from typing import Any

import torch

import managedmem
from managedmem import Device, WorkingSet

from .by_hand import Ring
from .common import GIB, Job, Measured, Meter, Place, Step

NEED = (3 * GIB, 12 * GIB)  # of the device and of the host, at full size
MIB = 1 << 20
ROUNDS = 4  # in a measurement


class Loads:
    """The contenders for groups of one size; each number in group n is n + 1."""

    def __init__(self, place: Place, total: int, nbytes: int) -> None:
        self.place, self.nbytes, self.count = place, nbytes, total // nbytes
        self.slots = max(self.count // 8, 2)

    def filled(self, number: int) -> Any:
        return torch.full((self.nbytes // 4,), number + 1, dtype=torch.int32)

    def rounds(self, meter: Meter, one: Step, sums: Any) -> Measured:
        """Rounds without a wait between them, and the time of one."""

        def several() -> None:
            for _ in range(ROUNDS):
                one()

        meter.watch(several)
        times = self.place.timed(several, 2 if self.place.tiny else 5)
        expected = [(number + 1) * (self.nbytes // 4) for number in range(self.count)]
        if sums.tolist() != expected:
            raise RuntimeError("sums are wrong")
        return Measured({("a round", "ms"): [each / ROUNDS for each in times]}, [sums])

    def zeros(self) -> Any:
        return torch.zeros(self.count, dtype=torch.int64, device=self.place.device)

    def by_hand(self, meter: Meter) -> Measured:
        """As many buffers as the budget holds: one is in use while the others are filled."""
        homes, sums = [], self.zeros()
        for number in range(self.count):
            homes.append(self.place.pinned(self.nbytes))
            homes[-1].view(torch.int32).fill_(number + 1)
        ring = Ring(self.place, homes, self.slots)

        def one() -> None:
            for number in range(self.count):
                slot = ring.enter(self.slots - 1)
                torch.sum(ring.slots[slot].view(torch.int32), 0, out=sums[number])
                ring.leave()

        return self.rounds(meter, one, sums)

    def tensor_of(self, array: Any) -> Any:
        """A frame as a tensor; with the emulated driver, which has no kernels, a copy of it."""
        if not self.place.tiny:
            return torch.as_tensor(array, device=self.place.device)
        copy = managedmem.empty(self.nbytes)
        copy.copy_from(array)
        Device(0).sync()
        return torch.frombuffer(copy, dtype=torch.int32)

    def ours(self, meter: Meter) -> Measured:
        sums = self.zeros()
        stream = None if self.place.tiny else torch.cuda.current_stream()
        with WorkingSet(self.slots * self.nbytes, Device(0)) as working:
            groups = [working.add(self.filled(number)) for number in range(self.count)]

            def one() -> None:
                for number, group in enumerate(groups):
                    with group.use(stream=stream) as use:
                        torch.sum(self.tensor_of(use.arrays[0]), 0, out=sums[number])

            return self.rounds(meter, one, sums)


def jobs(place: Place) -> list[Job]:
    """A job for each size of a group."""
    total = MIB if place.tiny else int(4096 * MIB * place.share)
    found = []
    for nbytes in (MIB // 16, MIB // 32) if place.tiny else (64 * MIB, 16 * MIB):
        loads = Loads(place, total, nbytes)
        title = f"WorkingSet, {loads.count} groups of {nbytes / MIB:g} MiB"
        found.append(Job(title, {"by hand": loads.by_hand, "ours": loads.ours}))
    return found
