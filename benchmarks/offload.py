"""Weights and optimizer state that do not fit: streamed by offload(), and in other ways.

The contenders of a row do the same work. `resident` has everything on the device, the limit of
the arithmetic. `pinned buffers` is written by hand: buffers on the device, filled on a side stream
from pinned memory; three, or in the rows of loads as many as the budget of the working set holds.
"""

from __future__ import annotations

import copy
import importlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any

import managedmem
from managedmem import Device, Host, ManagedWorkingSet, WorkingSet

from .measure import KIB, MIB, Contender, Row, elapsed, side_by_side

SIZES = (2 * MIB, 4 * MIB, 16 * MIB, 64 * MIB)
LAYERS = 16
NEED = 256 * MIB  # of managed memory
ROUNDS = 4  # of the layers in a measurement
TOKENS = 32
SLOTS = 3
SHARE = 8  # a working set has one eighth of its groups in the budget
LOADED = 1024 * MIB  # by a round over the groups of a WorkingSet, whose memory is not managed
MOST_GROUPS = 64
DESCRIPTION = (
    "Layers: the time of a round with one matrix product of each, weights at home on the host, a"
    " quarter of them in the budget (two layers of 64 MiB); 'ours, half' has half of"
    " the layers in the budget."
    " Loads: a round over the groups of a WorkingSet, of which the budget holds an eighth, at least"
    " two; the device sums each group. managed is a ManagedWorkingSet with the budget as its limit."
    " Rows of loads that were written by the device or the host are of the engine until 2026-11-24,"
    " without other work. Generation: GPT-2's shape in float16"
    " with random weights, 32 tokens, half of the weights in the budget. Training: a step of Adam,"
    " its state out of the budget. All fits: a round with a budget for everything."
)

Step = Callable[[], object]


def loaded(name: str) -> ModuleType | None:
    """A library, or None where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def size_text(nbytes: int) -> str:
    """A size in a title."""
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"


class Machine:
    """torch, its device and its way to wait."""

    def __init__(self, torch: ModuleType) -> None:
        self.torch = torch
        self.emulated = bool(managedmem.driver_info()["emulated"])
        self.place = torch.device("cpu" if self.emulated else "cuda:0")
        self.ours = importlib.import_module("managedmem.torch")

    def wait(self) -> None:
        if not self.emulated:
            self.torch.cuda.synchronize()

    def timed(self, step: Step, rounds: int, before: Step = lambda: None) -> Contender:
        """A measurement of one step; `before` prepares each one and is not timed."""

        def whole() -> None:
            step()
            self.wait()

        def run(_: int) -> float:
            total = 0.0
            for _ in range(rounds):
                before()
                self.wait()
                total += elapsed(whole)
            return total / rounds

        return run

    def in_a_row(self, step: Step, rounds: int) -> Contender:
        """A measurement of one step among others without a wait between them."""

        def steps() -> None:
            for _ in range(rounds):
                step()
            self.wait()

        return lambda _: elapsed(steps) / rounds

    def thread_time(self, step: Step, rounds: int) -> Contender:
        """The processor time of this thread for one step, without the wait for its results."""

        def run(_: int) -> float:
            begin = time.thread_time_ns()
            for _ in range(rounds):
                step()
            spent = time.thread_time_ns() - begin
            self.wait()
            return spent / rounds

        return run

    def layers(self, count: int, nbytes: int) -> Any:
        """Layers without bias, of float32 matrices with so many bytes."""
        nn = self.torch.nn
        width = 1 << ((nbytes // 4).bit_length() - 1) // 2
        wide = nbytes // 4 // width
        self.torch.manual_seed(0)
        made = [Product(self.torch, width, wide) for _ in range(count)]
        return nn.Sequential(*(each.module for each in made))

    def inputs(self, model: Any) -> Any:
        return self.torch.ones(64, model[0].weight.shape[1], device=self.place)


class Product:
    """One matrix product whose result is as wide as its input, so that layers can follow."""

    def __init__(self, torch: ModuleType, width: int, wide: int) -> None:
        class Layer(torch.nn.Linear):  # type: ignore[name-defined,misc]
            def forward(self, inputs: Any) -> Any:
                return super().forward(inputs)[:, :width]

        self.module = Layer(width, wide, bias=False)


# --- layers -------------------------------------------------------------------------------


class PinnedBuffers:
    """Three buffers on the device, filled from pinned memory on a side stream."""

    def __init__(self, machine: Machine, model: Any) -> None:
        self.torch = machine.torch
        torch = self.torch
        self.weights = [layer.weight.detach().pin_memory() for layer in model]
        self.slots = [torch.empty_like(self.weights[0], device=machine.place) for _ in range(SLOTS)]
        self.side = torch.cuda.Stream()
        self.filled = [torch.cuda.Event() for _ in range(SLOTS)]
        self.used = [torch.cuda.Event() for _ in range(SLOTS)]
        self.next = 0  # the copy that is queued next, over all rounds

    def fill(self) -> None:
        """Queue one copy."""
        number = self.next % SLOTS
        self.side.wait_event(self.used[number])
        with self.torch.cuda.stream(self.side):
            source = self.weights[self.next % len(self.weights)]
            self.slots[number].copy_(source, non_blocking=True)
            self.filled[number].record()
        self.next += 1

    def round(self, inputs: Any) -> Any:
        """All layers once. Copies for the next round start in this one, as ours do."""
        current = self.torch.cuda.current_stream()
        width = inputs.shape[1]
        while self.next < SLOTS - 1:
            self.fill()
        first = self.next - (SLOTS - 1)
        for step in range(first, first + len(self.weights)):
            self.fill()
            number = step % SLOTS
            current.wait_event(self.filled[number])
            product = self.torch.nn.functional.linear(inputs, self.slots[number])
            inputs = product[:, :width]
            self.used[number].record()
        return inputs


@contextmanager
def streamed(machine: Machine, model: Any, budget: int, **options: Any) -> Iterator[Any]:
    """The handle of a module that is offloaded in the block."""
    with machine.ours.offload(model, "cuda:0", budget=budget, **options) as handle:
        yield handle


def round_budget(nbytes: int, count: int) -> int:
    """A quarter of the layers, and at least two."""
    return max(count // 4, 2) * nbytes


def layer_rows(machine: Machine, nbytes: int, count: int, repetitions: int) -> tuple[Row, Row]:
    """A round over layers of one size, and the time of the thread that queues it."""
    torch = machine.torch
    model = machine.layers(count, nbytes)
    inputs = machine.inputs(model)
    budget = round_budget(nbytes, count)
    contenders: dict[str, Contender] = {}
    threads: dict[str, Contender] = {}
    mine, resident = copy.deepcopy(model), copy.deepcopy(model).to(machine.place)
    if (accelerate := loaded("accelerate")) is not None and not machine.emulated:
        theirs = accelerate.cpu_offload(copy.deepcopy(model), machine.place)
        contenders["accelerate"] = machine.in_a_row(lambda: theirs(inputs), ROUNDS)
    if not machine.emulated:
        pinned = PinnedBuffers(machine, model)
        contenders["pinned buffers"] = machine.in_a_row(lambda: pinned.round(inputs), ROUNDS)
        threads["pinned buffers"] = machine.thread_time(lambda: pinned.round(inputs), ROUNDS)
    contenders["resident"] = machine.in_a_row(lambda: resident(inputs), ROUNDS)
    threads["resident"] = machine.thread_time(lambda: resident(inputs), ROUNDS)
    title = f"{count} layers of {size_text(nbytes)}"
    with streamed(machine, mine, budget), torch.inference_mode():
        contenders["ours"] = machine.in_a_row(lambda: mine(inputs), ROUNDS)
        threads["ours"] = machine.thread_time(lambda: mine(inputs), ROUNDS)
        row = side_by_side(title, contenders, count=1, repetitions=repetitions, unit="ms")
        title += ", thread time"
        spent = side_by_side(title, threads, count=1, repetitions=repetitions, unit="ms")
    return row, replace(spent, note="of the caller's processor, until all is queued")


def faults_row(machine: Machine, nbytes: int, count: int, repetitions: int) -> Row:
    """A round over layers that come by page faults; apart, so that one set of them is managed."""
    torch = machine.torch
    model = machine.ours.to_managed(machine.layers(count, nbytes), device=machine.place)
    inputs = machine.inputs(model)
    with torch.inference_mode():

        def home() -> None:
            machine.ours.prefetch(model, Host())

        contenders = {"page faults": machine.timed(lambda: model(inputs), ROUNDS, home)}
        return side_by_side("", contenders, count=1, repetitions=repetitions, unit="ms")


def half_row(machine: Machine, nbytes: int, count: int, repetitions: int) -> Row:
    """A round with half of the layers in the budget; apart, so that one set is offloaded."""
    model = machine.layers(count, nbytes)
    inputs = machine.inputs(model)
    budget = count // 2 * nbytes
    with streamed(machine, model, budget), machine.torch.inference_mode():
        contenders = {"ours, half": machine.in_a_row(lambda: model(inputs), ROUNDS)}
        return side_by_side("", contenders, count=1, repetitions=repetitions, unit="ms")


def joined(row: Row, other: Row) -> Row:
    """The row with the contenders of another one."""
    results, failed = {**row.results, **other.results}, {**row.failed, **other.failed}
    return replace(row, results=results, failed=failed)


def layers(machine: Machine, sizes: tuple[int, ...], repetitions: int) -> Iterator[Row]:
    """Two rows for each size of a layer."""
    for nbytes in sizes:
        shape = (nbytes, min(LAYERS, NEED // nbytes), repetitions)
        row, thread_time = layer_rows(machine, *shape)
        row = joined(row, half_row(machine, *shape))
        yield joined(row, faults_row(machine, *shape))
        yield thread_time


# --- loads alone --------------------------------------------------------------------------


class Sums:
    """The work on loaded bytes: their sum. The emulated driver has no kernels, and copies them."""

    def __init__(self, machine: Machine, count: int, nbytes: int) -> None:
        self.torch, self.emulated, self.nbytes = machine.torch, machine.emulated, nbytes
        if self.emulated:
            self.copies = [managedmem.empty(nbytes) for _ in range(count)]
        else:
            int64 = self.torch.int64
            self.results = self.torch.zeros(count, dtype=int64, device=machine.place)

    def add(self, number: int, array: Any) -> None:
        """Queue the sum of one group, of a tensor or a buffer of its bytes."""
        if self.emulated:
            self.copies[number].copy_from(array)
            return
        tensor = self.torch.as_tensor(array, device=self.results.device)
        self.torch.sum(tensor.view(self.torch.int32), 0, out=self.results[number])

    def are_right(self) -> bool:
        """True if group n has nothing but n."""
        if self.emulated:
            Device(0).sync()
            found = [int(copy.view("int32").numpy().sum()) for copy in self.copies]
        else:
            found = self.results.tolist()
        return found == [number * (self.nbytes // 4) for number in range(len(found))]


def numbered(machine: Machine, number: int, nbytes: int) -> Any:
    """Bytes of the host that are a number, as a tensor."""
    torch = machine.torch
    return torch.full((nbytes // 4,), number, dtype=torch.int32).view(torch.uint8)


class Ring:
    """As many buffers on the device as the budget holds, filled in turn from pinned memory."""

    def __init__(self, machine: Machine, sums: Sums, count: int, slots: int) -> None:
        torch = self.torch = machine.torch
        self.sums = sums
        self.homes = [numbered(machine, i, sums.nbytes).pin_memory() for i in range(count)]
        self.slots = [torch.empty_like(home, device=machine.place) for home in self.homes[:slots]]
        self.side = torch.cuda.Stream()
        self.filled = [torch.cuda.Event() for _ in range(slots)]
        self.used = [torch.cuda.Event() for _ in range(slots)]
        self.copies = self.uses = 0  # over all rounds

    def fill(self) -> None:
        """Queue one copy."""
        slot = self.copies % len(self.slots)
        self.side.wait_event(self.used[slot])
        with self.torch.cuda.stream(self.side):
            home = self.homes[self.copies % len(self.homes)]
            self.slots[slot].copy_(home, non_blocking=True)
            self.filled[slot].record()
        self.copies += 1

    def round(self) -> None:
        """Sum all groups once. Copies for the next round start in this one, as ours do."""
        current = self.torch.cuda.current_stream()
        for number in range(len(self.homes)):
            while self.copies < self.uses + len(self.slots) - 1:
                self.fill()
            slot = self.uses % len(self.slots)
            current.wait_event(self.filled[slot])
            self.sums.add(number, self.slots[slot])
            self.used[slot].record()
            self.uses += 1


def summing(machine: Machine, groups: list[Any], sums: Sums) -> Step:
    """A round over the groups of a working set."""
    stream = None if machine.emulated else machine.torch.cuda.current_stream()

    def use_all() -> None:
        for number, group in enumerate(groups):
            with group.use(stream=stream) as use:
                sums.add(number, use.arrays[0])

    return use_all


def filled(machine: Machine, number: int, nbytes: int) -> list[Any]:
    """Managed memory that is a number, as the only target of a group."""
    buffer = managedmem.empty(nbytes)
    machine.torch.frombuffer(buffer, dtype=machine.torch.uint8).copy_(
        numbered(machine, number, nbytes)
    )
    return [buffer]


def loads(machine: Machine, nbytes: int, count: int, repetitions: int) -> Row:
    """A round over the groups of a working set."""
    slots = max(count // SHARE, 2)
    budget = slots * nbytes
    work = {name: Sums(machine, count, nbytes) for name in ("pinned buffers", "ours", "managed")}
    contenders: dict[str, Contender] = {}
    if not machine.emulated:
        ring = Ring(machine, work["pinned buffers"], count, slots)
        contenders["pinned buffers"] = machine.in_a_row(ring.round, ROUNDS)
    with WorkingSet(budget, Device(0)) as working, ManagedWorkingSet(budget, Device(0)) as managed:
        groups = [working.add(numbered(machine, i, nbytes)) for i in range(count)]
        contenders["ours"] = machine.in_a_row(summing(machine, groups, work["ours"]), ROUNDS)
        if count * nbytes <= NEED:
            groups = [managed.add(filled(machine, i, nbytes)) for i in range(count)]
            use_all = summing(machine, groups, work["managed"])
            contenders["managed"] = machine.in_a_row(use_all, ROUNDS)
        title = f"{count} loads of {size_text(nbytes)}"
        row = side_by_side(title, contenders, count=1, repetitions=repetitions, unit="ms")
        before = working.stats().bytes_loaded
        contenders["ours"](1)
        loaded = (working.stats().bytes_loaded - before) / ROUNDS / (count * nbytes)
    right = all(work[name].are_right() for name in contenders)
    return replace(row, note=f"sums right: {right}; loaded in a round: {loaded:.2f} of all bytes")


# --- a transformer ------------------------------------------------------------------------


def generation(machine: Machine, repetitions: int, new: int, **shape: int) -> Iterator[Row]:
    """Tokens of a language model from the transformers library."""
    transformers = loaded("transformers")
    if transformers is None:
        return
    torch = machine.torch
    torch.manual_seed(0)
    dtype = torch.float32 if machine.emulated else torch.float16
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape)).to(dtype).eval()
    tokens = torch.arange(8, device=machine.place).view(1, -1)
    size = sum(p.nbytes for p in model.parameters())

    def generate(model: Any) -> Any:
        return model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
        )

    resident = copy.deepcopy(model).to(machine.place)
    contenders = {"resident": machine.timed(lambda: generate(resident), 1)}
    if (accelerate := loaded("accelerate")) is not None and not machine.emulated:
        theirs = accelerate.cpu_offload(copy.deepcopy(model), machine.place)
        contenders["accelerate"] = machine.timed(lambda: generate(theirs), 1)
    with streamed(machine, model, size // 2), torch.inference_mode():
        contenders["ours"] = machine.timed(lambda: generate(model), 1)
        title = f"GPT-2's shape, {size_text(size)}, {new} tokens"
        equal = bool(torch.equal(model(tokens).logits, resident(tokens).logits))
        row = side_by_side(title, contenders, count=1, repetitions=repetitions, unit="ms")
    yield replace(row, note=f"logits equal: {equal}")


# --- training -----------------------------------------------------------------------------


class Training:
    """A multilayer perceptron with Adam."""

    def __init__(self, machine: Machine, nbytes: int, count: int, place: Any) -> None:
        torch = machine.torch
        self.machine = machine
        self.model = machine.layers(count, nbytes).to(place)
        self.inputs = machine.inputs(self.model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4, foreach=True)

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.inputs).square().mean().backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()


class PinnedState:
    """Adam's averages in pinned memory, copied to the device and back by hand, layer by layer."""

    def __init__(self, training: Training) -> None:
        self.torch = training.machine.torch
        self.training = training
        training.step()  # makes the state
        self.inward, self.outward = self.torch.cuda.Stream(), self.torch.cuda.Stream()
        self.groups = training.optimizer.param_groups[0]
        self.parameters = list(self.groups["params"])
        self.homes = []
        names = ("exp_avg", "exp_avg_sq")
        for parameter in self.parameters:
            state = training.optimizer.state[parameter]
            self.homes.append({name: state[name].cpu().pin_memory() for name in names})
        first = self.parameters[0]
        self.slots = [{name: self.torch.empty_like(first) for name in names} for _ in range(SLOTS)]
        self.free = [self.torch.cuda.Event() for _ in range(SLOTS)]

    def step(self) -> None:
        """Forward, backward, and the update of one layer after the other."""
        torch, optimizer = self.torch, self.training.optimizer
        self.training.backward()
        current = torch.cuda.current_stream()
        for number, parameter in enumerate(self.parameters):
            slot, home = self.slots[number % SLOTS], self.homes[number]
            with torch.cuda.stream(self.inward):
                self.inward.wait_event(self.free[number % SLOTS])
                for name, scratch in slot.items():
                    scratch.copy_(home[name], non_blocking=True)
            current.wait_stream(self.inward)
            optimizer.state[parameter].update(slot)
            self.groups["params"] = [parameter]
            optimizer.step()
            self.outward.wait_stream(current)
            with torch.cuda.stream(self.outward):
                for name, scratch in slot.items():
                    home[name].copy_(scratch, non_blocking=True)
                self.free[number % SLOTS].record()
        self.groups["params"] = self.parameters
        self.inward.wait_stream(self.outward)


def training(machine: Machine, nbytes: int, count: int, repetitions: int) -> Iterator[Row]:
    """Steps with Adam's state out of the budget."""
    size = nbytes * count
    resident = Training(machine, nbytes, count, machine.place)
    contenders = {"resident": machine.in_a_row(resident.step, ROUNDS)}
    if not machine.emulated:
        pinned = PinnedState(Training(machine, nbytes, count, machine.place))
        contenders["pinned buffers"] = machine.in_a_row(pinned.step, ROUNDS)
    ours = Training(machine, nbytes, count, "cpu")
    room = 2 * SLOTS * nbytes  # for the state of three layers
    budget = 2 * size + min(room, 2 * size - nbytes)
    with streamed(machine, ours.model, budget, optimizer=ours.optimizer):
        contenders["ours"] = machine.in_a_row(ours.step, ROUNDS)
        title = f"Adam, {count} layers of {size_text(nbytes)}"
        row = side_by_side(title, contenders, count=1, repetitions=repetitions, unit="ms")
    faults = Training(machine, nbytes, count, machine.place)
    faults.step()
    machine.ours.to_managed(faults.optimizer)

    def home() -> None:
        machine.ours.prefetch(faults.optimizer, Host())

    others = {"page faults": machine.timed(faults.step, ROUNDS, home)}
    yield joined(row, side_by_side("", others, count=1, repetitions=repetitions, unit="ms"))


def trained_in_turn(machine: Machine, nbytes: int, count: int, repetitions: int) -> Row:
    """Steps with half of the parameters in the budget, and what they bring home."""
    size = nbytes * count
    resident = Training(machine, nbytes, count, machine.place)
    ours = Training(machine, nbytes, count, "cpu")
    steps = home_before = 0

    def step() -> None:
        nonlocal steps, home_before
        steps += 1
        if steps == 3:  # two teach the order
            home_before = handle.stats()["bytes_home"]
        ours.step()

    contenders = {"resident": machine.in_a_row(resident.step, ROUNDS)}
    with streamed(machine, ours.model, size // 2, optimizer=ours.optimizer) as handle:
        contenders["ours"] = machine.in_a_row(step, ROUNDS)
        title = f"Adam, {count} layers of {size_text(nbytes)}, half of them in the budget"
        row = side_by_side(title, contenders, count=1, repetitions=repetitions, unit="ms")
        home = (handle.stats()["bytes_home"] - home_before) / (steps - 2) / size
    return replace(row, note=f"parameters copied home in a step: {home:.2f} times")


def all_fits(machine: Machine, nbytes: int, count: int, repetitions: int) -> Row:
    """A round with a budget for everything."""
    torch = machine.torch
    model = machine.layers(count, nbytes)
    inputs = machine.inputs(model)
    resident = copy.deepcopy(model).to(machine.place)
    with streamed(machine, model, count * nbytes), torch.inference_mode():
        contenders = {
            "ours": machine.in_a_row(lambda: model(inputs), 4 * ROUNDS),
            "resident": machine.in_a_row(lambda: resident(inputs), 4 * ROUNDS),
        }
        title = f"all fits, {count} layers of {size_text(nbytes)}"
        return side_by_side(title, contenders, count=1, repetitions=repetitions, unit="ms")


def measure(
    repetitions: int = 7,
    sizes: tuple[int, ...] = SIZES,
    trained: tuple[int, int] = (16 * MIB, 4),
    tokens: int = TOKENS,
    **shape: int,
) -> Iterator[Row]:
    """All rows; none without torch, or where it has no GPU on a real driver."""
    torch = loaded("torch")
    if torch is None:
        return
    machine = Machine(torch)
    if not machine.emulated and not torch.cuda.is_available():
        return
    yield from layers(machine, sizes, repetitions)
    for nbytes in sizes[-2:]:
        yield loads(machine, nbytes, min(MOST_GROUPS, LOADED // nbytes), repetitions)
        yield loads(machine, nbytes, min(LAYERS, NEED // nbytes), repetitions)
    yield from generation(machine, repetitions, tokens, **shape)
    yield from training(machine, *trained, repetitions)
    yield trained_in_turn(machine, trained[0], 2 * trained[1], repetitions)
    yield all_fits(machine, sizes[min(1, len(sizes) - 1)], LAYERS, repetitions)
