"""A buffer in a notebook: `_repr_html_` shows its name, its pages, its advice, and never fails."""

import ctypes
import inspect
import time
import xml.dom.minidom

import pytest

import managedmem
from constants import MIB, PAGE
from driver import CAPTURE_GLOBAL, capturing
from managedmem import Device, DeviceMemoryResource, Host, ManagedBuffer, _buffer_html
from managedmem import _colours as colours
from programs import run_python
from residencies import store

pytestmark = pytest.mark.usefixtures("eager")


def page_of(buffer):
    """The HTML, as a document; it must be well-formed."""
    return xml.dom.minidom.parseString(buffer._repr_html_())


def text_of(node):
    return "".join(
        child.data if child.nodeType == child.TEXT_NODE else text_of(child)
        for child in node.childNodes
    )


def strips(buffer):
    """The strips: for each, the first column, the columns and the colour of its bars."""
    return [
        [
            (int(bar.getAttribute("x")), int(bar.getAttribute("width")), bar.getAttribute("fill"))
            for bar in strip.getElementsByTagName("rect")
        ]
        for strip in page_of(buffer).getElementsByTagName("svg")
    ]


def test_shows_places(alloc):
    buffer = alloc(64 * MIB)
    store(buffer)
    buffer[: 16 * MIB].prefetch(Device(0))
    Device(0).sync()
    assert strips(buffer) == [[(0, 64, colours.UNKNOWN), (64, 192, colours.HOST)]]
    text = text_of(page_of(buffer))
    assert text.startswith(f"uint8[{64 * MIB}], 64.0M at {buffer.handle:#x}")
    assert str(buffer.residency()) in text
    assert text.endswith("advice: none")


def test_shows_advice(alloc):
    buffer = alloc(16 * MIB)
    buffer[: 4 * MIB].read_mostly = True
    buffer[8 * MIB :].preferred_location = Host()
    buffer[12 * MIB :].accessed_by.add(Device(0))
    purple, sky, yellow = _buffer_html.SHADES[:3]
    assert strips(buffer)[1] == [
        (0, 64, yellow),
        (64, 64, colours.UNKNOWN),
        (128, 64, purple),
        (192, 64, sky),
    ]
    text = text_of(page_of(buffer))
    assert "preferred_location Host(), accessed_by Device(0)" in text
    assert text_of(page_of(buffer[: 4 * MIB])).endswith("advice: read_mostly")


def test_many_kinds_of_advice_share_a_colour(alloc):
    buffer = alloc(16 * MIB)
    for part in range(7):
        piece = buffer.range(part * 2 * MIB, 2 * MIB)
        piece.read_mostly = bool(part & 1)
        piece.preferred_location = (None, Host(), Device(0))[part % 3]
        if part > 3:
            piece.accessed_by.add(Device(0))
    assert colours.GREY in {shade for _, _, shade in strips(buffer)[1]}
    assert "other" in text_of(page_of(buffer))


def test_large_memory_is_read_in_parts(alloc, monkeypatch):
    monkeypatch.setattr(_buffer_html, "PAGEWISE", 16 * MIB)
    buffer = alloc(64 * MIB)
    buffer[32 * MIB :].read_mostly = True
    runs = list(_buffer_html.runs_of(buffer))
    assert [run[:2] for run in runs] == [(2 * MIB * i, 2 * MIB) for i in range(32)]
    assert [run[2] for run in runs] == ["none"] * 16 + ["read_mostly"] * 16
    assert len(strips(buffer)) == 2


def test_places_of_huge_memory_are_not_read(alloc, monkeypatch):
    monkeypatch.setattr(_buffer_html, "MOST", MIB)
    buffer = alloc(2 * MIB)
    assert "residency() shows the places of more than 1.0M" in text_of(page_of(buffer))


@pytest.mark.parametrize(
    "name", ["<script>alert('x')</script>", "a & b", '"&lt;"', "]]>", "\u00e9\U0001f600", "\x1b[1m"]
)
def test_names_are_escaped(alloc, name):
    buffer = alloc(PAGE)
    buffer.name = name
    page = page_of(buffer)
    shown = name if name.isprintable() else "\\x1b[1m"
    assert text_of(page.getElementsByTagName("b")[0]) == shown
    assert not page.getElementsByTagName("script")


def test_long_names_are_cut(alloc):
    buffer = alloc(PAGE)
    buffer.name = "x" * 200
    assert len(text_of(page_of(buffer).getElementsByTagName("b")[0])) == 40


def test_stays_small(alloc):
    buffer = alloc(16 * MIB)
    for page in range(0, 16 * MIB // PAGE, 3):
        buffer.range(page * PAGE, PAGE).preferred_location = (Host(), Device(0))[page % 2]
    buffer.name = "&" * 200
    assert len(buffer._repr_html_()) < 40_000


def test_closed_and_empty():
    buffer = managedmem.empty((2, 3), "float32", name="w")
    buffer.close()
    assert text_of(page_of(buffer)) == "w float32[2,3], closed"
    with managedmem.empty(0) as nothing:
        assert text_of(page_of(nothing)) == "uint8[0], 0 at 0x0"


def test_views(alloc):
    buffer = alloc(2 * PAGE)
    text = text_of(page_of(buffer.view("int64", (2, PAGE // 8))))
    assert text.startswith(f"int64[2,{PAGE // 8}], {2 * PAGE // 1024}.0K at ")
    assert "16B at" in text_of(page_of(buffer.range(8, 16)))


def test_memory_that_is_not_managed_says_so():
    with DeviceMemoryResource(Device(0)) as resource:
        buffer = resource.allocate(PAGE)
        assert "is not in a managed-memory allocation" in text_of(page_of(buffer))
        buffer.close()


@pytest.mark.emulator_only
def test_system_memory_says_so():
    memory = (ctypes.c_char * PAGE)()
    system = ManagedBuffer.from_handle(ctypes.addressof(memory), PAGE)
    assert "system memory" in text_of(page_of(system))
    system.close()


@pytest.mark.emulator_only
@pytest.mark.parametrize("pagewise", [0, 64 * MIB])
def test_no_failing_call_raises(alloc, monkeypatch, pagewise):
    monkeypatch.setattr(_buffer_html, "PAGEWISE", pagewise)
    buffer = alloc(2 * MIB)
    buffer.name = "w"
    buffer[:PAGE].read_mostly = True
    for nth in range(1, 20):
        managedmem.emulator.fail("*", nth)
        assert text_of(page_of(buffer)).startswith("w uint8[")
        managedmem.emulator.clear_failures()


@pytest.mark.emulator_only
def test_errors_of_the_driver_are_shown(alloc):
    buffer = alloc(PAGE)
    managedmem.emulator.fail("cuMemRangeGetAttributes", code=999)
    assert "CUDA_ERROR_UNKNOWN" in text_of(page_of(buffer))


def test_what_cannot_even_be_named_has_no_html(alloc, monkeypatch):
    monkeypatch.setattr(_buffer_html, "heading", lambda buffer: 1 / 0)
    assert alloc(PAGE)._repr_html_() is None


def test_touches_and_moves_nothing(alloc):
    buffer = alloc(4 * MIB)
    store(buffer)
    buffer[: 2 * MIB].prefetch(Device(0))
    Device(0).sync()
    before = buffer.residency().runs
    with managedmem.trace() as trace:
        buffer._repr_html_()
    assert trace.total.moved == trace.total.host_faults == 0
    assert buffer.residency().runs == before


def test_leaves_a_capture_alone(alloc, stream):
    buffer = alloc(4 * MIB)
    with capturing(stream, CAPTURE_GLOBAL) as running:
        assert "not on the host" in buffer._repr_html_()
    assert running.result == 0


@pytest.mark.emulator_only
def test_is_quick(alloc):
    buffer = alloc(64 * MIB)
    buffer._repr_html_()
    begin = time.process_time()
    buffer._repr_html_()
    assert time.process_time() - begin < 1


def test_is_a_method_with_a_docstring():
    assert list(inspect.signature(ManagedBuffer._repr_html_).parameters) == ["self"]
    assert "no page is touched" in ManagedBuffer._repr_html_.__doc__
    assert ManagedBuffer._repr_html_.__name__ not in vars(managedmem)


@pytest.mark.emulator_only
def test_in_a_forked_child():
    code = """
    import os, managedmem
    buffer = managedmem.empty(4096)
    child = os.fork()
    if child == 0:
        os._exit(0 if "uint8[4096]" in buffer._repr_html_() else 1)
    print(os.waitpid(child, 0)[1])
    """
    assert run_python(code).stdout == "0\n"
