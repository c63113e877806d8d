"""Stand-ins for the objects of other libraries."""

import types


class CudaArray:
    """An array like those of torch, CuPy and numba: `__cuda_array_interface__` and an owner."""

    def __init__(
        self,
        buffer,
        shape=None,
        strides=None,
        typestr="|u1",
        offset=0,
        pointer=None,
        readonly=False,
        members=(),
    ):
        self.buffer = buffer
        self.__cuda_array_interface__ = {
            "shape": (buffer.size,) if shape is None else shape,
            "strides": strides,
            "typestr": typestr,
            "data": (buffer.handle + offset if pointer is None else pointer, readonly),
            "version": 3,
            **dict(members),
        }


class ProtocolStream:
    """A stream of another library, with only `__cuda_stream__`."""

    def __init__(self, handle, version=0):
        self.answer = (version, handle)

    def __cuda_stream__(self):
        return self.answer


def foreign(module, name, **attributes):
    """An object whose class claims to come from that module of another library."""
    members = {"__module__": module, "__hash__": object.__hash__}
    return type(name, (types.SimpleNamespace,), members)(**attributes)


def torch_device(kind, index=None):
    return foreign("torch", "device", type=kind, index=index)


def torch_like(buffer, **members):
    """An object with the attributes that the library reads from a tensor, and no others."""
    given = {
        "data_ptr": lambda: buffer.handle,
        "shape": (buffer.size,),
        "stride": lambda: (1,),
        "element_size": lambda: 1,
    }
    return foreign("torch", "Tensor", **(given | members))


def cupy_device(ordinal):
    return foreign("cupy.cuda.device", "Device", id=ordinal)


def numba_device(ordinal):
    return foreign("numba.cuda.cudadrv.driver", "Device", id=ordinal)


def jax_device(platform, local_hardware_id, index=7):
    """JAX counts the devices of all its processes; the driver's ordinal is another number."""
    return foreign(
        "jaxlib._jax", "Device", platform=platform, local_hardware_id=local_hardware_id, id=index
    )


def numpy_bool(value, name="bool"):
    """A NumPy bool: its class is called bool_ before NumPy 2."""
    return type(name, (), {"__module__": "numpy", "__bool__": lambda self: value})()


def bindings_object(name, number):
    """A CUdevice, CUstream or another wrapper of a C value in cuda.bindings."""
    cls = type(name, (), {"__module__": "cuda.bindings.driver", "__int__": lambda self: number})
    return cls()
