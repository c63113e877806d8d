"""Stand-ins for torch's tensors and cuda.core's views that show wrong or unusual things."""

import types

import pytest

import managedmem
from foreign_objects import foreign
from managedmem import Host

HUGE = 1 << 62


class Values:
    """What a tensor answers, of which a test changes one thing; an exception is raised."""

    def __init__(self, buffer, **changed):
        self.answers = {
            "data_ptr": buffer.handle,
            "stride": (1,),
            "element_size": 4,
            "is_conj": False,
            "is_neg": False,
            **changed,
        }
        self.shape = changed.get("shape", (buffer.size // 4,))
        self.layout, self.device = "torch.strided", "cuda:0"

    def __getattr__(self, name):
        answer = self.__dict__.get("answers", {}).get(name, AttributeError(name))
        if isinstance(answer, AttributeError):
            raise answer

        def call():
            if isinstance(answer, BaseException):
                raise answer
            return answer

        return call


def tensor(buffer, **changed):
    return type("Tensor", (Values,), {"__module__": "torch"})(buffer, **changed)


class TestTensors:
    def test_are_targets_and_sources(self, buf):
        managedmem.prefetch(tensor(buf), Host())
        assert buf.last_prefetch_location is Host()
        managedmem.empty(buf.size).copy_from(tensor(buf))
        managedmem.prefetch(tensor(buf, shape=(0,)), Host())
        without = {"is_conj": AttributeError(), "is_neg": AttributeError()}
        managedmem.empty(buf.size).copy_from(tensor(buf, **without))

    @pytest.mark.parametrize("lazy", ["is_conj", "is_neg"])
    def test_values_that_are_not_in_memory(self, buf, lazy):
        managedmem.prefetch(tensor(buf, **{lazy: True}), Host())
        with pytest.raises(ValueError, match="lazy conjugate or negative"):
            managedmem.empty(buf.size).copy_from(tensor(buf, **{lazy: True}))
        with pytest.raises(MemoryError):
            managedmem.empty(buf.size).copy_from(tensor(buf, **{lazy: MemoryError()}))

    @pytest.mark.parametrize(
        ("changed", "error", "message"),
        [
            ({"data_ptr": RuntimeError("sparse")}, TypeError, "no strided memory of its own"),
            ({"stride": RuntimeError("sparse")}, TypeError, "no strided memory of its own"),
            ({"element_size": "four"}, TypeError, "no strided memory of its own"),
            ({"data_ptr": MemoryError()}, MemoryError, None),
            ({"stride": (1, 1)}, TypeError, "different length"),
            ({"stride": (HUGE,)}, ValueError, None),
            ({"data_ptr": 0}, ValueError, "holds no memory"),
            ({"data_ptr": -1}, (TypeError, ValueError, OverflowError), None),
            ({"shape": "text"}, TypeError, None),
        ],
    )
    def test_wrong_answers(self, buf, changed, error, message):
        with pytest.raises(error, match=message):
            managedmem.prefetch(tensor(buf, **changed), Host())
        assert buf.last_prefetch_location is None


def view(buffer, **changed):
    """As a StridedMemoryView of cuda.core; a value of None takes the attribute away."""
    members = {
        "ptr": buffer.handle,
        "shape": (buffer.size // 4,),
        "strides": (1,),
        "dtype": types.SimpleNamespace(itemsize=4, isnative=True),
        "readonly": False,
        "device_id": 0,
        "is_device_accessible": True,
        "exporting_obj": buffer,
    }
    members = {name: value for name, value in (members | changed).items() if value is not None}
    return foreign("cuda.core._memoryview", "StridedMemoryView", **members)


class TestViews:
    def test_are_targets_and_sources(self, buf):
        managedmem.prefetch(view(buf), Host())
        assert buf.last_prefetch_location is Host()
        managedmem.empty(buf.size).copy_from(view(buf))
        layout = types.SimpleNamespace(itemsize=4)
        managedmem.prefetch(view(buf, layout=layout, dtype=None), Host())

    def test_elements_of_the_other_byte_order(self, buf):
        swapped = view(buf, dtype=types.SimpleNamespace(itemsize=4, isnative=False))
        with pytest.raises(ValueError, match="byte order"):
            managedmem.empty((buf.size // 4,), "float32").copy_from(swapped)

    @pytest.mark.parametrize(
        "changed",
        [
            {"ptr": 0},
            {"ptr": "text"},
            {"ptr": None},
            {"shape": 7},
            {"shape": None},
            {"strides": (1, 1)},
            {"strides": ("text",)},
            {"strides": (HUGE,)},
            {"dtype": None},
            {"dtype": types.SimpleNamespace()},
            {"readonly": None},
        ],
        ids=repr,
    )
    def test_wrong_members(self, buf, changed):
        with pytest.raises((TypeError, ValueError, AttributeError)):
            managedmem.prefetch(view(buf, **changed), Host())
        assert buf.last_prefetch_location is None


class TestBuffers:
    @pytest.mark.parametrize(
        "members", [{}, {"handle": 1}, {"size": 1}, {"handle": "text", "size": 8}], ids=repr
    )
    def test_wrong_members(self, members):
        buffer = foreign("cuda.core._memory", "Buffer", **members)
        with pytest.raises((TypeError, ValueError, AttributeError)):
            managedmem.prefetch(buffer, Host())
