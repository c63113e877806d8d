"""The bytes of buffers: patterns, writing and reading them."""

from constants import PAGE


def contents(buffer):
    """The bytes of a buffer, after everything queued has run."""
    import managedmem

    managedmem.Device().sync()
    return bytes(buffer)


def write(buffer, data):
    """Write bytes from the host and give them back; an int is repeated over the whole buffer."""
    with memoryview(buffer) as view, view.cast("B") as flat:
        flat[:] = bytes([data]) * len(flat) if isinstance(data, int) else data
    return data


def pattern(size, start=1):
    """Bytes that differ from page to page and from their neighbours, never 0."""
    cycle = bytes(range(1, 256)) * (PAGE // 255 + 2)
    pages = (cycle[(page * (PAGE + 1) + start) % 255 :][:PAGE] for page in range(-(-size // PAGE)))
    return b"".join(pages)[:size]
