"""Mutation tests of the C: makes one small change at a time and runs a test that must notice it.

    python tools/mutants.py                  the listed mutants, each against its killer
    python tools/mutants.py --diff FILE      mutants of the lines that a diff changes, against tests
                                             of their files
    python tools/mutants.py --survey [TEST ...] <MUTANTS
                                             mutants against tests, or tests of their files; prints
                                             lines for the list

tests/mutants.txt has a fixed sample of tools/mutations.py. Each mutant is made in a copy of the
tree. Its file, or all that include it if it is a header, is compiled and linked with the unchanged
objects. The test runs in a process of its own. A test that crashes or hangs kills the mutant too.
Prints how many mutants of each kind are killed. Fails below 90 % overall, or if a listed mutant of
the kinds in ALL_KILLED survives.
"""

import argparse
import collections
import contextlib
import multiprocessing
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mutations import SEED, SHARES, SOURCES, drawn, mutations_of

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "tests" / "mutants.txt"
MAPPED = ROOT / "tests" / "tests_of_sources.txt"  # from tools/map_tests.py
TESTS_OF_KIND = {"gil": ["tests/robustness/test_gil.py"]}
GATE = 0.9
ALL_KILLED = ("rollback", "lock", "gil", "refcount")
FEW = {kind: max(1, share // 12) for kind, share in SHARES.items()}  # in the lines of a diff
WORKERS = 2
SECONDS = 60  # a test that takes longer hangs; most take one second
FILE_SECONDS = 300  # a file of tests
EQUIVALENT = "equivalent, "  # stands for a killer, before the reason why no test can notice
C_TEST_SOURCES = tuple(  # shared by all C tests
    f"tests/c/{name}.c" for name in ("world", "failing_allocations", "counted_waits")
)
C_TEST_LIBRARIES = [
    "-Wl,--wrap=malloc,--wrap=calloc,--wrap=realloc,--wrap=free,--wrap=pthread_cond_wait",
    "-lpthread",
    "-ldl",
]
INCLUDE_FOLDERS = ("src/_managedmem", "tests/c")  # of C tests
C_TEST_INCLUDES = [f"-I{folder}" for folder in INCLUDE_FOLDERS]
C_FLAGS = "-O0 -g0 -w -U_FORTIFY_SOURCE"


class BadList(Exception):
    """An entry that does not fit the sources."""


def find(name, root=ROOT):
    """The mutation with these coordinates."""
    words = name.split()
    with contextlib.suppress(FileNotFoundError):
        for mutation in mutations_of(words[1], root) if len(words) == 4 else ():
            if mutation.name == name:
                return mutation
    raise BadList(f"no such mutation: {name}")


def read_list(path=LIST, root=ROOT):
    """{mutation: its killer, or EQUIVALENT and a reason}, checked against the sources."""
    killers = {}
    for line in path.read_text().splitlines():
        if line and not line.startswith("#"):
            name, colon, killer = line.partition(": ")
            mutation = find(name, root)
            if not colon or not killer or mutation in killers:
                raise BadList(f"without a killer, or twice in the list: {name}")
            killers[mutation] = killer
    return killers


def is_equivalent(killer):
    return killer.startswith(EQUIVALENT)


# --- the build, without optimization, which halves its time, and with assertions, which kill too


class Build:
    """The commands and the objects of the unchanged sources, in a folder."""

    def __init__(self, folder, killers):
        self.folder = folder
        self.tree = folder / "tree"
        copy_tree(self.tree)
        commands = self.build_extension()
        self.compile = {
            argument: command
            for command in commands
            for argument in command
            if argument.startswith("src/") and "-c" in command  # not setup.py's probe
        }
        self.compile_tests = {}  # the same for tests of tests/c
        self.link = next(
            command
            for command in commands
            if "-shared" in command and any("/driver/driver.o" in word for word in command)
        )
        target = self.link.index("-o") + 1  # setuptools links elsewhere and copies
        self.link[target] = f"python/managedmem/{Path(self.link[target]).name}"
        for killer in filter(is_program, killers):
            self.build_c_test(killer)

    def build_extension(self):
        """Builds in place; setuptools prints each command that it runs."""
        environment = dict(os.environ, MANAGEDMEM_DEBUG="1", CFLAGS=C_FLAGS)
        environment.pop("MANAGEDMEM_WERROR", None)
        done = subprocess.run(
            [sys.executable, "setup.py", "-v", "build_ext", "--inplace", f"-j{WORKERS}"],
            cwd=self.tree,
            env=environment,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise SystemExit(f"the unchanged sources do not build:\n{done.stdout}{done.stderr}")
        lines = (done.stdout + done.stderr).splitlines()
        found = [shlex.split(line) for line in lines if re.search(r" -(c|shared) .* -o ", line)]
        return [command[command.index(found[0][0]) :] for command in found]

    def compiler(self):
        """The compiler and its options, without files."""
        command = self.compile["src/_managedmem/memory/guard.c"]
        return [w for w in command if not w.endswith((".c", ".o")) and w not in ("-c", "-o")]

    def build_c_test(self, killer):
        """Compiles a C test and the files that all C tests share, once."""
        compiler = self.compiler()
        if " under " in killer:
            return
        for source in (killer, *C_TEST_SOURCES):
            if source not in self.compile_tests:
                command = [*compiler, *C_TEST_INCLUDES, "-c", source, "-o", f"{source}.o"]
                subprocess.run(command, cwd=self.tree, check=True)
                self.compile_tests[source] = command
        emulator = "python/managedmem/libmanagedmem_emulator.so"
        for kind in ("forking", "odd", "hooked"):  # the drivers that tests/c/run.sh puts beside it
            made = [f"tests/c/{kind}_driver.c", "-o", f"python/managedmem/lib{kind}.so"]
            linked = ["-shared", "-Wl,--no-as-needed", emulator, "-Wl,-rpath,$ORIGIN", "-ldl"]
            subprocess.run([*compiler, *C_TEST_INCLUDES, *made, *linked], cwd=self.tree, check=True)

    def commands_of(self, file, killers):
        """The commands that compile a source, or all sources that include a header. Of the tests of
        tests/c, only these killers and the files that all tests share are compiled."""
        if file in self.compile:
            return [self.compile[file]]
        commands = dict(self.compile)
        for source in self.compile_tests.keys() & {*killers, *C_TEST_SOURCES}:
            commands[source] = self.compile_tests[source]
        return [c for source, c in commands.items() if file in included_files(self.tree, source)]


def included_files(tree, source):
    """The files of the tree that a source includes, directly or through others."""
    found, waiting = set(), [source]
    while waiting:
        path = waiting.pop()
        for name in named_headers((tree / path).read_text()):
            for folder in (os.path.dirname(path), *INCLUDE_FOLDERS):
                other = os.path.normpath(os.path.join(folder, name))
                if (tree / other).is_file():
                    waiting += {other} - found
                    found.add(other)
                    break
    return found


def copy_tree(folder):
    """The parts that the extension and its tests are made of."""
    skipped = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info", "build")
    for name in ("src", "python", "tests", "tools", "benchmarks", "examples", "docs"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=skipped)
    for name in (
        "setup.py",
        "pyproject.toml",
        "README.md",
        "SECURITY.md",
        "CHANGELOG.md",
        "LICENSE",
        "MANIFEST.in",
    ):
        shutil.copy(ROOT / name, folder)


class Place:
    """The copy of the built tree in which one worker makes its changes."""

    def __init__(self, build, number):
        self.build = build
        self.tree = build.folder / f"tree-{number}"
        if not self.tree.exists():
            shutil.copytree(build.tree, self.tree, symlinks=True)

    def apply(self, mutant, killers):
        """Makes the change, and compiles the sources that have it into the objects that are
        linked."""
        file = str(SOURCES / mutant.file)
        source = self.tree / file
        source.write_text(mutant.changed(source.read_text()))
        commands = self.build.commands_of(file, killers)
        if not commands:
            raise BadList(f"{mutant.name}: no source that is built includes {file}")
        for command in commands:
            done = subprocess.run(command, cwd=self.tree, capture_output=True, text=True)
            if done.returncode:
                raise BadList(f"{mutant.name}: does not compile\n{done.stderr}")

    def restore(self, mutant, killers):
        file = str(SOURCES / mutant.file)
        commands = self.build.commands_of(file, killers)
        objects = [command[command.index("-o") + 1] for command in commands]
        for changed in (file, *objects):
            shutil.copyfile(self.build.tree / changed, self.tree / changed)

    def link_module(self):
        subprocess.run(self.build.link, cwd=self.tree, check=True)

    def link_c_test(self, killer):
        """The command that runs a C test; one "under thread" is built with that sanitizer."""
        killer, _, sanitizer = killer.partition(" under ")
        if sanitizer:
            return self.sanitized_c_test(killer, sanitizer)
        objects = [w for w in self.build.link if w.endswith(".o") and "/python/" not in w]
        parts = [f"{source}.o" for source in (killer, *C_TEST_SOURCES)] + objects
        target = self.tree / "c-test"
        linker = self.build.link[: self.build.link.index("-shared")]  # CC can be several words
        command = [*linker, *parts, "-o", str(target), *C_TEST_LIBRARIES]
        subprocess.run(command, cwd=self.tree, check=True)
        return [str(target), str(self.tree / "python/managedmem/libmanagedmem_emulator.so")]

    def sanitized_c_test(self, killer, sanitizer):
        sources = sorted(str(p) for p in (self.tree / "src/_managedmem").glob("[!p]*/*.c"))
        emulator = sorted(str(p) for p in (self.tree / "src/emulator").glob("*.c"))
        compiler = [*self.build.compiler(), f"-fsanitize={sanitizer}", "-O1", "-g"]
        driver, target = self.tree / f"lib{sanitizer}.so", self.tree / "c-test"
        libraries = ["-lpthread", "-ldl"]
        if not driver.exists():
            command = [*compiler, "-shared", *emulator, "-o", str(driver), *libraries]
            subprocess.run(command, cwd=self.tree, check=True)
        command = [*compiler, killer, *C_TEST_SOURCES, *sources, "-o", str(target)]
        command += [*C_TEST_LIBRARIES, *C_TEST_INCLUDES]
        subprocess.run(command, cwd=self.tree, check=True)
        return [str(target), str(driver)]


# --- running tests: pytest is imported once, and each run is a fork that imports the changed module


def test_environment(tree):
    kept = {key: value for key, value in os.environ.items() if not key.startswith("MANAGEDMEM_")}
    kept["PYTHONPATH"] = str(tree / "python")
    kept["PYTHONDONTWRITEBYTECODE"] = "1"
    return kept


def in_child(tree, log, action, seconds=SECONDS):
    """The exit status of the action in a fork, or None for a hang; its output goes to the log."""
    child = os.fork()
    if child == 0:
        status = 99
        with contextlib.suppress(BaseException):
            os.setsid()
            os.chdir(tree)
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            status = action()
        os._exit(int(status))
    return wait_for(child, seconds)


def wait_for(child, seconds):
    """The exit status of a child, or None for a hang. Ends the processes that it left behind."""
    handle = os.pidfd_open(child)
    ready, _, _ = select.select([handle], [], [], seconds)
    os.close(handle)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status if ready else None


def run_pytest(tree, log, tests, *, sampled=False):
    """Runs tests; with `sampled`, as their files run them, which take a sample of operations."""
    alone = all(map(is_one, tests)) and not sampled  # one test may need any operation
    limits = [SECONDS if is_one(t) and not sampled else FILE_SECONDS for t in tests]

    def action():
        import pytest

        environment = test_environment(tree)
        if alone:
            environment["MANAGEDMEM_SWEEPS"] = "single"
        os.environ.clear()
        os.environ.update(environment)
        sys.path.insert(0, str(tree / "python"))
        options = ["-q", "-x", "-p", "no:cacheprovider", "--timeout=0", "-o", "addopts="]
        return pytest.main([*options, *tests])

    return in_child(tree, log, action, sum(limits))


def is_one(killer):
    """True for one test, false for a file of them."""
    return "::" in killer


def is_program(killer):
    return killer.startswith("tests/c/")


def run_c_test(tree, log, command):
    def action():
        os.execve(
            command[0], command, {**test_environment(tree), "MANAGEDMEM_EMULATOR": "devices=2"}
        )

    return in_child(tree, log, action)


def run_killer(place, killer, log):
    """The exit status of a test file, of one test, or of a program of tests/c; None for a hang."""
    if is_program(killer):
        return run_c_test(place.tree, log, place.link_c_test(killer))
    return run_pytest(place.tree, log, [killer])


def try_mutant(place, mutant, killers):
    """(killer, its end) of the first killer that notices the mutant; (None, "") if none does."""
    log = place.tree / "test.log"
    try:
        place.apply(mutant, killers)
        if not all(map(is_program, killers)):
            place.link_module()
        for killer in killers:
            status = run_killer(place, killer, log)
            if status is None:
                return killer, "hang"
            if status < 0:
                return killer, signal.Signals(-status).name
            if status:
                text = log.read_text(errors="replace")
                failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", text, re.MULTILINE)
                return killer, failed.group(1) if failed else f"status {status}"
        return None, ""
    finally:
        place.restore(mutant, killers)


worker = {}


def start_worker(build, numbers):
    worker["place"] = Place(build, numbers.get())


def work(job):
    mutant, killers = job
    start = time.monotonic()
    try:
        result = try_mutant(worker["place"], mutant, killers)
    except BadList as error:
        return mutant, "error", str(error), 0
    except subprocess.CalledProcessError:
        return mutant, "error", f"{mutant.name}: does not link", 0
    return mutant, *result, time.monotonic() - start


def work_through(build, jobs):
    """Yields the results as they come."""
    import pytest  # noqa: F401  the children find it imported

    fork = multiprocessing.get_context("fork")
    numbers = fork.SimpleQueue()
    for number in range(WORKERS):
        numbers.put(number)
    with fork.Pool(WORKERS, start_worker, (build, numbers)) as pool:
        yield from pool.imap_unordered(work, jobs)


# --- the command


def show_that_killers_pass(build, killers, *, sampled=False):
    """Each killer must pass on the unchanged sources: a test that fails or is skipped there shows
    nothing."""
    place = Place(build, 0)
    place.link_module()  # the module may still have the last change
    log = build.folder / "unchanged.log"
    programs = [killer for killer in killers if is_program(killer)]
    tests = [killer for killer in killers if not is_program(killer)]
    for program in programs:
        if run_killer(place, program, log) != 0:
            raise SystemExit(f"{program} fails on the unchanged sources:\n{log.read_text()}")
    status = run_pytest(place.tree, log, tests, sampled=sampled) if tests else 0
    text = log.read_text() if tests else ""
    if status is None:
        raise SystemExit(f"a killer hangs on the unchanged sources:\n{text[-4000:]}")
    if status != 0 or ("skipped" in text and all(map(is_one, tests))):
        raise SystemExit(f"a killer fails or is skipped on the unchanged sources:\n{text[-4000:]}")
    print(f"{len(tests)} tests and {len(programs)} C programs pass on the unchanged sources")


def judge(killed, all_killed=ALL_KILLED, gate=GATE):
    """The table of kinds, and the kinds that miss their share; `killed` has the kind of each
    mutant, and whether it was killed."""
    counts = collections.defaultdict(lambda: [0, 0])
    for kind, died in killed:
        counts[kind][0] += died
        counts[kind][1] += 1
    total = [sum(column) for column in zip(*counts.values(), strict=True)]
    lines = [f"{kind:10} {dead:3} of {made:3}" for kind, (dead, made) in sorted(counts.items())]
    lines.append(f"{'all':10} {total[0]:3} of {total[1]:3}")
    missed = [
        kind for kind in all_killed if counts[kind][0] < counts[kind][1] or not counts[kind][1]
    ]
    if total[0] < gate * total[1]:
        missed.append("all")
    return lines, missed


def harmless_change(mutants):
    """A mutation that adds a comment, and a killer that must not notice it, if possible a test in
    Python."""
    first = min(mutants, key=lambda mutant: is_program(mutants[mutant]))
    comment = first._replace(kind="none", end=first.start, new="/* changed */")
    return comment, mutants[first]


def changed_lines(diff):
    """{source: its lines that are new}, of a diff without context."""
    lines, file = collections.defaultdict(set), None
    for line in diff.splitlines():
        if line.startswith("+++ "):
            file = line.removeprefix("+++ b/").removeprefix(f"{SOURCES}/")
        elif hunk := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            first, count = int(hunk[1]), int(hunk[2] or 1)
            lines[file] |= set(range(first, first + count))
    return {file: new for file, new in lines.items() if (ROOT / SOURCES / file).is_file()}


def mutants_of(diff, listed):
    """{mutation in a changed line: its tests}, a few of each kind."""
    found = []
    for file, lines in changed_lines(diff).items():
        text = (ROOT / SOURCES / file).read_text()
        found += [m for m in mutations_of(file) if not lines.isdisjoint(m.lines(text))]
    found = [m for m in found if not is_equivalent(listed.get(m, ""))]
    few = drawn(found, FEW, SEED)
    return {m: [listed[m]] if m in listed else tests_of(m) for m in few}


def named_headers(text):
    """The names that a source includes, such as "memory/plan.h"."""
    return set(re.findall(r'^[ \t]*#[ \t]*include "(.+?)"', text, re.MULTILINE))


def headers_of(program):
    """The headers of the sources that a program of tests/c includes, itself or through other files
    of that folder."""
    named, waiting = set(), [program]
    while waiting:
        new = named_headers(waiting.pop().read_text()) - named - {"world.h"}
        named |= new
        waiting += [program.parent / name for name in new if "/" not in name]
    return named


def tests_of(mutation):
    """The C programs with the name of its source or with its header, the tests that MAPPED has for
    its source, and those of its kind. A source without a header counts with the headers of its
    folder that it includes."""
    file = mutation.file
    source = SOURCES / file
    headers = {str(Path(file).with_suffix(".h"))}
    if not (ROOT / source).with_suffix(".h").is_file():
        near = included_files(ROOT, str(source))
        headers = {
            str(Path(h).relative_to(SOURCES)) for h in near if Path(h).parent == source.parent
        }
    programs = sorted((ROOT / "tests" / "c").glob("test_*.c"))
    found = [
        str(p.relative_to(ROOT))
        for p in programs
        if p.name.startswith(f"test_{source.stem}") or not headers.isdisjoint(headers_of(p))
    ]
    for line in MAPPED.read_text().splitlines():
        name, _, tests = line.partition(": ")
        found += tests.split() if name == file else []
    return found + TESTS_OF_KIND.get(mutation.kind, [])


def run(build, mutants, all_killed):
    """Runs {mutant: its killers}. Returns whether enough of them are killed, and what noticed them:
    single tests, or whole killers whose logs name no test."""
    killed, noticed, ok = [], set(), True
    for mutant, killer, end, _ in work_through(build, mutants.items()):
        if killer == "error":
            print(f"ERROR {end}")
            ok = ok and not all_killed  # some changes of the lines of a diff do not compile
        elif mutant.kind == "none":
            if killer is not None:
                print(f"ERROR: a comment was noticed: {end}")
                ok = False
        else:
            killed.append((mutant.kind, killer is not None))
            if killer is None:
                print(f"survived: {mutant.name} ({', '.join(mutants[mutant])})")
                continue
            noticed.add(end if "::" in end else killer)
            if end == "hang":
                print(f"hangs, which counts as killed: {mutant.name}")
    lines, missed = judge(killed, all_killed)
    print("\n".join(lines))
    if missed:
        print(f"too few: {', '.join(missed)}")
    return ok and not missed, noticed


def survey(build, mutants):
    """Prints a line of the list for each mutant that its tests kill."""
    for mutant, killer, end, seconds in work_through(build, mutants.items()):
        noticed = end if killer and "::" in end else killer
        print(f"{mutant.name}: {noticed}  # {end}, {seconds:.0f} s", flush=True)


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help="with --survey, tests")
    parser.add_argument("--survey", action="store_true", help="mutants from standard input")
    parser.add_argument("--half", type=int, choices=(0, 1), help="every second listed mutant")
    parser.add_argument("--diff", type=argparse.FileType(), help="without context, to src")
    return parser.parse_args(arguments)


def chosen(listed, half):
    """{mutation: [its killer]} of those that can be killed, or of one half of each kind."""
    found = [(m, [killer]) for m, killer in listed.items() if not is_equivalent(killer)]
    found.sort(key=lambda pair: pair[0].kind)
    return dict(found if half is None else found[half::2])


def wanted(options, listed):
    """{mutation: its killers} of those that the options ask for."""
    if options.survey:
        found = map(find, sys.stdin.read().splitlines())
        return {mutation: options.names or tests_of(mutation) for mutation in found}
    if options.diff:
        return mutants_of(options.diff.read(), listed)
    return chosen(listed, options.half)


def main(arguments=None):
    options = parse(arguments)
    mutants = wanted(options, read_list())
    if not mutants:
        print("no mutants in these lines")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        killers = sorted({killer for tests in mutants.values() for killer in tests})
        build = Build(Path(folder), killers)
        if options.diff:  # killers are whole files, in which few tests notice anything
            enough, noticed = run(build, mutants, ())
            show_that_killers_pass(build, sorted(noticed), sampled=True)
            return 0 if enough else 1
        show_that_killers_pass(build, killers)
        if options.survey:
            survey(build, mutants)
            return 0
        comment, killer = harmless_change({m: tests[0] for m, tests in mutants.items()})
        enough, _ = run(build, {comment: [killer], **mutants}, ALL_KILLED)
        return 0 if enough else 1


if __name__ == "__main__":
    sys.exit(main())
