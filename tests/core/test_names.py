"""Names of buffers: giving, reading and refusing them, in every function that makes a buffer."""

import copy
import gc

import pytest

import managedmem
from calls import names
from constants import PAGE
from identifiers import label
from managedmem import DeviceMemoryResource, Host, ManagedBuffer, ManagedMemoryResource, emulator
from threads import at_once

LONGEST = 200  # bytes of UTF-8


class Freeing:
    """A memory resource that notes what it frees, or fails."""

    def __init__(self):
        self.freed = []
        self.broken = False

    def deallocate(self, ptr, size, *, stream):
        if self.broken:
            raise OSError("not now")
        self.freed.append((ptr, size))


@pytest.fixture
def made():
    """Buffers that are closed after the test."""
    buffers = []
    yield buffers
    for buffer in buffers:
        buffer.close()


MAKERS = {
    "empty": lambda **name: managedmem.empty((4, 8), "float32", **name),
    "empty of nothing": lambda **name: managedmem.empty(0, **name),
    "allocate": lambda **name: ManagedMemoryResource().allocate(PAGE, **name),
    "managed pool": lambda **name: ManagedMemoryResource(pooled=True).allocate(PAGE, **name),
    "device pool": lambda **name: DeviceMemoryResource(0).allocate(PAGE, **name),
    "from_handle": lambda **name: ManagedBuffer.from_handle(4096, PAGE, **name),
    "from_handle of nothing": lambda **name: ManagedBuffer.from_handle(0, 0, **name),
    "from_handle with a resource": (
        lambda **name: ManagedBuffer.from_handle(4096, PAGE, mr=Freeing(), **name)
    ),
    "subclass": lambda **name: type("Sub", (ManagedBuffer,), {}).from_handle(4096, PAGE, **name),
}


@pytest.fixture(params=MAKERS)
def make(request, made):
    """`make(name=...)`: a buffer, closed after the test."""

    def make_one(**name):
        made.append(MAKERS[request.param](**name))
        return made[-1]

    return make_one


class TestEveryMaker:
    def test_gives_the_name(self, make):
        assert make(name="weights").name == "weights"

    def test_gives_none_without_one(self, make):
        assert make().name is None
        assert make(name=None).name is None

    def test_gives_a_buffer_whose_name_can_change(self, make):
        buffer = make()
        for name in ("first", "second", None, "third"):
            buffer.name = name
            assert buffer.name == name

    def test_names_each_buffer_alone(self, make):
        one, two, three = make(name="a"), make(name="b"), make()
        one.name = "c"
        assert (one.name, two.name, three.name) == ("c", "b", None)

    def test_keeps_the_name_once_closed(self, make):
        buffer = make(name="weights")
        buffer.close()
        assert buffer.name == "weights"
        with pytest.raises(RuntimeError, match="ManagedBuffer 'weights' is closed"):
            buffer.name = "late"
        with pytest.raises(RuntimeError, match="ManagedBuffer 'weights' is closed"):
            buffer.name = None
        assert buffer.name == "weights"

    @pytest.mark.parametrize(
        "call",
        [
            lambda b: b.prefetch(Host()),
            lambda b: managedmem.discard([b]),
            lambda b: b.copy_to(),
            lambda b: b.numpy(),
            lambda b: b[0],
            lambda b: setattr(b, "accessed_by", {Host()}),
        ],
    )
    def test_is_in_the_error_of_a_closed_buffer(self, make, call):
        buffer = make(name="weights")
        buffer.close()
        with pytest.raises(RuntimeError, match=r"ManagedBuffer 'weights' is closed$"):
            call(buffer)

    @pytest.mark.parametrize("bad", [b"x", 1, True, ["x"]], ids=label)
    def test_refuses_other_objects(self, make, bad):
        with pytest.raises(TypeError, match=r"name must be a str or None, got .*[x1T]"):
            make(name=bad)

    def test_takes_the_name_by_keyword_only(self):
        for call in (
            lambda: managedmem.empty(4, "u1", "name"),
            lambda: ManagedMemoryResource().allocate(4, "name"),
            lambda: ManagedBuffer.from_handle(4096, 4, None, None, "name"),
        ):
            with pytest.raises(TypeError, match="positional"):
                call()


@pytest.mark.emulator_only
@pytest.mark.parametrize("kind", ["empty", "allocate", "managed pool", "device pool"])
def test_a_bad_name_is_refused_before_the_driver_allocates(kind):
    with emulator.recording() as calls, pytest.raises(ValueError, match="null character"):
        MAKERS[kind](name="a\0b")
    assert not [name for name in names(calls) if name.startswith("cuMemAlloc")]


def test_a_bad_name_does_not_end_the_memory_of_a_resource():
    resource = Freeing()
    with pytest.raises(ValueError, match="name must not be empty"):
        ManagedBuffer.from_handle(4096, PAGE, mr=resource, name="")
    gc.collect()
    assert resource.freed == []


class TestText:
    @pytest.mark.parametrize(
        "name",
        [
            "x",
            "x" * LONGEST,
            "é" * (LONGEST // 2),
            "\U0001f4be" * (LONGEST // 4),
            "a b\n\t'\"",
            "0",
        ],
        ids=range(6),
    )
    def test_any_text_of_up_to_200_bytes(self, buf, name):
        buf.name = name
        assert buf.name == name

    @pytest.mark.parametrize(
        ("name", "reason"),
        [
            ("", r"must not be empty \(None is no name\), got ''"),
            ("x" * 201, "at most 200 bytes of UTF-8, got 201: 'xxx"),
            ("é" * 101, "at most 200 bytes of UTF-8, got 202: 'ééé"),
            ("\0", r"must not contain a null character, got '\\x00'"),
            ("a\0b", r"must not contain a null character, got 'a\\x00b'"),
            ("\udc80", r"must be text without surrogates, got '\\udc80'"),
        ],
        ids=range(6),
    )
    def test_refuses_other_text_and_keeps_the_name(self, buf, name, reason):
        buf.name = "before"
        with pytest.raises(ValueError, match=reason):
            buf.name = name
        assert buf.name == "before"
        with pytest.raises(ValueError, match=reason):
            managedmem.empty(1, name=name)

    def test_the_message_is_short(self, buf):
        with pytest.raises(ValueError, match="got 1000000") as refused:
            buf.name = "x" * 1_000_000
        assert len(str(refused.value)) < 500

    @pytest.mark.parametrize("bad", [b"x", 0, object(), PAGE], ids=label)
    def test_refuses_other_objects_and_keeps_the_name(self, buf, bad):
        buf.name = "before"
        with pytest.raises(TypeError, match="name must be a str or None, got"):
            buf.name = bad
        assert buf.name == "before"

    def test_a_str_of_a_subclass_is_read_as_text(self, buf):
        class Loud(str):
            def __str__(self):
                return "LOUD"

            def encode(self, *args):
                return b"LOUD"

        buf.name = Loud("quiet")
        assert buf.name == "quiet"
        assert type(buf.name) is str

    def test_cannot_be_deleted(self, buf):
        buf.name = "before"
        with pytest.raises(AttributeError, match="assign None"):
            del buf.name
        assert buf.name == "before"


class TestViews:
    def test_have_the_name_of_the_buffer(self, buf):
        parts = [buf[:PAGE], buf[PAGE], buf.view("float32"), buf.range(3, 5), buf[8:][:4]]
        assert [part.name for part in parts] == [None] * 5
        buf.name = "whole"
        assert [part.name for part in parts] == ["whole"] * 5

    @pytest.mark.parametrize("name", ["part", None])
    def test_cannot_have_a_name_of_their_own(self, buf, name):
        buf.name = "whole"
        with pytest.raises(ValueError, match=r"trace\.name\(view, label\)"):
            buf[:PAGE].name = name
        with pytest.raises(TypeError, match="str or None"):
            buf[:PAGE].name = 3
        assert buf.name == "whole"

    def test_keep_the_name_once_closed(self, alloc):
        buffer = alloc(PAGE)
        buffer.name = "whole"
        part, other = buffer[:8], buffer[8:]
        part.close()
        assert part.name == "whole"
        buffer.close()
        assert (part.name, other.name) == ("whole", "whole")

    def test_keep_the_name_of_a_buffer_that_is_gone(self):
        part = managedmem.empty(PAGE, name="whole")[:8]
        gc.collect()
        assert part.name == "whole"


class TestRepr:
    def test_shows_the_name(self, buf):
        assert repr(buf).startswith("<ManagedBuffer shape=(")
        buf.name = "it's"
        assert repr(buf).startswith('<ManagedBuffer name="it\'s" shape=(')
        assert repr(buf[:8]).startswith(
            '<ManagedBuffer name="it\'s" shape=(8,) dtype=uint8 handle='
        )
        buf.name = None
        assert "name" not in repr(buf)

    def test_shows_it_once_closed(self, alloc):
        buffer = alloc(8)
        buffer.name = "weights"
        buffer.close()
        assert repr(buffer) == "<ManagedBuffer name='weights' shape=(8,) dtype=uint8 closed>"


def test_a_copy_has_no_name(buf):
    buf.name = "original"
    for twin in (copy.copy(buf), copy.deepcopy(buf), buf.copy_to()):
        assert twin.name is None
        twin.close()


def test_two_wrappers_of_one_memory_have_two_names(buf):
    one = ManagedBuffer.from_handle(buf.handle, buf.size, owner=buf, name="one")
    two = ManagedBuffer.from_handle(buf.handle, buf.size, owner=buf, name="two")
    assert (buf.name, one.name, two.name) == (None, "one", "two")


def test_a_buffer_that_its_resource_did_not_free_can_be_named_again():
    resource = Freeing()
    buffer = ManagedBuffer.from_handle(4096, PAGE, mr=resource, name="first")
    resource.broken = True
    with pytest.raises(OSError, match="not now"):
        buffer.close()
    buffer.name = "second"
    assert buffer.name == "second"
    resource.broken = False
    buffer.close()
    assert resource.freed == [(4096, PAGE)]
    assert buffer.name == "second"


@pytest.mark.emulator_only
def test_names_make_no_driver_call(buf):
    with emulator.recording() as calls:
        buf.name = "weights"
        assert buf[:8].name == "weights"
        assert "weights" in repr(buf)
    assert calls == []


def test_threads_may_name_and_read_and_make_buffers_at_once(buf):
    texts = ["a" * 10, "b" * 190, None, "é" * 100]

    def rename():
        for i in range(2000):
            buf.name = texts[i % len(texts)]

    def read():
        for _ in range(2000):
            assert buf.name in texts

    def make():
        for i in range(300):
            with managedmem.empty(PAGE, name=f"buffer {i}") as made:
                part = ManagedBuffer.from_handle(made.handle, 8, owner=made, name=f"part {i}")
                assert (made.name, part.name) == (f"buffer {i}", f"part {i}")

    at_once(rename, read, make, rename)
