"""WorkingSet: its arguments, its groups, their order, and their uses."""

import gc
import random

import numpy
import pytest

import managedmem
from constants import EMULATED, PAGE
from contents import pattern, write
from kernels import read_by_device, write_by_device
from layers import SIZE, layer, use_all
from managedmem import Device, Host, ManagedBuffer, Stream, WorkingSet, emulator
from managedmem._units import size_text


class TestArguments:
    @pytest.mark.parametrize("budget", [0, -1, -(1 << 70)])
    def test_budget_must_be_positive(self, budget):
        with pytest.raises(ValueError, match=f"budget must be a positive .* got {budget}$"):
            WorkingSet(budget)

    @pytest.mark.parametrize("budget", [1.5, None, True, b"1 MiB", []])
    def test_budget_must_be_a_number_or_text(self, budget):
        with pytest.raises(TypeError, match="budget must be a number of bytes or text"):
            WorkingSet(budget)

    @pytest.mark.parametrize("budget", ["", "64", "0 MiB", "-1 MiB", "1 MiB free", "1e3 B", "all"])
    def test_budget_must_be_readable(self, budget):
        with pytest.raises(ValueError, match=r"budget must be .*'4 GiB' or 'auto', got"):
            WorkingSet(budget)

    @pytest.mark.parametrize(
        ("budget", "nbytes"),
        [
            (4096, 4096),
            (numpy.int32(4096), 4096),
            ("1 MiB", 1 << 20),
            ("64kib", 1 << 16),
            (" 0.5 MB ", 500_000),
            ("4097 b", 4097),
        ],
    )
    def test_budgets(self, budget, nbytes):
        with WorkingSet(budget, 0) as working:
            assert working.budget == nbytes == working.stats().kept

    @pytest.mark.emulator_only("takes most of a device")
    def test_auto_leaves_a_fifth_of_what_is_free(self):
        before = Device(0).memory_info.free
        with WorkingSet("auto", 0) as working:
            assert working.budget == before - before // 5
            assert Device(0).memory_info.free <= before - working.budget
        assert Device(0).memory_info.free == before

    @pytest.mark.parametrize("budget", [1 << 62, 1 << 63, 1 << 70, "9000000 GiB", "9" * 400 + " B"])
    def test_more_than_is_free(self, budget):
        words = r"^WorkingSet needs [\d,]+ bytes of Device\(0\), and"
        with pytest.raises(MemoryError, match=words):
            WorkingSet(budget, 0)

    def test_the_sums_are_told(self):
        free = Device(0).memory_info.free
        with pytest.raises(MemoryError) as caught:
            WorkingSet(1 << 50, 0)
        if EMULATED:
            assert f"{1 << 50:,} bytes of Device(0), and {free:,} are free" in str(caught.value)

    @pytest.mark.parametrize("device", [Host(), "cuda", 1.0])
    def test_device_must_be_one(self, device):
        with pytest.raises((TypeError, ValueError)):
            WorkingSet(SIZE, device)

    def test_device_that_does_not_exist(self):
        with pytest.raises(ValueError, match="99"):
            WorkingSet(SIZE, 99)

    def test_device_is_the_current_one_if_left_out(self, device1, current_device):
        device1.set_current()
        with WorkingSet(SIZE) as working, WorkingSet(SIZE, None) as other:
            assert working.device is other.device is device1
            group = working.add(layer(1))
            Device(0).set_current()
            with group.use() as use:
                assert use.is_resident
                device1.set_current()
                assert read_by_device(use.arrays[0]) == pattern(SIZE, 1)

    def test_attributes(self, working):
        group = working.add(layer(0), name="first")
        assert (working.budget, working.device, working.nbytes) == (4 * SIZE, Device(0), 0)
        assert (group.nbytes, group.name, group.access) == (SIZE, "first", "read")
        assert group.set is working and not group.is_resident and not working.is_closed
        assert len(working) == 1 and [*working] == [group]
        assert repr(working) == f"<WorkingSet groups=1 nbytes=0 budget={4 * SIZE} Device(0)>"
        assert repr(group) == f"<WorkingGroup name='first' access=read nbytes={SIZE}>"
        assert repr(working.add(layer(1), "write")).startswith("<WorkingGroup access=write nbytes=")
        use = group.use()
        assert repr(use) == f"<WorkingUse of {group!r}>" and use.group is group
        assert f" bytes_home=0 kept={size_text(4 * SIZE)} failures=0 " in repr(working.stats())
        use.close()
        assert repr(use).endswith(" closed>")

    @pytest.mark.parametrize(
        ("kind", "bad", "message"),
        [
            ("write", "scratch", "must be None or 'read' or 'write' .* got 'scratch'$"),
            ("write", 1, "got 1$"),
            ("read", "write", "None or 'read' for a group .*access='read', got 'write'$"),
            ("scratch", "read", "None or 'scratch' for a group .*access='scratch', got 'read'$"),
        ],
    )
    def test_access_of_a_use_must_be_one_of_the_group(self, working, kind, bad, message):
        group = working.add(layer(0), kind)
        with pytest.raises(ValueError, match=message):
            group.use(access=bad)
        for good in (None, kind):
            with group.use(access=good):
                pass
        working.remove(group)

    @pytest.mark.parametrize("access", ["scratch", None, "", 1])
    def test_access_of_the_host(self, groups, access):
        with (
            pytest.raises(ValueError, match=r"access must be 'read' or 'write', got"),
            groups[0].use_on_host(access=access),
        ):
            raise AssertionError

    @pytest.mark.parametrize("bad", ["s0", 1.5, []])
    def test_stream_must_be_one(self, working, groups, bad):
        with pytest.raises(TypeError):
            groups[0].use(stream=bad)
        use = groups[0].use()
        with pytest.raises(TypeError):
            use.close(stream=bad)
        use.close()
        working.remove(groups[0])

    def test_too_few_and_too_many(self, working, groups):
        for call in (
            WorkingSet,
            working.add,
            working.remove,
            lambda: groups[0].use(None),
            lambda: groups[0].use(streams=None),
            lambda: groups[0].use_on_host("read"),
        ):
            with pytest.raises(TypeError):
                call()


class TestAdd:
    @staticmethod
    def refuse(working, error, words, *arguments, **options):
        """Expects that error of add(), which leaves the set empty."""
        with pytest.raises(error, match=words) as caught:
            working.add(*arguments, **options)
        assert len(working) == 0 and working.nbytes == 0
        return caught.value

    @pytest.mark.parametrize(
        "dtype",
        ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16"],
    )
    def test_dtypes(self, working, stream, dtype):
        array = numpy.arange(105).reshape(5, 21).astype(dtype)
        group = working.add(array)
        array_before = array.tobytes()
        array.fill(0)  # it is not needed any more
        with group.use(stream=stream) as use:
            (found,) = use.arrays
            assert (found.dtype, found.shape, found.nbytes) == (
                array.dtype.name,
                (5, 21),
                array.nbytes,
            )
            assert read_by_device(found, stream) == array_before
        with group.use_on_host() as (home,):
            assert home.numpy().tobytes() == array_before
            assert home.numpy().dtype == array.dtype and home.numpy().shape == (5, 21)

    def test_a_mapping(self, working, stream):
        given = {"w": layer(1), 2: numpy.full((), 2.5), "": numpy.zeros((2, 0, 3), "i4")}
        group = working.add(given)
        with group.use(stream=stream) as use:
            assert [*use.arrays] == [*given] and use.is_resident
            for name, array in use.arrays.items():
                assert isinstance(array, ManagedBuffer) and array.shape == given[name].shape
                assert read_by_device(array, stream) == given[name].tobytes()

    @pytest.mark.parametrize("kind", [list, tuple, iter])
    def test_a_sequence(self, working, stream, kind):
        given = [layer(1), numpy.arange(7), layer(3, 5 * PAGE - 3)]
        group = working.add(kind(given))
        with group.use(stream=stream) as use:
            assert isinstance(use.arrays, tuple)
            for found, array in zip(use.arrays, given, strict=True):
                assert found.handle % 512 == 0
                assert read_by_device(found, stream) == array.tobytes()

    def test_use_shows_the_same_arrays_again(self, groups):
        with groups[0].use() as use:
            assert use.arrays is use.arrays
        with pytest.raises(RuntimeError, match=r"the use of <WorkingGroup .* is closed"):
            use.arrays  # noqa: B018

    def test_frames_are_plain_memory(self, groups):
        with groups[0].use() as use:
            array = use.arrays[0]
            shown = array.__cuda_array_interface__
            assert shown["data"][0] == array.handle and shown["shape"] == (SIZE,)
            with pytest.raises(BufferError, match="plain device memory"):
                memoryview(array)
            with pytest.raises(ValueError, match="plain device memory"):
                array.numpy()

    def test_a_managed_buffer(self, working, alloc, stream):
        buffer = alloc(SIZE)
        write(buffer, pattern(SIZE, 5))
        buffer.prefetch(Device(0))
        group = working.add([buffer[:PAGE].view("float32", (PAGE // 4,)), buffer[PAGE:]])
        write(buffer, 0)
        with group.use(stream=stream) as use:
            assert use.arrays[0].dtype == "float32"
            assert b"".join(read_by_device(a, stream) for a in use.arrays) == pattern(SIZE, 5)

    def test_a_closed_buffer(self, working, alloc):
        buffer = alloc(SIZE)
        buffer.close()
        self.refuse(working, RuntimeError, "closed", buffer)

    @pytest.mark.parametrize("protocol", ["__cuda_array_interface__", "__dlpack__"])
    def test_memory_of_a_device(self, working, stream, protocol):
        class Array:
            def __init__(self, buffer):
                self.shape, self.dtype = (SIZE // 4,), numpy.dtype("f4")
                if protocol == "__dlpack__":
                    self.__dlpack_device__ = buffer.__dlpack_device__
                else:
                    self.__cuda_array_interface__ = buffer.__cuda_array_interface__
                self.buffer = buffer

            if protocol == "__dlpack__":

                def __dlpack__(self, **options):
                    return self.buffer.__dlpack__(**options)

        with managedmem.DeviceMemoryResource(Device(0)) as resource:
            plain = resource.allocate(SIZE).view("float32")
            write_by_device(plain, pattern(SIZE, 9), stream)
            group = working.add(Array(plain))
            write_by_device(plain, 0, stream)
            plain.close()
        with group.use(stream=stream) as use:
            assert read_by_device(use.arrays[0], stream) == pattern(SIZE, 9)

    def test_frames_of_another_set(self, working, groups, stream):
        with groups[3].use(stream=stream) as use:
            stream.sync()
            group = working.add(use.arrays[0])
        with group.use(stream=stream) as use:
            assert read_by_device(use.arrays[0], stream) == pattern(SIZE, 3)

    def test_an_array_that_cannot_be_written(self, working, stream):
        array = layer(4)
        assert not array.flags.writeable
        with working.add(array, "write").use(stream=stream) as use:
            write_by_device(use.arrays[0], 1, stream)
        assert array.tobytes() == pattern(SIZE, 4)

    @pytest.mark.parametrize("nothing", [[], (), {}, numpy.empty(0), [numpy.empty((3, 0))] * 2])
    def test_no_bytes(self, working, nothing):
        group = working.add(nothing)
        assert group.nbytes == 0 and group.is_resident
        with group.use() as use, group.use_on_host() as at_home:
            assert use.is_resident and len(use.arrays) == len(at_home) < 3
            assert not [array for array in at_home if array.nbytes]
        working.order = [group]
        working.remove(group)
        assert working.stats().mapped == 0

    @pytest.mark.parametrize("bad", [None, 5, "text", b"bytes", object()])
    def test_what_is_no_array(self, working, bad):
        for given in (bad, [bad], {"name": bad}, [layer(0), bad]):
            self.refuse(working, TypeError, "an array with shape and dtype is needed, got", given)

    @pytest.mark.parametrize("dtype", ["O", "S3", "M8[s]", [("a", "i4")], ">f4"])
    def test_a_dtype_that_buffers_lack(self, working, dtype):
        self.refuse(
            working, TypeError, "not a dtype of a buffer", [layer(0), numpy.zeros(3, dtype)]
        )

    @pytest.mark.parametrize("access", ["", "Read", None, 1, "readwrite"])
    def test_access_must_be_known(self, working, access):
        words = r"access must be 'read', 'write' or 'scratch', got"
        self.refuse(working, ValueError, words, layer(0), access)

    def test_name_must_be_text(self, working):
        self.refuse(working, TypeError, "name must be a str or None, got 3", layer(0), name=3)

    @pytest.mark.parametrize(
        "array",
        [
            numpy.ones((4, 5), order="F"),
            numpy.ones((4, 5))[:, 1:],
            numpy.ones(9)[::-1],
            numpy.broadcast_to(numpy.ones(1), 4),
        ],
        ids=["F", "columns", "reversed", "broadcast"],
    )
    def test_arrays_that_are_not_in_c_order(self, working, array):
        words, given = "not C-contiguous; make a copy that is", {"first": layer(0), "second": array}
        error = self.refuse(working, ValueError, words, given)
        assert error.__notes__ == ["This is about arrays['second']."]

    def test_more_axes_than_buffers_have(self, working):
        self.refuse(working, ValueError, "at most 8 axes", numpy.ones((1,) * 9))

    def test_arrays_as_several_arguments(self, working):
        words = "got ndarray; pass several arrays as one list"
        self.refuse(working, ValueError, words, layer(0), layer(1))

    def test_values_that_are_not_in_memory(self, working):
        torch = pytest.importorskip("torch", reason="needs torch")
        lazy = torch.tensor([1 + 2j, 3 - 4j]).conj()
        for tensor in (lazy, lazy.imag):
            with pytest.raises(ValueError, match="is a lazy conjugate or negative"):
                working.add(tensor)
        with working.add(lazy.resolve_conj()).use_on_host() as arrays:
            assert arrays[0].numpy().tolist() == [1 - 2j, 3 + 4j]

    def test_elements_of_the_other_byte_order(self, working):
        class Swapped:
            shape, dtype = (3,), "float32"
            __array_interface__ = numpy.zeros(3, ">f4").__array_interface__

        self.refuse(working, (TypeError, ValueError), None, Swapped())

    @pytest.mark.parametrize("shape", [(4,), (4 * PAGE,)], ids=["smaller", "larger"])
    def test_shape_of_other_memory(self, working, shape):
        """What the protocol shows is not what shape says."""

        class Liar:
            __array_interface__ = numpy.ones(PAGE, "u1").__array_interface__

        Liar.shape, Liar.dtype = shape, "uint8"
        self.refuse(working, ValueError, None, [Liar(), layer(0)])

    @pytest.mark.emulator_only("counts the driver's objects")
    def test_nothing_is_left_after_a_refusal(self, working):
        before = emulator.live()
        for bad in ([layer(0), 3], [layer(0), numpy.ones((4, 5)).T], {"a": layer(0), "b": None}):
            with pytest.raises((TypeError, ValueError)):
                working.add(bad)
        emulator.fail("cuMemHostRegister", 1, 2)
        with pytest.raises(
            managedmem.CUDAError, match="cannot be page-locked: the limit of a container"
        ):
            working.add(layer(0))
        emulator.fail("cuEventCreate", 2, 719)
        with pytest.raises(managedmem.CUDAError):
            working.add(layer(0))
        assert emulator.live() == before and len(working) == 0

    def test_more_than_the_host_has(self, working, monkeypatch):
        monkeypatch.setattr("managedmem._working_set.host_available", lambda: SIZE - 1)
        with pytest.raises(
            MemoryError, match=rf"needs {SIZE:,} bytes .*, and {SIZE - 1:,} are ava"
        ):
            working.add(layer(0))
        monkeypatch.setattr("managedmem._working_set.host_available", lambda: None)
        assert working.add(layer(0)).nbytes == SIZE

    def test_groups_are_made_by_sets_only(self):
        for kind in (managedmem.typing.WorkingGroup, managedmem.typing.WorkingUse):
            with pytest.raises(TypeError):
                kind()


class TestOrder:
    def test_is_none_until_it_is_given(self, working, groups):
        assert working.order is None
        working.order = iter(groups[::-1])
        assert working.order == tuple(groups[::-1])
        working.order = []
        assert working.order is None
        working.order = groups
        working.order = None
        assert working.order is None

    def test_takes_groups_of_the_set(self, working, groups):
        with WorkingSet(SIZE, 0) as other:
            theirs = other.add(layer(0))
            with pytest.raises(ValueError, match="of another set"):
                working.order = [groups[0], theirs]
        with pytest.raises(TypeError, match="a WorkingGroup is needed, got 1"):
            working.order = [1]
        with pytest.raises(TypeError):
            working.order = groups[0]
        with pytest.raises(AttributeError):
            del working.order
        assert working.order is None

    def test_given_order_has_no_misses(self, working, groups, stream):
        working.order = odd = groups[1::2] + groups[::2]
        use_all(odd * 3, stream)
        stats = working.stats()
        assert (stats.acquired, stats.hits, stats.mapped) == (48, 47, 0)
        assert stats.loads - stats.ahead == 1

    def test_learned_order_has_no_misses_after_the_first_round(self, working, groups, stream):
        mixed = random.Random(3).sample(groups, 16)
        use_all(mixed * 2, stream)  # the first group follows the last one for the first time
        before = working.stats()
        use_all(mixed * 4, stream)
        after = working.stats()
        assert after.hits - before.hits == after.acquired - before.acquired == 64
        assert after.loads - before.loads == after.drops - before.drops <= 64 + 4

    def test_back_and_forth(self, working, groups, stream):
        use_all((groups + groups[::-1]) * 2, stream)
        before = working.stats()
        use_all((groups + groups[::-1]) * 3, stream)
        after = working.stats()
        assert after.hits - before.hits == 96
        assert after.loads - before.loads <= 3 * 2 * 12 + 4  # those at the turns stay

    def test_groups_that_stay(self, working, groups, stream):
        use_all(groups[:4] * 5, stream)
        before = working.stats()
        use_all(groups[:4] * 5, stream)
        after = working.stats()
        assert (after.loads, after.drops) == (before.loads, before.drops)
        assert after.hits - before.hits == 20 and working.nbytes == 4 * SIZE

    def test_an_order_that_is_wrong_is_slower_only(self, working, groups, stream):
        working.order = groups
        chosen = random.Random(4)
        for _ in range(100):
            number = chosen.randrange(16)
            with groups[number].use(stream=stream) as use:
                assert read_by_device(use.arrays[0], stream) == pattern(SIZE, number)


class TestUses:
    def test_use_acquires_at_the_call(self, working, groups, stream):
        use = groups[0].use(stream=stream)
        assert working.stats().acquired == 1 and groups[0].is_resident
        for _ in range(2):
            with use as given:
                assert given is use
        use.close()
        assert working.stats().acquired == 1

    def test_arrays_are_at_home_without_room(self, working, groups, stream):
        uses = [group.use(stream=stream) for group in groups[:6]]
        assert [use.is_resident for use in uses] == [True] * 4 + [False] * 2
        assert working.nbytes == 4 * SIZE and working.stats().mapped == 2
        for number, use in enumerate(uses):
            assert read_by_device(use.arrays[0], stream) == pattern(SIZE, number)
            shown = use.arrays[0].__cuda_array_interface__
            assert shown["data"] == (use.arrays[0].handle, False)
        for use in uses:
            use.close()
        with groups[5].use() as use:
            assert use.is_resident

    def test_a_group_larger_than_the_budget(self, working, stream):
        with pytest.warns(UserWarning, match="exceeds the budget"):
            group = working.add({n: layer(n) for n in range(5)}, "write")
        for turn in range(3):
            with group.use(stream=stream) as use:
                assert not use.is_resident and not group.is_resident
                for number, array in use.arrays.items():
                    write_by_device(array, turn * number, stream)
        with group.use(access="read") as use:
            assert read_by_device(use.arrays[4]) == bytes([8]) * SIZE
        stats = working.stats()
        assert (stats.acquired, stats.hits, stats.mapped, stats.loads) == (4, 0, 4, 0)
        assert working.nbytes == 0 and stats.failures == 0

    def test_the_first_group_larger_than_the_budget_is_told(self, working):
        words = f"a group of {5 * SIZE:,} bytes exceeds the budget of {4 * SIZE:,}: .* in parts"
        working.add(layer(0, 4 * SIZE))
        for _ in range(2):
            with pytest.raises(UserWarning, match=words):  # warnings are errors in tests
                working.add(layer(0, 5 * SIZE))
            assert len(working) == 1
        with pytest.warns(UserWarning, match=words) as told:
            working.add(layer(0, 5 * SIZE))
            working.add(layer(0, 6 * SIZE))
        assert (len(told), len(working), told[0].filename) == (1, 3, __file__)

    def test_is_resident(self, working, groups, stream):
        assert not groups[0].is_resident
        with groups[0].use(stream=stream):
            assert groups[0].is_resident
        use_all(groups[1:9], stream)
        assert sum(group.is_resident for group in groups) == 4
        assert working.nbytes == 4 * SIZE

    def test_uses_nest(self, working, groups, stream):
        with groups[0].use(stream=stream) as first, groups[0].use(stream=stream) as second:
            assert first.arrays[0].handle == second.arrays[0].handle
            with pytest.raises(RuntimeError, match="in use"):
                working.remove(groups[0])
            second.close()
            use_all(groups[1:9], stream)
            assert groups[0].is_resident
            assert read_by_device(first.arrays[0], stream) == pattern(SIZE, 0)

    def test_an_exception_ends_the_use(self, working, groups):
        with pytest.raises(KeyError), groups[0].use():
            raise KeyError
        working.remove(groups[0])

    @pytest.mark.parametrize("in_a_cycle", [False, True])
    @pytest.mark.parametrize("shown", [False, True])
    def test_a_use_that_is_lost(self, working, groups, in_a_cycle, shown):
        use = groups[0].use()
        if shown:
            assert len(use.arrays) == 1
        if in_a_cycle:
            use.itself = use
        del use
        gc.collect()
        working.remove(groups[0])

    @pytest.mark.parametrize("arrays_first", [False, True])
    def test_a_use_that_is_lost_with_its_arrays(self, working, groups, arrays_first):
        """The collector may end them before the use."""
        holder = [groups[0].use()]
        array = holder[0].arrays[0]
        for _ in range(9):
            holder = [holder]
        cycle = [array, holder]
        del array, holder
        if arrays_first:
            gc.collect()  # puts objects in the order of their distance from a reference
        cycle.append(cycle)
        del cycle
        gc.collect()
        working.remove(groups[0])

    def test_a_use_that_is_lost_after_its_stream(self, working, groups):
        stream = Stream()
        with pytest.raises(RuntimeError, match="Stream is closed"), groups[0].use(stream=stream):
            stream.close()
        gc.collect()
        working.remove(groups[0])

    def test_a_stream_that_is_closed_during_a_use(self, working, groups):
        stream = Stream()
        use = groups[0].use(stream=stream)
        stream.close()
        with pytest.raises(RuntimeError, match="Stream is closed"):
            use.close()
        assert use.arrays[0].nbytes == SIZE
        use.close(stream=Stream.from_handle(0))
        working.remove(groups[0])

    def test_a_closed_stream(self, working, groups):
        stream = Stream()
        stream.close()
        with pytest.raises(RuntimeError, match="Stream is closed"):
            groups[0].use(stream=stream)
        working.remove(groups[0])

    def test_close_with_the_stream_that_ends_the_use(self, working, stream):
        group = working.add(layer(0), "write")
        with Stream() as other:
            use = group.use(stream=stream)
            stream.sync()
            write_by_device(use.arrays[0], 3, other)
            use.close(stream=other)
        with group.use_on_host() as (home,):
            assert bytes(home) == bytes([3]) * SIZE

    def test_stream_of_another_device(self, groups, device1, current_device):
        device1.set_current()
        with Stream() as stream, groups[0].use(stream=stream) as use:
            assert read_by_device(use.arrays[0], stream) == pattern(SIZE, 0)
