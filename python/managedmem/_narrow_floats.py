"""bfloat16 and the 8-bit floats: their types and their bits in NumPy, which needs ml_dtypes."""

import math
from importlib import import_module
from typing import Any

from managedmem._managedmem import DType, ManagedBuffer


def is_narrow(dtype: str) -> bool:
    """True for the element types that NumPy lacks."""
    return dtype.startswith(("bfloat", "float8"))


def numpy_type(name: str) -> Any:
    """The type of ml_dtypes for an element type that NumPy lacks."""
    try:
        return getattr(import_module("ml_dtypes"), name)
    except ModuleNotFoundError as error:
        if error.name != "ml_dtypes":
            raise
        bits = f"uint{8 * DType(name).itemsize}"
        raise ImportError(
            f"NumPy has {name} from ml_dtypes, which is not installed: pip install ml_dtypes, or "
            f'use the bits, as in buf.view("{bits}").numpy()',
            name="ml_dtypes",
        ) from None


def array_of_bits(buffer: ManagedBuffer, bits: str, kind: Any, dtype: Any, copy: Any) -> Any:
    """The array of a buffer whose type NumPy lacks: read as `bits`, and viewed as `kind`."""
    numpy = import_module("numpy")
    plain = numpy.array(memoryview(buffer.view(bits, buffer.shape)), copy=None)
    return numpy.array(plain.view(kind), dtype=dtype, copy=copy)


def pack(value: Any, dtype: DType) -> bytes:
    """The bytes of the nearest element. OverflowError if a finite value has none."""
    kind = numpy_type(dtype)
    numpy = import_module("numpy")
    number = float(value)
    with numpy.errstate(all="ignore"):
        element = numpy.array(number, kind)
    if math.isfinite(number) and not math.isfinite(float(element)):
        raise OverflowError(f"{value!r} does not fit {dtype}")
    packed: bytes = element.tobytes()
    return packed
