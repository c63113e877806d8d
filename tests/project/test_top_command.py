"""``python -m managedmem top``: the numbers of another process, as text, JSON and a page."""

import contextlib
import http.client
import json
import os
import pty
import re
import shutil
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

import managedmem
from constants import EMULATED
from managedmem._cli import top, top_source, top_view
from managedmem._top_socket import address_of
from programs import run_python

PARENT = str(Path(managedmem.__file__).resolve().parents[1])
TOP = [sys.executable, "-m", "managedmem", "top"]
MIB = 1 << 20
MEMORY = """
import ctypes, os, signal, sys
import managedmem
from managedmem import Device, Host
weights = managedmem.empty(2 << 20, name="weights")
other = managedmem.empty(1 << 20, name="<b>other</b>")
ctypes.memset(weights.handle, 1, weights.nbytes)
stream = managedmem.Stream()
"""
ORDERS = """
print("ready", flush=True)
for order in sys.stdin:
    exec(order)
    print("done", flush=True)
"""
TO_DEVICE = "weights.prefetch(Device(0), stream=stream); stream.sync()"
TO_HOST = "memoryview(weights).cast('B').tobytes()"


class Program:
    """A process that does what it is told, line by line."""

    def __init__(self, code=MEMORY, **environment):
        env = {**os.environ, "MANAGEDMEM_TOP": "1", "PYTHONPATH": PARENT, **environment}
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code + ORDERS]
        self.process = subprocess.Popen(command, env=env, text=True, **pipes)
        self.pid = self.process.pid
        self.wait()

    def wait(self):
        line = self.process.stdout.readline()
        assert line in ("ready\n", "done\n"), line + self.process.stderr.read()

    def do(self, *orders):
        for order in orders:
            self.process.stdin.write(order + "\n")
            self.process.stdin.flush()
            self.wait()

    def end(self):
        """The exit status and stderr."""
        _, error = self.process.communicate(timeout=60)
        return self.process.returncode, error


@pytest.fixture
def start():
    programs = []

    def started(*arguments, **environment):
        programs.append(Program(*arguments, **environment))
        return programs[-1]

    yield started
    for program in programs:
        program.process.kill()
        for pipe in (program.process.stdin, program.process.stdout, program.process.stderr):
            pipe.close()  # a forked child may have the other end
        program.process.wait()


@pytest.fixture
def watch():
    sources = []

    def watched(process):
        sources.append(top_source.source_of(process))
        return sources[-1]

    yield watched
    for source in sources:
        source.close()


def run(*arguments, user=None, **environment):
    env = {**os.environ, "PYTHONPATH": PARENT, **environment}
    return subprocess.run(
        [*TOP, *map(str, arguments)], env=env, capture_output=True, text=True, timeout=60, user=user
    )


def sums_of(view):
    """The sums of an interval by memory, from its rates."""
    return {
        row["label"]: {name: round(rate * view.seconds) for name, rate in row["rates"].items()}
        for row in view.rows
    }


# --- the numbers --------------------------------------------------------------------------


def test_the_numbers_are_those_of_the_process(start, watch):
    program = start()
    source = watch(program.pid)
    first = source.read()
    assert (first["total"]["nbytes"], first["total"]["living"]) == (3 * MIB, 2)
    assert first["moves"]["to_device"] == 0 and first["reason"] is None
    program.do(TO_DEVICE)
    second = source.read()
    view = top_view.View(second, first)
    assert sums_of(view)["weights"] == {**top_view.NO_MOVES, "to_device": 2 * MIB}
    assert not any(sums_of(view)["<b>other</b>"].values())
    program.do(TO_HOST, "weights.discard()", "other.close()")
    third = source.read()
    view = top_view.View(third, second)
    moved = sums_of(view)
    faults = moved["weights"].pop("host_faults")
    assert faults == 512 if EMULATED else 0 < faults <= 512
    assert moved == {"weights": dict.fromkeys(moved["weights"], 0) | {"to_host": 2 * MIB}}
    assert round(view.rates["to_host"] * view.seconds) == 2 * MIB
    assert third["moves"]["to_device"] == 2 * MIB
    assert third["total"]["peak_nbytes"] == 3 * MIB
    assert view.title.startswith(f"{program.pid} ")
    assert view.title.endswith(": 2.0M in 1 memory, at most 3.0M")


@pytest.mark.emulator_only
def test_evictions_freed_memory_and_kept_pools_are_shown(start, watch):
    program = start(MEMORY, MANAGEDMEM_EMULATOR="capacity_mib=16")
    source = watch(program.pid)
    before = source.read()
    code = "big = managedmem.empty(12 << 20, name='big'); big.prefetch(Device(0), stream=stream); "
    code += (
        "more = managedmem.empty(12 << 20, name='more'); more.prefetch(Device(0), stream=stream); "
    )
    program.do(
        code + "stream.sync(); big.close()",
        "pool = managedmem.DeviceMemoryResource(Device(0)); part = pool.allocate(4096)",
    )
    now = source.read()
    view = top_view.View(now, before)
    assert sums_of(view)["big"]["evicted"] > 0
    assert view.rates["evicted"] > 0
    assert any(re.fullmatch(r"Device\(0\) keeps 0 in frames .*", note) for note in view.notes)


def test_many_readings_add_up(start, watch):
    program = start()
    source = watch(program.pid)
    source.read()
    for _ in range(35):  # beyond the parts of one recording
        program.do(TO_DEVICE, TO_HOST)
        last = source.read()
    assert last["moves"]["to_device"] == last["moves"]["to_host"] == 35 * 2 * MIB


def test_a_trace_of_the_program_has_precedence(start, watch):
    program = start()
    source = watch(program.pid)
    source.read()
    program.do("trace = managedmem.trace()", "trace.start()", TO_DEVICE)
    during = source.read()
    assert during["moves"] is None and "managedmem.trace()" in during["reason"]
    view = top_view.View(during, during)
    assert view.rates is None and view.rows[0]["rates"] is None
    assert "no moves: the process runs a managedmem.trace()" in str(view)
    program.do("trace.stop()", "assert trace['weights'].to_device == 2 << 20")
    source.read()
    program.do(TO_HOST)
    assert source.read()["moves"]["to_host"] == 2 * MIB


def test_a_process_without_memory_keeps_its_choice_of_a_driver(start, watch):
    program = start("import sys, managedmem", MANAGEDMEM_DRIVER="/missing/libcuda.so")
    answer = watch(program.pid).read()
    assert (answer["live"], answer["moves"]) == ([], None)
    assert answer["reason"] == "moves are counted once this package has allocated memory"


def test_allocations_have_their_lines_where_tracemalloc_runs(start, watch):
    program = start("import tracemalloc; tracemalloc.start()\n" + MEMORY)
    rows = watch(program.pid).read()["live"]
    assert [row["allocated_at"] for row in rows] == ["<string>:6", "<string>:7"]


def test_mapped_memory_is_listed_by_address(tmp_path, monkeypatch, watch):
    path = tmp_path / "nvidia-uvm"
    path.write_bytes(bytes(3 * 4096))
    monkeypatch.setattr(top_source, "MANAGED", str(path))
    code = "import mmap, sys\n"
    code += f"file = open({str(path)!r}, 'r+b'); m = mmap.mmap(file.fileno(), 0); m[0] = 1\n"
    program = Program(code, MANAGEDMEM_TOP="0")
    try:
        view = top_view.View(watch(program.pid).read(), None)
        (row,) = view.rows
        assert row["nbytes"] == 3 * 4096 and 0 < row["on_host"] <= 3 * 4096
        assert row["label"] == hex(row["address"])
        text = str(view).replace("\n  ", " ")
        assert "no open file of /dev/nvidia-uvm: for moves, faults and names, start it with" in text
    finally:
        program.end()
    with pytest.raises(top_source.Ended):
        top_source.Mapped(program.pid).read()


def test_texts_of_a_process_cannot_act_on_a_terminal():
    row = {"label": "a\x1b[2J", "address": 1, "nbytes": 1, "resource": "b\x1b[2J", "device": 0}
    head = {"version": 1, "pid": os.getpid(), "time": 0.0, "left_out": 2, "kept": []}
    answer = {**head, "total": {"nbytes": 1, "living": 1}, "live": [row], "moves": None}
    text = str(top_view.View({**answer, "reason": "c\x1b[2J"}, None))
    assert "\x1b" not in text
    assert all(rf"{letter}\x1b[2J" in text for letter in "abc")
    assert "2 smaller memories are not listed" in text


# --- processes that come and go -----------------------------------------------------------


def test_an_exit_with_a_client_is_clean(start, watch):
    program = start()
    source = watch(program.pid)
    source.read()
    assert program.end() == (0, "")
    with pytest.raises(top_source.Ended):
        source.read()


def test_a_forked_child_serves_for_itself(start, watch):
    program = start()
    source = watch(program.pid)
    source.read()
    program.do(
        "ends = os.pipe()",
        "child = os.fork() or (signal.alarm(60), os.read(ends[0], 1), sys.exit())",
    )
    child = serving_child(program.pid)
    answer = watch(child).read()
    assert answer["pid"] == child and answer["moves"] is None and answer["reason"]
    assert source.read()["pid"] == program.pid
    program.do("os.write(ends[1], b'x'); assert os.waitpid(child, 0)[1] == 0")
    assert source.read()["moves"] is not None
    assert program.end() == (0, "")


def serving_child(process):
    """The child that serves; it begins after the fork has returned to the parent."""
    while True:
        for child in top_source.serving():
            if f"\nPPid:\t{process}\n" in Path(f"/proc/{child}/status").read_text():
                return child
        time.sleep(0.01)


@pytest.mark.emulator_only
def test_a_process_that_ran_out_of_files_serves_again(start, watch):
    program = start()
    first = watch(program.pid)
    first.read()  # it has been taken
    program.do("import resource; hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]")
    program.do("resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(address_of(program.pid))  # which is refused once, and waits
        assert first.read()["pid"] == program.pid
        program.do("resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))")
        client.sendall(b"\n")
        assert client.recv(9) == b'{"version'
    assert program.end() == (0, "")


def test_a_process_that_can_start_no_thread_keeps_no_socket():
    done = run_python(
        """
        import gc, os, threading, warnings
        def start(thread): raise RuntimeError("can't start new thread")
        threading.Thread.start = start
        os.environ["MANAGEDMEM_TOP"] = "1"
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            import managedmem
            gc.collect()
        print([str(each.message) for each in found])
        """
    )
    text = "MANAGEDMEM_TOP=1: managedmem top cannot show this process: can't start new thread"
    assert done.stdout == f"{[text]}\n"


OTHER_FILES = """
os.closerange(3, 64)
files = [open(sys.executable, 'rb', buffering=0) for _ in range(16)]
def are_open(*unused):
    assert all(each.read(1) for each in files)
"""


@pytest.mark.emulator_only
@pytest.mark.parametrize("act", ["connect", "fork", "exit"])
def test_files_with_the_numbers_of_its_sockets_stay_open(start, act):
    """A daemon closes all files."""
    program = start(MEMORY + OTHER_FILES)
    began = time.monotonic()
    if act == "connect":
        with pytest.raises((top_source.Ended, ConnectionRefusedError)):
            with contextlib.closing(top_source.Served(program.pid)) as source:
                source.read()
    elif act == "fork":
        program.do("child = os.fork() or (are_open(), os._exit(0))")
        program.do("assert os.waitpid(child, 0)[1] == 0")
    program.do("are_open()", "import atexit, managedmem._top_server as server")
    program.do("atexit.unregister(server._stop)", "atexit.register(are_open)")
    program.do("atexit.register(server._stop)")  # runs before
    assert program.end() == (0, "")
    assert act != "exit" or time.monotonic() - began < 2  # the end waits for nothing


def test_a_subinterpreter_does_not_serve():
    done = run_python(
        """
        from subinterpreters import PRELUDE
        exec(PRELUDE)
        script = "import os; os.environ['MANAGEDMEM_TOP'] = '1'\\n"
        script += "import sys; sys.path[:] = " + repr(sys.path) + "\\nimport managedmem"
        run(create("legacy"), script)
        import threading, os
        print(threading.active_count(), len(os.listdir("/proc/self/task")))
        """
    )
    assert done.stdout == "1 1\n"


def test_the_variable_is_checked_and_nothing_runs_without_it():
    code = "import os; os.environ['MANAGEDMEM_TOP'] = {!r}; import sys, threading, managedmem\n"
    code += "print('managedmem._top_server' in sys.modules, threading.active_count())"
    assert run_python(code.format("0")).stdout == "False 1\n"
    assert run_python(code.format("1")).stdout == "True 2\n"
    done = run_python(code.format("yes"), check=False)
    assert 'ValueError: MANAGEDMEM_TOP must be "0" or "1", got "yes"' in done.stderr


# --- the command --------------------------------------------------------------------------


def test_json_has_a_line_for_each_view(start):
    program = start()
    done = run(program.pid, "--json", "--count", 3, "--interval", 0.05)
    assert (done.returncode, done.stderr) == (0, "")
    first, _, last = map(json.loads, done.stdout.splitlines())
    assert first["rates"] is None and last["rates"] == dict.fromkeys(top_view.RATES, 0)
    assert [row["label"] for row in last["memories"]] == ["weights", "<b>other</b>"]
    assert last["version"] == 1 and last["pid"] == program.pid and last["sums"]["lost"] == 0


def test_a_stop_of_the_command_leaves_views_out(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(top.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(top.time, "sleep", lambda seconds: now.append(now.pop() + seconds))
    monkeypatch.setattr(top, "View", lambda *answers: now[0])

    class Source:
        def read(self):
            now[0] += 1000 if now[0] == 2 else 0.25  # the third is late

    shown = top.views(Source(), 1, 6)
    assert list(shown) == [0.25, 1.25, 1002, 1002.25, 1003.25, 1004.25]


def test_names_that_the_encoding_lacks_are_escaped(start):
    program = start("import sys, managedmem; b = managedmem.empty(1, name=chr(0x4e00) * 2)")
    for form in ([], ["--json"]):
        done = run(program.pid, "--count", 1, *form, PYTHONIOENCODING="latin-1")
        assert (done.returncode, done.stderr) == (0, "")
        assert r"\u4e00\u4e00" in done.stdout


def test_the_only_process_needs_no_number(start, monkeypatch):
    program, second = start(), start()
    mine = {program.pid, second.pid}
    assert mine <= set(top_source.serving())
    found = top_source.serving
    monkeypatch.setattr(top_source, "serving", lambda: sorted(mine & set(found())))
    with pytest.raises(top_source.SourceError, match="2 processes serve their numbers") as refused:
        top_source.only_process()
    assert all(f"\n  {each}  {sys.executable[:16]}" in str(refused.value) for each in mine)
    second.end()
    assert top_source.only_process() == program.pid
    program.end()
    monkeypatch.setattr(top_source, "MANAGED", "/dev/nvidia-uvm-of-no-process")
    with pytest.raises(top_source.SourceError, match="no process of this user serves"):
        top_source.only_process()


def test_a_process_that_maps_memory_needs_no_number_either(tmp_path, monkeypatch):
    path = tmp_path / "nvidia-uvm"
    path.write_bytes(bytes(4096))
    monkeypatch.setattr(top_source, "MANAGED", str(path))
    monkeypatch.setattr(top_source, "serving", lambda: [])
    code = f"import mmap\nwith open({str(path)!r}, 'r+b') as f: m = mmap.mmap(f.fileno(), 0)\n"
    code += "import sys; print(flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with contextlib.ExitStack() as stack:
        programs = []
        for _ in range(2):
            program = subprocess.Popen([sys.executable, "-c", code], **pipes)
            programs.append(stack.enter_context(program))
            program.stdout.readline()
        with pytest.raises(top_source.SourceError, match="2 processes map managed memory") as many:
            top_source.only_process()
        assert all(f"\n  {program.pid}  " in str(many.value) for program in programs)
        programs[0].communicate()
        assert top_source.only_process() == programs[1].pid


def test_the_text_and_the_end_of_the_process(start):
    program = start()
    command = [*TOP, str(program.pid), "--interval", "0.05"]
    env = {**os.environ, "PYTHONPATH": PARENT}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    shown = subprocess.Popen(command, env=env, text=True, **pipes)
    assert shown.stdout.readline().startswith(f"{program.pid} ")
    program.end()
    with shown:
        out, error = shown.stdout.read(), shown.stderr.read()
    assert (shown.returncode, error) == (
        0,
        f"process {program.pid} has ended, or serves no longer\n",
    )
    assert re.search(r"^weights +2\.0M  managed ", out, re.MULTILINE)
    assert re.search(r"^total +3\.0M ", out, re.MULTILINE)


def refusal(*arguments, **options):
    done = run(*arguments, **options)
    assert done.stdout == ""
    return done.returncode, done.stderr


@pytest.mark.emulator_only
def test_processes_that_cannot_be_shown():
    assert refusal(2**31 - 1) == (1, f"top: there is no process {2**31 - 1}\n")
    status, text = refusal(os.getpid())
    assert status == 1
    assert f"process {os.getpid()} neither serves its numbers nor maps managed memory" in text
    assert "MANAGEDMEM_TOP=1" in text


@pytest.mark.parametrize(
    "words", [["0"], ["x"], ["1", "--interval", "0"], ["1", "--web", "70000"], ["--count", "-1"]]
)
def test_wrong_arguments_are_refused_with_their_value(words):
    status, text = refusal(*words)
    assert status == 2 and repr(words[-1]) in text


@pytest.mark.emulator_only
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of other users")
def test_other_users_see_nothing(start, watch):
    program = start()
    code = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.settimeout(5)\n"
    code += "s.connect(chr(0) + sys.argv[1])\n"
    code += "try: s.sendall(b'x\\n'); print(s.recv(9))\nexcept ConnectionError: print(b'')"
    name = address_of(program.pid).removeprefix("\0")
    base = shutil.which("python3", path="/usr/local/bin:/usr/bin") or sys.executable
    done = subprocess.run([base, "-c", code, name], capture_output=True, text=True, user=65534)
    assert (done.stdout, done.stderr) == ("b''\n", "")
    assert watch(program.pid).read()["pid"] == program.pid


@pytest.mark.emulator_only
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_process_that_has_become_another_user_is_shown(start, watch, monkeypatch):
    program = start()
    program.do("os.setuid(65534)")
    assert watch(program.pid).read()["pid"] == program.pid
    monkeypatch.setattr(top_source, "owner_of", lambda process: 65534)
    assert watch(program.pid).read()["pid"] == program.pid


def test_a_process_of_another_user_is_named(start, monkeypatch):
    program = start()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(
        top_source.SourceError, match=rf"{program.pid} belongs to user {os.getuid()}"
    ):
        top_source.source_of(program.pid)
    assert top_source.serving() == []


def test_a_socket_of_another_process_is_refused(start):
    program = start(MEMORY, MANAGEDMEM_TOP="0")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address_of(program.pid))
        listener.listen()
        with pytest.raises(top_source.SourceError, match=rf"belongs to process {os.getpid()}"):
            top_source.source_of(program.pid)


# --- the terminal -------------------------------------------------------------------------


def on_terminal(program, code):
    """The output of top on a terminal, after a line of Python."""
    code += "\nfrom managedmem._cli.commands import main; sys.exit(main(sys.argv[1:]))"
    ours, theirs = pty.openpty()
    env = {**os.environ, "PYTHONPATH": PARENT, "COLUMNS": "120", "TERM": "xterm"}
    words = ["top", str(program.pid), "--count", "2", "--interval", "0.05"]
    done = subprocess.run(
        [sys.executable, "-c", "import sys;" + code, *words], env=env, stdout=theirs, timeout=60
    )
    os.close(theirs)
    text = b""
    try:
        while more := os.read(ours, 1 << 16):
            text += more
    except OSError:  # the end
        pass
    os.close(ours)
    assert done.returncode == 0
    return text.decode()


def test_a_terminal_shows_one_table_by_rich(start):
    pytest.importorskip("rich", reason="the extra top")
    text = on_terminal(start(), "")
    assert "\x1b[" in text and "<b>other</b>" in text and "total" in text


def test_a_terminal_shows_tables_without_rich(start):
    text = on_terminal(start(), "sys.modules['rich.live'] = None")
    assert "\x1b[" not in text and text.count("total ") == 2


# --- the page -----------------------------------------------------------------------------


@pytest.fixture
def page(start, tmp_path):
    """The program, and the address of its page. The errors of the command are in a file."""
    program = start()
    command = [*TOP, str(program.pid), "--web", "--interval", "0.1"]
    env = {**os.environ, "PYTHONPATH": PARENT}
    with open(tmp_path / "errors", "w") as errors:
        shown = subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=errors)
    address = shown.stdout.readline().strip()
    yield program, address
    shown.kill()
    shown.communicate()


def get(address, path=None, **headers):
    _, _, host, *folder = address.split("/")
    connection = http.client.HTTPConnection(host, timeout=10)
    connection.request("GET", "/" + "/".join(folder) if path is None else path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode(), answer.headers


def test_the_page_is_for_this_machine_and_this_user(page):
    _, address = page
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{20,}/", address)
    status, text, headers = get(address)
    assert status == 200 and "<title>managedmem top</title>" in text
    assert headers["Content-Security-Policy"].startswith("default-src 'none'")
    assert get(address, Host="localhost:1")[0] == 200
    for host in ("example.org", "127.0.0.1.example.org", "localhost.example.org:80"):
        assert get(address, Host=host)[0] == 403
    for path in ("/", "/view.json", "/x/", "/../data/top.html"):
        assert get(address, path)[0] == 404
    view = json.loads(get(address + "view.json")[1])
    assert [row[0] for row in view["rows"]] == ["weights", "<b>other</b>", "total"]
    assert len({len(row) for row in [view["heads"], *view["rows"]]}) == 1


def test_a_page_that_is_closed_early_is_no_fault(page, tmp_path):
    _, address = page
    host, port = address.split("/")[2].split(":")
    for _ in range(20):
        with socket.create_connection((host, int(port))) as client:
            client.sendall(b"GET ")
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert get(address)[0] == 200
    assert (tmp_path / "errors").read_text() == ""


def test_a_port_that_is_taken_is_an_error(start):
    program = start()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run(program.pid, "--web", port)
    assert done.returncode == 1
    assert done.stderr == (
        f"top: port {port} is not available: Address already in use. Give --web another one, or "
        "none for a free one\n"
    )


def browser():
    names = ("chromium", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, names)), None)


@pytest.mark.skipif(browser() is None, reason="needs chromium")
@pytest.mark.parametrize("width", [400, 1200])
def test_the_page_in_a_browser(page, tmp_path, width):
    program, address = page
    program.do(TO_DEVICE)
    done = subprocess.run(
        [
            browser(),
            *("--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},800"),
            *(f"--user-data-dir={tmp_path}", "--virtual-time-budget=2000", "--dump-dom", address),
        ],
        capture_output=True,
        text=True,
        timeout=100,
    )
    text = done.stdout
    assert f'<h1 id="title" aria-live="polite">{program.pid} ' in text, done.stderr
    assert '<td>weights</td><td data-head="size">2.0M</td>' in text
    assert "<td>&lt;b&gt;other&lt;/b&gt;</td>" in text
    assert "have ended" not in text and '<p id="state" role="status"></p>' in text
