"""`buf.dtype`: a name that equals the dtype objects of other libraries."""

import collections
import copy
import pickle
from types import SimpleNamespace

import pytest

import managedmem
from identifiers import label
from managedmem.typing import DType

NAMES = [
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
]
NARROW = ["bfloat16", "float8_e4m3fn", "float8_e5m2"]
every_name = pytest.mark.parametrize("name", NAMES)
every_name_of_all = pytest.mark.parametrize("name", [*NAMES, *NARROW])


def of(name):
    with managedmem.empty(1, name) as buffer:
        return buffer.dtype


def equal(one, other):
    """True if two objects are equal by == and !=, in both orders."""
    answers = {one == other, other == one}
    assert answers == {not unequal for unequal in (one != other, other != one)}
    (answer,) = answers
    return answer


@pytest.mark.parametrize(
    ("code", "name"), [("<V2", "bfloat16"), ("<f1", "float8_e5m2"), ("|V1", "float8_e4m3fn")]
)
def test_types_as_ml_dtypes_makes_them_are_read_by_name(code, name):
    with managedmem.empty(3, SimpleNamespace(str=code, name=name)) as buffer:
        assert buffer.dtype == name


class TestComparing:
    @every_name
    def test_with_names(self, name):
        assert [n for n in NAMES if equal(of(name), n)] == [name]
        assert [n for n in NAMES if equal(of(name), of(n))] == [name]

    @every_name
    def test_with_numpys(self, name):
        numpy = pytest.importorskip("numpy", reason="needs NumPy")
        for make in (numpy.dtype, lambda n: numpy.dtype(n).type, lambda n: numpy.dtype(n).str):
            assert [n for n in NAMES if equal(of(name), make(n))] == [name]
        assert numpy.dtype(of(name)) == numpy.dtype(name)
        assert numpy.empty(1, of(name)).dtype == of(name)

    @every_name
    def test_with_torchs(self, name):
        torch = pytest.importorskip("torch", reason="needs torch")
        assert [n for n in NAMES if equal(of(name), getattr(torch, n))] == [name]
        assert getattr(torch, of(name)) == of(name)

    @pytest.mark.parametrize(
        ("other", "name"),
        [
            (float, "float64"),
            (int, "int64"),
            (bool, "bool"),
            (complex, "complex128"),
            ("f4", "float32"),
            ("<f4", "float32"),
            ("torch.float16", "float16"),
        ],
        ids=label,
    )
    def test_with_other_spellings(self, other, name):
        assert [n for n in NAMES if equal(of(n), other)] == [name]

    @pytest.mark.parametrize(
        "other",
        [
            *(None, 4, 1.0, b"float32", object(), ("float32",), ["float32"], {"float32"}),
            *("float31", "", "torch.", "\udc80", "f4\0", ">f4"),
            *(str, object, DType),
        ],
        ids=label,
    )
    def test_with_other_objects(self, other):
        assert not any(equal(of(name), other) for name in NAMES)

    @pytest.mark.parametrize("foreign", [">f4", "f4,f4", "O", "U7", "M8[s]", "S4"])
    def test_with_numpy_dtypes_that_no_buffer_has(self, foreign):
        numpy = pytest.importorskip("numpy", reason="needs NumPy")
        assert not any(equal(of(name), numpy.dtype(foreign)) for name in NAMES)

    def test_does_not_ask_an_array_for_its_text(self):
        class Loud:
            def __str__(self):
                raise AssertionError

        assert of("int8") != Loud()

    def test_an_exception_of_the_other_is_passed_on(self):
        class Meta(type):
            @property
            def __name__(cls):
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            of("int8") == Meta("float32", (), {})  # noqa: B015


class TestIsAName:
    @every_name_of_all
    def test_is_a_str(self, name):
        dtype = of(name)
        assert isinstance(dtype, str)
        assert type(dtype) is DType
        assert (str(dtype), repr(dtype), f"{dtype}", len(dtype)) == (
            name,
            repr(name),
            name,
            len(name),
        )
        assert hash(dtype) == hash(name)
        assert {name: 1}[dtype] == {dtype: 1}[name] == 1
        assert dtype + "!" == name + "!"
        assert sorted([dtype, "zzz", "aaa"]) == ["aaa", name, "zzz"]
        assert collections.Counter([dtype, name, dtype]) == {name: 3}

    @every_name_of_all
    def test_there_is_one_object_for_each(self, name):
        dtype = of(name)
        for again in (of(name), DType(name), DType(dtype), DType(dtype=name)):
            assert again is dtype
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            assert pickle.loads(pickle.dumps(dtype, protocol)) is dtype
        assert copy.copy(dtype) is copy.deepcopy(dtype) is dtype

    def test_accepts_the_same_dtypes_as_empty(self):
        assert DType(float) is of("float64")
        for bad in ("float31", 4, str, ">f4"):
            with pytest.raises(TypeError, match="not a dtype"):
                DType(bad)
        with pytest.raises(TypeError):
            DType()

    def test_is_final(self):
        with pytest.raises(TypeError):
            type("Mine", (DType,), {})

    def test_makes_buffers(self):
        with managedmem.empty(8, of("int16")) as buffer:
            assert buffer.view(of("int32")).dtype is of("int32")
