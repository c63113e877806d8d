"""Uses of a buffer that need open managed memory."""

import managedmem
from managedmem import Device, Host

USES = {
    "read_mostly": lambda b: b.read_mostly,
    "read_mostly =": lambda b: setattr(b, "read_mostly", True),
    "preferred_location": lambda b: b.preferred_location,
    "preferred_location =": lambda b: setattr(b, "preferred_location", Host()),
    "accessed_by members": lambda b: set(b.accessed_by),
    "accessed_by =": lambda b: setattr(b, "accessed_by", [Host()]),
    "last_prefetch_location": lambda b: b.last_prefetch_location,
    "prefetch": lambda b: b.prefetch(Device(0)),
    "discard": lambda b: b.discard(),
    "discard_prefetch": lambda b: b.discard_prefetch(Host()),
    "free advise": lambda b: managedmem.advise(b, "set_read_mostly"),
    "free prefetch": lambda b: managedmem.prefetch([b, b], Host()),
    "free discard": managedmem.discard,
    "free discard_prefetch": lambda b: managedmem.discard_prefetch([b], Host()),
}
