"""torch memory pools over managed memory: what is refused and why, and, on a GPU, how they work."""

import gc
import importlib
import inspect

import pytest

import managedmem
from constants import EMULATED
from identifiers import label
from managedmem import CUDAError, Device, Host, ManagedBuffer, MigrationPolicy
from programs import run_python
from races import race_over
from tensors import in_pool, is_managed, torch

_torch_pool = importlib.import_module("managedmem.torch._pool")
UnifiedMemoryUnsupportedError = _torch_pool.UnifiedMemoryUnsupportedError
managed_mempool = _torch_pool.managed_mempool

PETABYTE = 1 << 50
on_gpu = pytest.mark.skipif(
    EMULATED or not torch.cuda.is_available(), reason="needs torch with a GPU and its driver"
)


def memory_of(tensor):
    return ManagedBuffer.from_handle(tensor.data_ptr(), tensor.nbytes, owner=tensor)


class TestReasons:
    @pytest.mark.skipif(not EMULATED, reason="about the emulated driver")
    def test_the_emulated_driver(self):
        with pytest.raises(UnifiedMemoryUnsupportedError, match="emulated driver") as caught:
            managed_mempool()
        assert ("built without CUDA" in str(caught.value)) == (torch.version.cuda is None)

    @pytest.mark.skipif(torch.version.cuda is not None, reason="about torch's CPU build")
    def test_a_torch_without_cuda(self):
        assert any("built without CUDA" in reason for reason in _torch_pool.unsupported_reasons())

    def test_no_driver(self):
        done = run_python(
            """
            from managedmem.torch._pool import UnifiedMemoryUnsupportedError, managed_mempool
            try:
                managed_mempool()
            except UnifiedMemoryUnsupportedError as error:
                print(error)
            """,
            driver="/nonexistent/libcuda.so.1",
        )
        assert "no usable CUDA driver" in done.stdout
        assert "/nonexistent/libcuda.so.1" in done.stdout

    def test_importing_opens_no_driver(self):
        run_python("""
            import managedmem.torch._pool
            assert "libmanagedmem_emulator" not in open("/proc/self/maps").read()
        """)

    def test_advice_that_the_system_cannot_do(self):
        done = run_python(
            """
            from managedmem import Device
            from managedmem.torch._pool import (
                UnifiedMemoryUnsupportedError, _Advice, _function_names
            )
            from program_checks import refused
            print(_function_names(_Advice())[0])
            for arguments in ((Device(0),), (None, [Device(1)])):
                with refused(UnifiedMemoryUnsupportedError, "concurrent_managed_access"):
                    _function_names(_Advice(*arguments))
            """,
            emulator="profile=wsl",
        )
        assert done.stdout == "managedmem_allocate_0\n"

    @pytest.mark.emulator_only
    def test_other_refusals_stay_what_they_are(self):
        from managedmem import emulator

        with pytest.raises(TypeError, match="Device or Host"):
            _torch_pool._function_names(_torch_pool._Advice("cuda"))
        with pytest.raises(ValueError, match="NUMA host"):
            _torch_pool._function_names(_torch_pool._Advice(None, [Host(0)]))
        emulator.fail("cuMemAdvise", code=719)
        with pytest.raises(CUDAError) as caught:
            _torch_pool._function_names(_torch_pool._Advice(Host()))
        assert caught.value.code == 719


class TestSettings:
    @pytest.mark.parametrize(
        ("old", "new", "expected"),
        [
            (None, None, []),
            ("", None, []),
            ("expandable_segments:True", None, ["expandable_segments:True"]),
            (None, "expandable_segments:True", ["expandable_segments:True"]),
            ("max_split_size_mb:64", "expandable_segments:True", []),
            (" expandable_segments : True ", None, ["expandable_segments:True"]),
            ("expandable_segments:True,expandable_segments:False", None, []),
            ("expandable_segments:False", None, []),
            ("roundup_power2_divisions:[64:8,>:1],expandable_segments:True", None, True),
            ("backend:cudaMallocAsync", None, ["backend:cudaMallocAsync"]),
            ("backend:native", None, []),
        ],
    )
    def test_are_read_as_torch_reads_them(self, monkeypatch, old, new, expected):
        for name, value in (
            ("PYTORCH_CUDA_ALLOC_CONF", old),
            ("PYTORCH_ALLOC_CONF", new),
            ("PYTORCH_NO_CUDA_MEMORY_CACHING", None),
        ):
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)
        found = _torch_pool._doubtful_settings()
        assert found == (["expandable_segments:True"] if expected is True else expected)

    def test_caching_can_be_switched_off(self, monkeypatch):
        monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
        assert "PYTORCH_NO_CUDA_MEMORY_CACHING" in _torch_pool._doubtful_settings()

    @on_gpu
    @pytest.mark.parametrize(
        "setting",
        [
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
            "PYTORCH_ALLOC_CONF=expandable_segments:True",
            "PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync",
            "PYTORCH_NO_CUDA_MEMORY_CACHING=1",
        ],
    )
    def test_give_managed_memory_or_an_error(self, setting):
        """The version of torch decides which; other memory without an error would be a lie."""
        done = run_python(
            f"""
            import os
            name, value = {setting!r}.split("=")
            os.environ[name] = value
            from tensors import in_pool, is_managed
            from managedmem.torch._pool import UnifiedMemoryUnsupportedError, managed_mempool
            try:
                pool = managed_mempool()
            except UnifiedMemoryUnsupportedError as error:
                assert name in str(error) or value in str(error), error
            else:
                assert is_managed(in_pool(pool).data_ptr())
            """,
            driver="cuda",
        )
        assert "managedmem:" not in done.stderr


def without(missing):
    """A class like torch.cuda.MemPool, of a version that lacks these switches."""

    class MemPool:
        def __init__(self, allocator=None, use_on_oom=False, no_split=False):
            raise AssertionError

    class Older:
        def __init__(self, allocator=None):
            raise AssertionError

    class Between:
        def __init__(self, allocator=None, use_on_oom=False, symmetric=False):
            raise AssertionError

    return {(): MemPool, ("no_split",): Between, ("no_split", "use_on_oom"): Older}[missing]


class TestArguments:
    """They are read before anything else, so even where torch cannot have managed memory."""

    @pytest.mark.parametrize("bad", ["prefer", Device(0), ("set_read_mostly", None)], ids=label)
    def test_a_policy_of_another_type(self, bad):
        with pytest.raises(TypeError, match="policy must be a MigrationPolicy or None"):
            managed_mempool(policy=bad)

    @pytest.mark.parametrize(
        "more",
        [{"preferred_location": Host()}, {"accessed_by": iter([Host()])}, {"read_mostly": True}],
        ids=label,
    )
    def test_a_policy_and_its_parts(self, more):
        with pytest.raises(ValueError, match="but not both"):
            managed_mempool(policy=MigrationPolicy(), **more)

    @pytest.mark.parametrize("name", ["use_on_oom", "no_split"])
    @pytest.mark.parametrize("bad", [1, None, "yes"], ids=label)
    def test_switches_are_bools(self, name, bad):
        with pytest.raises(TypeError, match=f"{name} must be True or False"):
            managed_mempool(**{name: bad})

    def test_a_reserve(self):
        with pytest.raises(ValueError, match="0 bytes or more, got -1"):
            managed_mempool(use_on_oom=True, reserve=-1)
        with pytest.raises(ValueError, match="needs use_on_oom=True"):
            managed_mempool(reserve=1)
        with pytest.raises(ValueError, match="needs no_split=False"):
            managed_mempool(use_on_oom=True, no_split=True, reserve=1)
        with pytest.raises(TypeError):
            managed_mempool(use_on_oom=True, reserve=1.5)

    def test_are_the_advice_of_the_policy(self):
        policy = MigrationPolicy(
            read_mostly=True, preferred_location=Host(), accessed_by=[Device(0), Host()]
        )
        nothing = _torch_pool._Advice()
        given = _torch_pool._Advice(Host(), (Device(0),), True)
        assert _torch_pool._read_advice(None, nothing) == nothing
        assert _torch_pool._read_advice(None, given) == given
        assert _torch_pool._read_advice(policy, nothing) == (
            Host(),
            {Device(0), Host()},
            True,
            False,
        )

    @pytest.mark.skipif(not EMULATED, reason="looks at memory that torch does not get")
    def test_of_equal_advice_are_one_preset(self):
        policy = MigrationPolicy(preferred_location=Host(), accessed_by=[Host(), Device(0)])
        parts = _torch_pool._Advice(Host(), (Device(0), Host()))
        whole = _torch_pool._read_advice(policy, _torch_pool._Advice())
        assert _torch_pool._function_names(whole) == _torch_pool._function_names(parts)

    @pytest.mark.parametrize("missing", [(), ("no_split",), ("no_split", "use_on_oom")], ids=str)
    def test_switches_that_torch_does_not_have(self, monkeypatch, missing):
        monkeypatch.setattr(torch.cuda, "MemPool", without(missing))
        for names in ((), ("use_on_oom",), ("no_split",), ("no_split", "use_on_oom")):
            switches = _torch_pool._read_switches(dict.fromkeys(names, True))
            if lacking := [name for name in missing if name in names]:
                with pytest.raises(NotImplementedError, match="newer version") as caught:
                    _torch_pool._refuse_unknown(switches)
                assert f"has no {' and no '.join(lacking)} for" in str(caught.value)
            else:
                _torch_pool._refuse_unknown(switches)

    def test_switches_that_are_off_need_nothing(self):
        assert _torch_pool._read_switches({"use_on_oom": False, "no_split": False}) == {}
        assert _torch_pool._read_switches({"use_on_oom": True, "no_split": False}) == {
            "use_on_oom": True
        }


def has_switch(name):
    pool = getattr(torch.cuda, "MemPool", None)
    return pool is not None and name in inspect.signature(pool.__init__).parameters


@pytest.fixture
def give_back():
    """The blocks of torch's pools go back to the driver after the test."""
    yield
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


@on_gpu
@pytest.mark.usefixtures("give_back")
class TestSwitches:
    def test_a_policy(self):
        policy = MigrationPolicy(preferred_location=Host(), accessed_by=[Device(0)])
        assert MigrationPolicy.of(memory_of(in_pool(managed_mempool(policy=policy)))) == policy

    @pytest.mark.skipif(not has_switch("no_split"), reason="this torch has no no_split")
    def test_no_split_gives_each_tensor_a_block(self):
        pool = managed_mempool(policy=MigrationPolicy.prefer(Host()), no_split=True)
        first, second = in_pool(pool), in_pool(pool)
        managedmem.advise(first, "set_read_mostly")
        assert memory_of(first).read_mostly
        assert not memory_of(second).read_mostly
        apart = abs(first.data_ptr() - second.data_ptr())
        assert apart >= 2 << 20

    @pytest.mark.skipif(not has_switch("use_on_oom"), reason="this torch has no use_on_oom")
    def test_use_on_oom_is_for_a_full_device(self):
        """A limit for this process stands for a device that is full."""
        done = run_python(
            """
            import torch
            from managedmem import Device, Host, MigrationPolicy
            from managedmem.torch import managed_mempool
            from tensors import is_managed
            MIB = 1 << 20
            policy = MigrationPolicy(preferred_location=Host(), accessed_by=[Device(0)])
            pool = managed_mempool(policy=policy, use_on_oom=True, reserve=64 * MIB)

            def tensor(size):
                return torch.full((size,), 3, dtype=torch.uint8, device="cuda")

            before = tensor(24 * MIB)
            assert not is_managed(before.data_ptr())
            limit = torch.cuda.memory_reserved() + 8 * MIB
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(limit / total)
            beyond = [tensor(24 * MIB), tensor(24 * MIB)]
            assert all(is_managed(each.data_ptr()) for each in beyond)
            # On the host: a sum on the device would need memory beyond the limit.
            assert all(bool((each.cpu() == 3).all()) for each in beyond)
            try:
                tensor(24 * MIB)
            except torch.cuda.OutOfMemoryError:
                pass
            else:
                raise AssertionError("more than the reserve")
            torch.cuda.set_per_process_memory_fraction(1.0)
            assert not is_managed(tensor(24 * MIB).data_ptr())
            """,
            driver="cuda",
        )
        assert "managedmem:" not in done.stderr


@on_gpu
@pytest.mark.usefixtures("give_back")
class TestTensors:
    def test_lie_in_managed_memory_only_within_the_block(self):
        pool = managed_mempool()
        inside, outside = in_pool(pool), torch.zeros(1024, device="cuda")
        assert memory_of(inside).is_managed
        assert not memory_of(outside).is_managed
        assert inside.sum().item() == 0

    def test_have_the_advice_of_the_pool(self):
        pool = managed_mempool(
            preferred_location=Host(), accessed_by=[Device(0), Host()], read_mostly=True
        )
        memory = memory_of(in_pool(pool))
        assert memory.preferred_location is Host()
        assert memory.accessed_by == {Device(0), Host()}
        assert memory.read_mostly is True

    def test_of_a_pool_without_advice_have_none(self):
        memory = memory_of(in_pool(managed_mempool()))
        assert (memory.preferred_location, memory.read_mostly) == (None, False)
        assert not memory.accessed_by

    def test_of_two_pools_have_their_own(self):
        on_host = managed_mempool(preferred_location=Host())
        on_device = managed_mempool(preferred_location=Device(0), read_mostly=True)
        x, y = in_pool(on_host), in_pool(on_device)
        assert memory_of(x).preferred_location is Host()
        assert memory_of(x).read_mostly is False
        assert memory_of(y).preferred_location is Device(0)
        assert memory_of(y).read_mostly is True

    def test_may_prefer_their_own_device(self):
        memory = memory_of(in_pool(_torch_pool.own_device_mempool()))
        assert memory.preferred_location is Device(0)
        assert memory.accessed_by == {Device(0)}

    def test_may_be_on_the_second_device(self, device1):
        with torch.cuda.device(1):
            pool = _torch_pool.own_device_mempool()
            tensor = in_pool(pool)
        assert tensor.device == torch.device("cuda", 1)
        assert memory_of(tensor).is_managed
        assert memory_of(tensor).preferred_location is device1
        tensor.fill_(2)
        assert tensor.sum().item() == 2 * tensor.numel()

    def test_take_the_place_of_those_that_have_gone(self):
        pool = managed_mempool(preferred_location=Host())
        tensor = in_pool(pool)
        address = tensor.data_ptr()
        del tensor
        again = in_pool(pool)
        assert again.data_ptr() == address
        assert memory_of(again).preferred_location is Host()

    def test_may_be_many_in_one_pool_entered_again(self):
        pool = managed_mempool()
        tensors = [in_pool(pool, 1000 * n) for n in range(1, 9)]
        for number, tensor in enumerate(tensors):
            tensor.fill_(number)
        torch.cuda.synchronize()
        assert all(is_managed(tensor.data_ptr()) for tensor in tensors)
        assert [tensor[0].item() for tensor in tensors] == list(range(8))

    def test_are_freed_after_the_pool(self):
        pool = managed_mempool()
        tensor = in_pool(pool)
        address = tensor.data_ptr()
        del tensor
        assert is_managed(address), "the caching allocator gave the block back at once"
        del pool
        gc.collect()
        torch.cuda.empty_cache()
        assert not is_managed(address)

    def test_outlive_the_pool(self):
        pool = managed_mempool(preferred_location=Host())
        tensor = in_pool(pool)
        address = tensor.data_ptr()
        del pool
        gc.collect()
        torch.cuda.empty_cache()
        tensor.fill_(3)
        assert tensor.sum().item() == 3 * tensor.numel()
        assert memory_of(tensor).preferred_location is Host()
        del tensor
        gc.collect()
        torch.cuda.empty_cache()
        assert not is_managed(address)

    def test_outlive_the_interpreter(self):
        done = run_python(
            """
            from managedmem.torch._pool import managed_mempool
            from tensors import in_pool
            pool = managed_mempool()
            tensor = in_pool(pool)
            other = in_pool(managed_mempool(read_mostly=True))
            tensor.fill_(1)
            """,
            driver="cuda",
        )
        assert "managedmem:" not in done.stderr

    def test_that_cannot_be_are_torch_s_own_error(self, capfd):
        pool = managed_mempool()
        with pytest.raises(torch.cuda.OutOfMemoryError):
            in_pool(pool, PETABYTE // 4)
        assert "managedmem:" not in capfd.readouterr().err
        assert in_pool(pool).sum().item() == 0
        assert torch.ones(10, device="cuda").sum().item() == 10

    def test_of_several_threads(self):
        """Each has a pool of its own, as torch asks for, and no pool ends while one is entered."""
        pools = [managed_mempool(preferred_location=Device(0)) for _ in range(4)]

        def work(number):
            stream = torch.cuda.Stream()
            for _ in range(10):
                with torch.cuda.stream(stream):
                    tensor = in_pool(pools[number], 10_000)
                    tensor.fill_(number)
                    assert tensor.sum().item() == number * 10_000
                assert is_managed(tensor.data_ptr())

        race_over(work, range(4))

    def test_move_and_keep_their_contents(self):
        tensor = in_pool(managed_mempool())
        tensor.copy_(torch.arange(tensor.numel()))
        expected = torch.arange(tensor.numel(), dtype=tensor.dtype)
        for location in (Host(), Device(0), Host()):
            managedmem.prefetch(tensor, location, stream=torch.cuda.current_stream())
            torch.cuda.synchronize()
            assert memory_of(tensor).last_prefetch_location is location
            assert torch.equal(tensor.cpu(), expected)

    def test_can_be_trained(self):
        """A model in the pool learns the same numbers as one in plain device memory."""

        def train():
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 1)).cuda()
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            inputs = torch.linspace(0, 1, 32 * 16, device="cuda").reshape(16, 32)
            for _ in range(5):
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()
            return [parameter.detach() for parameter in model.parameters()]

        plain = train()
        with torch.cuda.use_mem_pool(managed_mempool()):
            managed = train()
        assert all(is_managed(parameter.data_ptr()) for parameter in managed)
        for one, other in zip(plain, managed, strict=True):
            torch.testing.assert_close(one, other)


@on_gpu
class TestGraphs:
    def test_replay_at_stable_addresses_while_the_pages_move(self):
        pool = managed_mempool(preferred_location=Device(0))
        x, y = in_pool(pool), in_pool(pool)
        addresses = x.data_ptr(), y.data_ptr()
        torch.add(x, 1, out=y)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            torch.add(x, 1, out=y)
        for number in range(4):
            stream = torch.cuda.current_stream()
            x.fill_(number)
            managedmem.prefetch([x, y], Host(), stream=stream)
            managedmem.prefetch([x, y], Device(0), stream=stream)
            graph.replay()
            torch.cuda.synchronize()
            assert torch.all(y == number + 1).item()
        assert (x.data_ptr(), y.data_ptr()) == addresses

    def test_may_allocate_while_they_are_captured(self):
        pool = managed_mempool(preferred_location=Host(), accessed_by=[Device(0)])
        x = in_pool(pool)
        torch.mul(x, 2)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool.id):
            y = x * 2
        assert memory_of(y).is_managed
        assert memory_of(y).preferred_location is Host()
        for number in range(3):
            x.fill_(number)
            graph.replay()
            torch.cuda.synchronize()
            assert torch.all(y == 2 * number).item()
