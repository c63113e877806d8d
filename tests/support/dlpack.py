"""DLPack, as a consumer sees it."""

import ctypes


class DLDevice(ctypes.Structure):
    _fields_ = [("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)]


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", DLDevice),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class DLManagedTensor(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
DLManagedTensor._fields_ = [
    ("tensor", DLTensor),
    ("context", ctypes.c_void_p),
    ("deleter", _Deleter),
]


class DLManagedTensorVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", _Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    ]


_capsule = ctypes.pythonapi
_capsule.PyCapsule_GetPointer.restype = ctypes.c_void_p
_capsule.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_capsule.PyCapsule_GetName.restype = ctypes.c_char_p
_capsule.PyCapsule_GetName.argtypes = [ctypes.py_object]
_capsule.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_char_p]
_KINDS = {
    b"dltensor": (DLManagedTensor, b"used_dltensor"),
    b"dltensor_versioned": (DLManagedTensorVersioned, b"used_dltensor_versioned"),
}


def capsule_name(capsule):
    return _capsule.PyCapsule_GetName(capsule).decode()


def capsule_struct(capsule):
    """The managed tensor inside a fresh capsule, still owned by it."""
    name = _capsule.PyCapsule_GetName(capsule)
    return _KINDS[name][0].from_address(_capsule.PyCapsule_GetPointer(capsule, name))


def consume(capsule):
    """Take the tensor out of a capsule as a consumer does; the caller runs its deleter."""
    managed = capsule_struct(capsule)
    name = _capsule.PyCapsule_GetName(capsule)
    # The capsule keeps the pointer to its name; the table keeps the name alive.
    _capsule.PyCapsule_SetName(capsule, _KINDS[name][1])
    return managed


def run_deleter(managed):
    managed.deleter(ctypes.addressof(managed))
