"""Ranks that share weights: each scenario runs in processes that this program forks after import.

Prints a line of JSON for each: its name, and what went wrong or None.
"""

import contextlib
import copy
import datetime
import gc
import importlib
import json
import os
import re
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import managedmem.torch as mt
from managedmem import emulator

load = importlib.import_module("managedmem.torch._load")
ranks_module = importlib.import_module("managedmem.torch._ranks")
share = importlib.import_module("managedmem.torch._share")

WIDTH = 256
LAYER = WIDTH * WIDTH * 4
PATIENCE = 60  # seconds for a scenario; torch.distributed gives up before
TIMEOUT = datetime.timedelta(seconds=20)
SCENARIOS = {}


def scenario(count=2, killed=()):
    def add(function):
        SCENARIOS[function.__name__] = function, count, killed
        return function

    return add


# --- what the scenarios use -----------------------------------------------------------------


class Model(nn.Module):
    """Layers with a buffer, a tied weight, and a weight in another order of memory."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight
        self.layers[1].weight = nn.Parameter(self.layers[1].weight.detach().t())
        self.register_buffer("scale", torch.rand(WIDTH), persistent=False)
        self.register_buffer("empty", torch.empty(0))
        self.layers[3].register_buffer("count", torch.zeros(300))

    def forward(self, x):
        return self.last(self.layers(self.first(x))) * self.scale


def made(device="cpu", seed=0):
    torch.manual_seed(seed)
    with torch.device(device):
        return Model()


def inputs(seed=1):
    return torch.rand(4, WIDTH, generator=torch.Generator().manual_seed(seed))


def same_bits(one, other):
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(
        key == name and a.dtype == b.dtype and torch.equal(a, b) for (key, a), (name, b) in pairs
    )


def assert_same(one, other):
    assert same_bits(one, other)
    assert torch.equal(one.scale, other.scale)


def mappings():
    """The sizes in KiB of this process's mappings of shared weights."""
    text = Path("/proc/self/smaps").read_text()
    found = []
    for part in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", text):
        if "memfd:managedmem-weights" in part.partition("\n")[0]:
            found.append({key: int(n) for key, n in re.findall(r"(\w+): +(\d+) kB", part)})
    return found


def files():
    """This process's open descriptors of shared weights."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += (
                [number]
                if "memfd:managedmem-weights" in os.readlink(f"/proc/self/fd/{number}")
                else []
            )
    return found


def assert_nothing_left():
    gc.collect()
    assert not files() and not mappings(), (files(), mappings())


@contextlib.contextmanager
def raises(kind, words):
    try:
        yield
    except kind as error:
        assert re.search(words, str(error)), error
    else:
        raise AssertionError(f"no {kind.__name__}")


@contextlib.contextmanager
def replaced(owner, name, new):
    old = getattr(owner, name)
    setattr(owner, name, new)
    try:
        yield
    finally:
        setattr(owner, name, old)


def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def saved(folder, model, name="model"):
    """A file that rank 0 writes, and all see."""
    path = folder / f"{name}.safetensors"
    if dist.get_rank() == 0:
        mt.save_file(model, path)
    dist.barrier()
    return path


# --- scenarios ------------------------------------------------------------------------------


@scenario()
def one_copy_for_a_rank_with_weights_and_one_without(rank, _):
    reference = made()
    model = made("meta" if rank else "cpu")
    before = list(model.parameters())
    nbytes = mt.share_memory(model)
    assert nbytes == sum(t.nbytes for t in [*model.parameters(), *model.buffers()])
    assert_same(model, reference)
    assert model.last.weight is model.first.weight
    assert model.layers[1].weight.stride() == (1, WIDTH)
    assert rank or all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.requires_grad and type(p) is nn.Parameter for p in model.parameters())
    dist.barrier()
    (mine,) = mappings()
    assert mine["Rss"] * 1024 >= nbytes and abs(2 * mine["Pss"] - mine["Rss"]) <= 64, mine
    assert mine["Rss"] * 1024 <= 1.05 * nbytes + 8192
    homes = [p.data_ptr() for p in model.parameters()]
    with mt.offload(model, 0, budget=3 * LAYER, read_only=True) as handle, torch.no_grad():
        for seed in range(3):
            assert torch.equal(model(inputs(seed)), reference(inputs(seed)))
        numbers = handle.stats()
        assert numbers["loads"] and not numbers["bytes_home"] and not numbers["failures"]
        assert len(mappings()) == 1, mappings()
        assert len([e for e in handle._lanes[0].moved if e.shared]) >= 6
    assert [p.data_ptr() for p in model.parameters()] == homes
    dist.barrier()
    del model, handle, before
    if rank == 0:  # which made the memory
        assert_nothing_left()
    dist.barrier()


@scenario()
def each_may_drop_it_at_any_time(rank, _):
    model = made("meta" if rank else "cpu")
    mt.share_memory(model)
    dist.barrier()
    if rank == 0:
        del model
        assert_nothing_left()
        return
    time.sleep(0.2)
    assert_same(model, made())
    with mt.offload(model, 0, budget=3 * LAYER, read_only=True), torch.no_grad():
        assert torch.equal(model(inputs()), made()(inputs()))


@scenario()
def ranks_read_files_together(rank, folder):
    reference = made()
    path = saved(folder, reference)
    read = []
    real = load._read_piece
    with (
        replaced(load, "_PIECE", 1 << 16),
        replaced(load, "_read_piece", lambda *job: (read.append(job[3]), real(*job))),
    ):
        model = made("meta")
        model.scale = torch.ones(WIDTH)
        assert mt.load_model(model, path, group=dist.group.WORLD) == ([], [])
        once = sum(read)
        tensors = mt.load_file(path, dtype=torch.bfloat16, group=dist.group.WORLD)
    assert same_bits(model, reference) and model.last.weight is model.first.weight
    state = reference.state_dict()
    assert all(torch.equal(t, state[name].bfloat16()) for name, t in tensors.items())
    total = sum({id(t): t.nbytes for t in reference.state_dict(keep_vars=True).values()}.values())
    counts = [None, None]
    dist.all_gather_object(counts, once)
    assert sum(counts) == total and min(counts) > total / 3, (counts, total)
    assert not files() and len(mappings()) == 2
    del tensors
    gc.collect()
    assert len(mappings()) == 1
    with mt.offload(model, 0, budget=3 * LAYER, read_only=True), torch.no_grad():
        reference.scale = model.scale
        assert torch.equal(model(inputs()), reference(inputs()))
    whole = {"blocks": ["layers"], "places": {"layers": "frames"}}
    with mt.offload(model, 0, budget=20 * LAYER, read_only=True, **whole) as handle:
        shared = [part.nbytes for part in handle._lanes[0].plan.streamed if part.is_shared]
        assert max(shared) >= 6 * LAYER, "layers with a buffer between them lie together"
    alone = mt.load_file(path)
    assert len(mappings()) == 1, mappings()
    assert len(alone) == len(state) - 1


@scenario()
def other_models_are_refused_by_all(rank, _):
    def changed(change):
        model = made()
        if rank == 1:
            change(model)
        return model

    def to_other(model):
        model.layers[2].bias.data[7] += 1

    def untie(model):
        model.last.weight = nn.Parameter(model.last.weight.detach().clone())

    def no_values(model):
        model.layers[2].bias.data[7] = float("nan")

    differences = [
        (lambda m: m.layers.add_module("more", nn.Linear(2, 2)), "rank 1 has .*the modules must"),
        (
            lambda m: m.last.register_buffer("zz", torch.ones(2)),
            "rank 1 has 18 tensors, and rank 0 17",
        ),
        (lambda m: setattr(m.layers, "4", nn.Linear(WIDTH, 8)), "'layers.4.weight' .shape .8, "),
        (lambda m: m.layers[3].half(), "float16.* where rank 0 has .*float32"),
        (lambda m: setattr(m.layers[1], "weight", m.layers[2].weight), "the modules must be"),
        (untie, "tied to .'last.weight'"),
        (to_other, "'layers.2.bias' has other contents in rank 1"),
        (no_values, "'layers.2.bias' has other contents in rank 1"),
    ]
    for change, words in differences:
        model = changed(change)
        before = copy.deepcopy(model.state_dict())
        memory = [t.data_ptr() for t in model.state_dict().values()]
        with raises(ValueError, words):
            mt.share_memory(model)
        assert memory == [t.data_ptr() for t in model.state_dict().values()]
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor.nan_to_num(), before[name].nan_to_num()), name
        assert_nothing_left()
    model = made("meta")
    with raises(ValueError, "'first.weight' .* is on the meta device in all ranks of the host"):
        mt.share_memory(model)
    assert all(p.is_meta for p in model.parameters())


@scenario()
def an_error_of_one_is_raised_in_all(rank, folder):
    """Bad arguments, files, memory and drivers, in rank 1 alone."""
    path, other = saved(folder, made()), saved(folder, made(seed=1), "other")
    world = dist.group.WORLD

    def fail(kind, text):
        def failing(*_, **__):
            raise kind(text)

        return failing

    model = made("meta")
    model.scale = torch.ones(WIDTH)
    overlapping = made()
    overlapping.register_buffer("part", overlapping.first.weight.detach()[1:3])
    share_it = mt.share_memory
    on_one = [
        (TypeError, "must be a torch.nn.Module", lambda: share_it(7)),
        (ValueError, "must be a CUDA device", lambda: share_it(made(), device="cpu")),
        (ValueError, "a part of their memory in common", lambda: share_it(overlapping)),
        (TypeError, "must be a torch.nn.Module", lambda: mt.load_model(7, path, group=world)),
        (TypeError, "floating-point", lambda: mt.load_file(path, dtype=3, group=world)),
        (FileNotFoundError, "absent", lambda: mt.load_file(folder / "absent", group=world)),
        (ValueError, "rank 1 loads other files", lambda: mt.load_file(other, group=world)),
        (
            ValueError,
            "rank 1 loads other tensors than rank 0, or another dtype",
            lambda: mt.load_file(path, dtype=torch.float16, group=world),
        ),
    ]
    for i, (kind, words, call) in enumerate(on_one):
        with raises(kind, words):
            if rank == 1:
                call()
            elif i < 3:
                share_it(made())
            else:
                mt.load_file(path, group=world)
        assert_nothing_left()
    broken = [
        (OSError, load, "_read_piece"),
        (MemoryError, load, "check_room"),
        (OSError, ranks_module, "_memory_file"),
        (OSError, ranks_module, "_mapped"),
        (KeyboardInterrupt, load, "_fill"),
        (MemoryError, load, "tensor_at"),
    ]
    for kind, owner, name in broken:
        for victim in (0, 1) if name != "_memory_file" else (0,):
            new = fail(kind, "here") if rank == victim else getattr(owner, name)
            expected = (
                kind if rank == victim else RuntimeError if kind is KeyboardInterrupt else kind
            )
            words = "here" if rank == victim else f"rank {victim}: here"
            with replaced(owner, name, new), raises(expected, words):
                mt.load_model(model, path, group=world)
            assert model.first.weight.is_meta
            assert_nothing_left()
    for name in ("_place", "_copy", "_compared"):
        mine = made()
        memory = mine.first.weight.data_ptr()
        new = fail(OSError, "here") if rank == 1 else getattr(share, name)
        with replaced(share, name, new), raises(OSError, "here"):
            share_it(mine)
        assert mine.first.weight.data_ptr() == memory
        assert_nothing_left()
    mt.load_file(path)  # which opens the driver
    for call in (lambda: mt.load_file(path, group=world), lambda: share_it(made())):
        if rank == 1:
            emulator.fail("cuMemHostRegister", 1, 2)
        with raises(MemoryError if rank else (MemoryError, RuntimeError), "cuMemHostRegister"):
            call()
        assert_nothing_left()
    share_it(mine := made())
    assert_same(mine, made())


def with_adapters(shared):
    """A frozen base, and small layers that train."""
    model = made() if not shared or dist.get_rank() == 0 else made("meta")
    model.requires_grad_(False)
    if shared:
        mt.share_memory(model)
    torch.manual_seed(3)
    for i in range(len(model.layers)):
        adapter = nn.Linear(WIDTH, WIDTH, bias=False)
        model.layers[i] = nn.Sequential(model.layers[i], adapter)
    return model, [p for p in model.parameters() if p.requires_grad]


@scenario()
def trained_parameters_are_private(rank, _):
    """DistributedDataParallel over a frozen base that is shared, as over a plain one."""
    model, trained = with_adapters(shared=True)
    plain, reference = with_adapters(shared=False)
    assert trained[0].data_ptr() and len(trained) == 6
    bits = {name: t.clone() for name, t in model.state_dict().items()}
    homes = {n: p.data_ptr() for n, p in model.named_parameters()}
    optimizers = [torch.optim.Adam(params, lr=1e-2) for params in (trained, reference)]
    handle = mt.offload(model, 0, budget=6 * LAYER, optimizer=optimizers[0])
    shared = [part for part in handle._lanes[0].plan.streamed if part.is_shared]
    assert len(shared) >= 3 and not any(part.written for part in shared)
    wrapped = [
        nn.parallel.DistributedDataParallel(each, init_sync=False) for each in (model, plain)
    ]
    for step in range(3):
        losses = []
        for each, optimizer in zip(wrapped, optimizers, strict=True):
            optimizer.zero_grad()
            loss = each(inputs(10 * step + rank)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] == losses[1]
    assert handle.stats()["failures"] == 0
    handle.remove()
    for (name, one), (_, other) in zip(
        model.named_parameters(), plain.named_parameters(), strict=True
    ):
        assert torch.equal(one, other), name
        assert one.requires_grad or torch.equal(one, bits[name])
        assert (one.data_ptr() == homes[name]) == (not one.requires_grad), name


@scenario()
def nothing_writes_shared_memory(rank, _):
    """Training all of it, writes in calls, and parameters that begin to train."""
    model = made("meta" if rank else "cpu")
    mt.share_memory(model)
    memory = {n: t.data for n, t in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for budget in (3 * LAYER, 100 * LAYER):
        with mt.offload(model, 0, budget=budget, optimizer=optimizer):
            optimizer.zero_grad()
            model(inputs(rank)).sum().backward()
            optimizer.step()
        reference = made()
        assert not torch.equal(model.first.weight, reference.first.weight)
        assert model.first.weight.data_ptr() != memory["first.weight"].data_ptr()
        dist.barrier()
        for name, parameter in reference.named_parameters():
            assert torch.equal(memory[name], parameter), name
        for name, parameter in model.named_parameters():
            parameter.data = memory[name]
            parameter.grad = None
    model.requires_grad_(False)
    for options in ({"read_only": True}, {}):
        handle = mt.offload(model, 0, budget=3 * LAYER, **options)
        hook = model.layers[2].register_forward_pre_hook(lambda m, _: m.weight.add_(1))
        model(inputs())
        hook.remove()
        with raises(RuntimeError, "'layers.2.weight' was written although it is in memory that"):
            model(inputs())
        with raises(UserWarning, "written in memory that other processes have too: 'layers.2"):
            handle.remove()
        assert torch.equal(memory["layers.2.weight"], made().layers[2].weight)
        assert model.layers[2].weight.data_ptr() == memory["layers.2.weight"].data_ptr()
    model.first.requires_grad_(True)
    optimizer = torch.optim.SGD(model.first.parameters(), lr=0.1)
    handle = mt.offload(model, 0, budget=3 * LAYER, optimizer=optimizer)
    model.layers[2].requires_grad_(True)
    optimizer.add_param_group({"params": list(model.layers[2].parameters())})
    model(inputs()).sum().backward()
    with raises(RuntimeError, "the optimizer trains 'layers.2', which required no gradient when"):
        optimizer.step()
    handle.remove()
    dist.barrier()
    for name, parameter in made().named_parameters():
        assert torch.equal(memory[name], parameter), name


@scenario(3)
def each_host_has_a_copy(rank, folder):
    """Ranks 0 and 1 are on one host, and rank 2 on another; then a part of them is a group."""
    path = saved(folder, made())
    own = copy.copy(path)
    with replaced(ranks_module, "_host", lambda: ("a",) if rank < 2 else ("b",)):
        model = made("meta" if rank == 1 else "cpu")
        mt.share_memory(model)
        assert_same(model, made())
        inodes = [None] * 3
        text = Path("/proc/self/maps").read_text()
        found = re.search(r"(\d+) +/memfd:managedmem-weights", text)
        dist.all_gather_object(inodes, found[1])
        assert inodes[0] == inodes[1] != inodes[2], inodes
        model = made("meta" if rank == 2 else "cpu")
        with raises(ValueError, "on the meta device in all ranks of the host of rank 2"):
            mt.share_memory(model)
        model = made(seed=int(rank == 2))
        with raises(ValueError, "has other contents on the host of rank 2"):
            mt.share_memory(model)
        if rank == 2:
            own = path.with_name("copy.safetensors")
            own.write_bytes(path.read_bytes())
        tensors = mt.load_file(own, group=dist.group.WORLD)
        assert torch.equal(tensors["first.weight"], made().first.weight)
    group = dist.new_group([1, 2])
    if rank == 0:
        with raises(ValueError, "not a rank of the group"):
            mt.share_memory(made(), group=group)
    else:
        mt.share_memory(model := made("meta" if rank == 2 else "cpu"), group=group)
        assert_same(model, made())
    dist.barrier()


def survives(rank, victim, owner, name, call, check):
    """The victim is killed in a function; the other rank gets the error of torch.distributed."""
    if rank == victim:
        with replaced(owner, name, die):
            call()
    else:
        with raises(RuntimeError, "(?i)connection|peer|timed out|gloo"):
            call()
        check()
        assert_nothing_left()
        assert_same(made(), made())


def killed_in(victim, owner, name, loads):
    def run(rank, folder):
        if loads:
            path = saved(folder, made())
            model = made("meta")
            model.scale = torch.ones(WIDTH)

            def check():
                assert all(p.is_meta for p in model.parameters())

            survives(
                rank,
                victim,
                owner,
                name,
                lambda: mt.load_model(model, path, group=dist.group.WORLD),
                check,
            )
        else:
            model = made()
            memory = [p.data_ptr() for p in model.parameters()]

            def check():
                assert memory == [p.data_ptr() for p in model.parameters()]
                assert_same(model, made())

            survives(rank, victim, owner, name, lambda: mt.share_memory(model), check)

    kind = "load" if loads else "share"
    run.__name__ = f"rank_{victim}_killed_in_a_{kind}{name}"
    scenario(2, (victim,))(run)


for _victim in (0, 1):
    killed_in(_victim, load, "_read_piece", True)
    killed_in(_victim, ranks_module, "_mapped", True)
    killed_in(_victim, ranks_module, "_mapped", False)
killed_in(0, ranks_module, "_memory_file", True)
killed_in(0, share, "_copy", False)
killed_in(1, share, "_compared", False)


def killed_in_a_round(rank, victim):
    model = made("meta" if rank else "cpu")
    mt.share_memory(model)
    with mt.offload(model, 0, budget=3 * LAYER, read_only=True), torch.no_grad():
        model(inputs())
        dist.barrier()
        if rank == victim:
            model.layers[3].register_forward_hook(die)
        for seed in range(20):
            assert torch.equal(model(inputs(seed)), made()(inputs(seed)))
        with raises(RuntimeError, "(?i)connection|peer|timed out|gloo"):
            dist.barrier()
            dist.barrier()
    assert_same(model, made())


@scenario(2, (0,))
def rank_0_killed_in_a_round(rank, _):
    killed_in_a_round(rank, 0)


@scenario(2, (1,))
def rank_1_killed_in_a_round(rank, _):
    killed_in_a_round(rank, 1)


@scenario(2, (0, 1))
def all_killed_leave_nothing(rank, _):
    mt.share_memory(made("meta" if rank else "cpu"))
    dist.barrier()
    die()


@scenario()
def each_ends_as_a_program_does(rank, _):
    mt.share_memory(model := made())
    handle = mt.offload(model, 0, budget=3 * LAYER, read_only=True)
    model(inputs())
    child = os.fork()
    if child == 0:
        del handle, model
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    with torch.no_grad():
        assert torch.equal(model(inputs()), made()(inputs()))
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(0)


# --- running them -----------------------------------------------------------------------------


def run_rank(function, rank, count, folder):
    """Run a scenario in a process of its own, which ends here."""
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/meeting",
            rank=rank,
            world_size=count,
            timeout=TIMEOUT,
        )
        warnings.simplefilter("error", UserWarning)
        function(rank, folder)
    except SystemExit:
        raise
    except BaseException:
        (folder / f"error{rank}").write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)


def ended(processes):
    """The exit codes by process, once all have ended or the time is over."""
    codes, end = {}, time.monotonic() + PATIENCE
    while len(codes) < len(processes) and time.monotonic() < end:
        for process in processes:
            if process not in codes and (found := os.waitpid(process, os.WNOHANG))[0]:
                codes[process] = os.waitstatus_to_exitcode(found[1])
        time.sleep(0.02)
    return codes


def run(name):
    """What went wrong in a scenario."""
    function, count, killed = SCENARIOS[name]
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        processes = []
        for rank in range(count):
            process = os.fork()
            if process == 0:
                run_rank(function, rank, count, folder)
            processes.append(process)
        codes = ended(processes)
        for process in set(processes) - set(codes):
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        wrong = [file.read_text() for file in sorted(folder.glob("error*"))]
        for rank, process in enumerate(processes):
            expected = -signal.SIGKILL if rank in killed else 0
            if codes.get(process) != expected:
                wrong.append(f"rank {rank} ended with {codes.get(process, 'a hang')}")
        wrong += [f"left open: {files()}"] if files() else []
        return "\n".join(wrong) or None


def main(names):
    for name in names:
        print(json.dumps([name, run(name)]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or SCENARIOS)
