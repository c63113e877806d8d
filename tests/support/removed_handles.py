"""The body of a fixture: modules that are offloaded for the time of a test."""

from tensors import mt


def offload_for_a_test():
    """`offloaded(model, ...)`: a handle that is removed after the test."""
    handles = []

    def make(model, device="cuda:0", **options):
        handles.append(mt.offload(model, device, **options))
        return handles[-1]

    yield make
    for handle in handles:
        handle.remove()
