"""The moves of a process that does not serve, as ``managedmem top`` reads them, and their end."""

import contextlib
import gc
import os
import subprocess
import sys
import threading
import time
import types
from functools import partial

import pytest

import managedmem
from managedmem import Device, Host
from managedmem._cli import top_watch
from managedmem._managedmem import _Watch
from threads import at_once


@pytest.fixture(autouse=True)
def used_driver():
    """The process has the files of the kernel module."""
    with managedmem.zeros(4096):
        yield


@pytest.fixture
def watched():
    """The moves of this process, and two buffers that are its mappings."""
    buffers = [managedmem.full(2 << 20, 1, dtype="u1") for _ in range(2)]
    rows = [
        {"label": hex(b.handle), "address": b.handle, "nbytes": b.nbytes} for b in reversed(buffers)
    ]
    moves = top_watch.MappedMoves(os.getpid(), rows)
    yield moves, buffers, rows
    moves.close()
    for buffer in buffers:
        buffer.close()


def settled(moves, rows, name, amount):
    """The answer once a sum has come."""
    deadline = time.monotonic() + 20
    while (answer := moves.read(rows))["moves"][name] < amount:
        assert time.monotonic() < deadline, answer
        time.sleep(0.02)
    return answer


def test_moves_of_a_process_that_serves_nothing(watched):
    moves, (first, second), rows = watched
    managedmem.prefetch([first, second], Device(0))
    first.prefetch(Host())
    Device(0).sync()
    answer = settled(moves, rows, "to_host", 2 << 20)
    assert answer["reason"] is None and answer["moves"]["to_device"] == 4 << 20
    assert answer["moves"]["lost"] == answer["moves"]["between_devices"] == 0
    by_label = {each["label"]: each for each in answer["moves"]["memories"]}
    assert by_label[hex(first.handle)]["to_host"] == 2 << 20
    assert by_label[hex(second.handle)]["to_host"] == 0
    assert by_label[hex(second.handle)]["nbytes"] == 2 << 20
    second.numpy().sum()
    (left,) = [row for row in rows if row["address"] == first.handle]
    answer = settled(moves, [left], "to_host", 4 << 20)
    known, others = sorted(
        answer["moves"]["memories"], key=lambda each: each["label"] != left["label"]
    )
    assert known["to_host"] == 2 << 20 and others["label"] == top_watch.UNMAPPED
    assert others["to_device"] == others["to_host"] == 2 << 20


def test_every_kind_of_event_has_its_sum():
    host, device = -1, 0x7FFF
    sums = [top_watch.name_of(kind, host, device) for kind in range(10)]
    assert sums == ["to_device", "host_faults", "device_faults", *[None] * 5, "evicted", None]
    assert top_watch.name_of(0, device, host) == "to_host"
    assert top_watch.name_of(0, device, device) == "between_devices"


def test_events_that_are_not_as_expected_are_no_moves(monkeypatch):
    strange = types.SimpleNamespace(read=lambda: (b"", 0, 1), close=lambda: None)
    monkeypatch.setattr(top_watch, "_Watch", lambda _: strange)
    moves = top_watch.MappedMoves(os.getpid(), [])
    deadline = time.monotonic() + 20
    while moves.read([])["moves"] is not None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert moves.read([]) == {"moves": None, "reason": top_watch.STRANGE}
    moves.close()


@pytest.mark.parametrize("name", ["pidfd_open", "pipe", "start"])
def test_a_recording_that_cannot_begin_leaves_no_file(monkeypatch, name):
    def refused(*unused):
        raise RuntimeError("no more of them")

    monkeypatch.setattr(threading.Thread if name == "start" else os, name, refused)
    files = os.listdir("/proc/self/fd")
    with pytest.raises(RuntimeError, match="no more of them"):
        top_watch.MappedMoves(os.getpid(), [])
    assert os.listdir("/proc/self/fd") == files


def test_a_process_that_ends_is_let_go(monkeypatch):
    """The module keeps its memory as long as its file is open."""
    ended = threading.Event()
    monkeypatch.setattr(
        top_watch,
        "_Watch",
        lambda _: types.SimpleNamespace(read=lambda: (b"", 0, 0), close=ended.set),
    )
    program = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    moves = top_watch.MappedMoves(program.pid, [])
    assert not ended.wait(0.3)
    program.communicate(b"\n")
    assert ended.wait(20)
    moves.close()


@pytest.mark.parametrize(
    ("process", "error", "reason"),
    [
        ((1 << 31) - 1, RuntimeError, "process 2147483647 cannot be shared: No such process"),
        (os.getppid(), RuntimeError, f"process {os.getppid()} has no open file of /dev/nvidia-uvm"),
        (0, ValueError, "process must be a process ID, got 0"),
        (1 << 31, ValueError, "process must be a process ID, got 2147483648"),
        (1, RuntimeError, "process 1 "),
        ("1", TypeError, "process must be an int"),
    ],
)
def test_a_process_that_cannot_be_watched(process, error, reason):
    def watches():
        return sum(isinstance(each, _Watch) for each in gc.get_objects())

    before = watches()
    with pytest.raises(error, match=reason):
        _Watch(process)
    assert watches() <= before


def test_a_watch_ends_once():
    files = os.listdir("/proc/self/fd")
    watch = _Watch(os.getpid())
    watch.close()
    watch.close()
    with pytest.raises(RuntimeError, match="the watch is closed"):
        watch.read()
    assert os.listdir("/proc/self/fd") == files
    del watch
    _Watch(os.getpid())
    assert os.listdir("/proc/self/fd") == files


@pytest.mark.emulator_only
def test_a_reading_counts_what_it_rejects():
    with contextlib.closing(_Watch(os.getpid())) as watch, managedmem.zeros(4096) as buffer:
        managedmem.emulator.disturb_queue(garbage=1)
        buffer.prefetch(Device(0))
        Device(0).sync()
        managedmem.emulator.disturb_queue()
        assert watch.read()[2] > 0


def test_a_watch_may_end_while_others_read():
    def read(watch):
        with contextlib.suppress(RuntimeError):
            for _ in range(20):  # without an end, the readers could keep the turn to themselves
                watch.read()

    for _ in range(50):
        watch = _Watch(os.getpid())
        at_once(partial(read, watch), partial(read, watch), watch.close)


def test_a_watch_that_is_dropped_is_not_found_again():
    """Its end gives up the GIL, and another thread may look at all objects then."""
    over = threading.Event()

    def drop():
        for _ in range(20):
            _Watch(os.getpid())
        over.set()

    def find():
        while not over.is_set():
            gc.get_objects(generation=0)

    at_once(drop, find)
