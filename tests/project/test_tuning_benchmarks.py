"""The programs of the groups `tuning` and `npbench` compute what they should, and are compared.

Without CuPy and a GPU, kernels are compiled as C and run on the host. tune() is a stand-in here,
where its answer has to be known.
"""

import json
import math
import os
import re
import shutil
import subprocess
from contextlib import closing, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

import managedmem
from benchmarks import __main__ as command
from benchmarks import npbench, peers, tuning
from benchmarks.interleaved import HIGH, LOW, MEDIAN, Step, interleaved, interval, ratios
from benchmarks.report import cell, section
from benchmarks.um_programs import (
    PROGRAMS,
    BlackScholes,
    ConjugateGradient,
    FFTConvolution,
    FiniteDifferences,
)
from benchmarks.um_programs import fft_convolution as convolution
from benchmarks.um_programs.fdtd import FACTORS, RADIUS
from benchmarks.um_programs.gpu import CuPyGpu, blocks_of
from host_gpu import HostGpu
from managedmem import Device, Host, MigrationPolicy

SMALL = {
    "black_scholes": lambda: BlackScholes(1000, 2),
    "conjugate_gradient": lambda: ConjugateGradient(700, 40),
    "fft_convolution": lambda: FFTConvolution(20, 27),
    "fdtd": lambda: FiniteDifferences((9, 10, 11), 3),
}


TUNE_SECONDS = 1.5


@pytest.fixture(params=["host", "cupy"])
def gpu(request):
    """The host as a device, and a device."""
    if request.param == "cupy":
        cupy = peers.cupy_on_gpu()
        if cupy is None:
            pytest.skip("needs CuPy with a GPU")
        return CuPyGpu(cupy)
    return request.getfixturevalue("host_gpu")


@pytest.fixture
def host_gpu(tmp_path):
    if not shutil.which(os.environ.get("CC", "cc").split()[0]):
        pytest.skip("no C compiler")
    return HostGpu(tmp_path)


def expected_black_scholes(program):
    stock, strike, years = (program.inputs[name].astype(float) for name in program.inputs)
    root = 0.3 * np.sqrt(years)
    one = (np.log(stock / strike) + (0.02 + 0.3**2 / 2) * years) / root
    normal = np.vectorize(lambda x: (1 + math.erf(x / math.sqrt(2))) / 2)
    due = strike * np.exp(-0.02 * years)
    call = stock * normal(one) - due * normal(one - root)
    return call, call - stock + due  # a call less a put is the stock less the strike


def expected_conjugate_gradient(program):
    first, columns, values = program.inputs.values()
    matrix = np.zeros((program.rows, program.rows))
    for row in range(program.rows):
        entries = slice(first[row], first[row + 1])
        matrix[row, columns[entries]] = values[entries]
    solution = np.linalg.solve(matrix, np.ones(program.rows))
    return solution, np.zeros(1)


def expected_fft_convolution(program):
    data, kernel = (program.inputs[name].astype(float) for name in ("data", "kernel"))
    (height, width), (up, left) = convolution.KERNEL, convolution.CENTRE
    around = ((height - 1 - up, up), (width - 1 - left, left))
    padded = np.pad(data, around, mode="edge")
    windows = np.lib.stride_tricks.sliding_window_view(padded, kernel.shape)
    return (np.einsum("yxij,ij->yx", windows, kernel[::-1, ::-1]),)


def expected_fdtd(program):
    now = program.volume.astype(float)
    inner = (slice(RADIUS, -RADIUS),) * 3
    for _ in range(program.steps):
        after = now.copy()
        after[inner] = FACTORS[0] * now[inner]
        for k in range(1, RADIUS + 1):
            for axis in range(3):
                moved = np.roll(now, k, axis) + np.roll(now, -k, axis)
                after[inner] += FACTORS[k] * moved[inner]
        now = after
    return (now,)


EXPECTED = {
    "black_scholes": expected_black_scholes,
    "conjugate_gradient": expected_conjugate_gradient,
    "fft_convolution": expected_fft_convolution,
    "fdtd": expected_fdtd,
}


def spoil(program):
    for array in program.results:
        array.fill(np.nan)


def check(program, expected):
    for found, right in zip(program.results, expected, strict=True):
        np.testing.assert_allclose(found, right, rtol=2e-3, atol=2e-3)


def fake_tune(phases, bufs, *, policies=None, broken=False, **options):
    """As tune(), with a known answer."""

    def step():
        for _, phase in phases:
            phase()
        if broken:
            next(iter(bufs.values())).fill(0)
            phases[1][1]()
            phases[2][1]()

    fake_tune.options = options
    return SimpleNamespace(step=step, policies=policies or {})


class TestPrograms:
    @pytest.mark.parametrize("name", PROGRAMS)
    def test_every_contender_computes_what_numpy_does(self, name, gpu):
        program = SMALL[name]()
        expected = EXPECTED[name](program)
        with closing(tuning.Managed(program, gpu)) as managed:
            steps = managed.by_hand()
            steps["pinned"] = Step(tuning.Explicit(program, gpu).step)
            for step in steps.values():
                step.enter()
                for _ in range(2):
                    spoil(program)
                    step.run()
                    check(program, expected)
                step.leave()

    @pytest.mark.parametrize("name", PROGRAMS)
    def test_contents_may_be_lost_before_they_are_overwritten(self, name, gpu):
        program = SMALL[name]()
        assert set(program.overwritten) == set(program.arrays)
        with closing(tuning.Managed(program, gpu)) as managed:
            for phase in ("fill", "compute", "read"):
                for array, last in program.overwritten.items():
                    if last == phase:
                        managed.host[array].view(np.uint8).fill(0xFF)  # NaN, -1
                getattr(managed, phase)()
            check(program, EXPECTED[name](program))

    @pytest.mark.parametrize("name", PROGRAMS)
    def test_placement_names_arrays(self, name, host_gpu):
        program = SMALL[name]()
        given = program.placement
        with closing(tuning.Managed(program, host_gpu)) as managed:
            managed.give_hints()
            for array, buf in managed.bufs.items():
                assert buf.preferred_location == (Device(0) if array in given.preferred else None)
                assert set(buf.accessed_by) == ({Host()} if array in given.mapped else set())
                assert buf.read_mostly == (array in given.read_mostly)
            managed.unset()
            assert all(MigrationPolicy.of(buf).is_default for buf in managed.bufs.values())
            managed.prefetching_step()
            for array, buf in managed.bufs.items():
                last = Host() if array in given.to_host else None
                last = last or (Device(0) if array in given.to_device else None)
                assert buf.last_prefetch_location == last
        named = {*program.copied_in, *program.copied_out, *program.zeroed}
        assert named <= set(program.arrays)
        assert all(buf.is_closed for buf in managed.bufs.values())

    @pytest.mark.parametrize("name", PROGRAMS)
    def test_kernels_compile_for_a_gpu(self, name, tmp_path):
        nvcc = shutil.which("nvcc")
        if not nvcc:
            pytest.skip("no nvcc")
        source = SMALL[name]().source()
        flags = ["-cubin", "-arch=sm_90", "-Werror", "all-warnings"]
        subprocess.run([nvcc, *flags, "-o", str(tmp_path / "k"), str(source)], check=True)

    @pytest.mark.parametrize("shape", [(1,), (255,), (256,), (1000,), (7, 6), (2, 300), (9, 3, 70)])
    def test_threads_cover_a_shape(self, shape):
        grid, block = blocks_of(shape)
        assert math.prod(block) == 256
        for extent, blocks, threads in zip(reversed(shape), grid, block, strict=False):
            assert blocks * threads >= extent > (blocks - 1) * threads


class TestInterleaved:
    @pytest.mark.parametrize(
        ("count", "first"), [(5, 0), (6, 0), (8, 0), (9, 1), (11, 1), (12, 2), (15, 3), (21, 5)]
    )
    def test_interval_of_a_median(self, count, first):
        """The ranks are those of tables of the sign test."""
        values = list(range(count))[::-1]
        assert interval(values) == (first, count - 1 - first)

    def test_ratios_are_those_of_pairs(self):
        row = ratios("r", [2.0, 40.0, 9.0], [1.0, 10.0, 3.0])
        assert {name: found.median for name, found in row.results.items()} == {
            MEDIAN: 3.0,
            LOW: 2.0,
            HIGH: 4.0,
        }
        assert cell(row.results[LOW], row.unit) == "2.00"

    def test_each_is_entered_warmed_up_and_left_in_turn(self):
        seen = []

        def made(name):
            def run():
                seen.append(name)
                return (np.ones(3),)

            return Step(run, lambda: seen.append("enter"), lambda: seen.append("leave"))

        times = interleaved({name: made(name) for name in "abc"}, 2)
        assert {name: len(values) for name, values in times.items()} == dict.fromkeys("abc", 2)
        runs = [("enter", name, name, "leave") for name in "abcabcbca"]
        assert seen == [word for run in runs for word in run]

    def test_different_results_are_an_error_and_leave_no_state(self):
        left = []
        steps = {
            "one": Step(lambda: (np.ones(3),)),
            "two": Step(lambda: (np.full(3, 1.1),), leave=lambda: left.append(True)),
        }
        with pytest.raises(RuntimeError, match="two and one have different results"):
            interleaved(steps, 1)
        assert left

    def test_a_step_that_computes_nothing_is_noticed(self):
        kept = np.ones(3)
        steps = {"one": Step(lambda: (np.ones(3),)), "two": Step(lambda: (kept,))}
        with pytest.raises(RuntimeError, match="different results"):
            interleaved(steps, 1)


class TestTuning:
    def rows(self, gpu, tune, name="black_scholes"):
        return list(tuning.measure([name], gpu=gpu, tune=tune, programs=SMALL, repetitions=3))

    def test_rows(self, host_gpu):
        rows = self.rows(host_gpu, fake_tune)
        names = ["pinned copies", "plain managed", "hints", "prefetch", "hints, prefetch", "ours"]
        assert list(rows[0].results) == names
        assert all(found.count == 3 for found in rows[0].results.values())
        assert [row.operation for row in rows[1:]] == [
            "BlackScholes: plain managed / ours",
            "BlackScholes: best by hand / ours",
        ]
        assert rows[2].note.endswith("; goal 0.95")
        assert fake_tune.options["max_seconds"] >= tuning.SECONDS
        assert fake_tune.options["keep"] is False
        text = section(command.GROUPS["tuning"], rows)
        assert "Of 1 programs, " in text

    def test_wrong_results_of_ours_are_an_error(self, host_gpu):
        if managedmem.emulator.is_active():
            managedmem.emulator.schedule("eager")  # as host_gpu, which does its work at once
        with pytest.raises(RuntimeError, match="ours and pinned copies have different results"):
            self.rows(host_gpu, lambda *a, **k: fake_tune(*a, broken=True, **k))

    def test_an_unstable_step_is_measured_as_it_is(self, host_gpu):
        def unstable(*_, **__):
            raise managedmem.typing.TuneUnstableError("the floor is 40 %")

        rows = self.rows(host_gpu, unstable)
        assert rows[0].note == "not tuned: TuneUnstableError: the floor is 40 %"

    def test_with_tune_itself(self, host_gpu):
        rows = list(
            tuning.measure(
                ["fdtd"], gpu=host_gpu, programs=SMALL, repetitions=1, seconds=2 * TUNE_SECONDS
            )
        )
        assert rows[0].results["ours"].median > 0
        assert re.match(r"tuned in \d+ s|not tuned: TuneUnstableError", rows[0].note)

    @pytest.mark.emulator_only
    def test_without_a_gpu(self):
        rows = list(tuning.measure())
        text = section(command.GROUPS["tuning"], rows)
        assert "tuning: needs CuPy and a GPU" in text
        assert "|" not in text


PLAIN_MODULE = """
import numpy as np

def initialize(N, datatype=np.float64):
    return np.arange(N, dtype=datatype), np.ones(N)
"""
GPU_MODULE = """
def kernel(alpha, A, B):
    B *= alpha
    return A + 1, B.sum(keepdims=True)
"""
INFO = {
    "module_name": "tiny",
    "func_name": "kernel",
    "relative_path": "folder/tiny",
    "parameters": {"S": {"N": 1000, "alpha": 3.0}},
    "init": {"func_name": "initialize", "input_args": ["N"], "output_args": ["A", "B"]},
    "input_args": ["alpha", "A", "B"],
    "array_args": ["A", "B"],
    "output_args": ["B"],
}


@pytest.fixture
def checkout(tmp_path):
    """A checkout with one program, whose device part is NumPy's."""
    folder = tmp_path / "npbench" / "benchmarks" / "folder" / "tiny"
    folder.mkdir(parents=True)
    (folder / "tiny.py").write_text(PLAIN_MODULE)
    (folder / "tiny_cupy.py").write_text(GPU_MODULE)
    (tmp_path / "bench_info").mkdir()
    (tmp_path / "bench_info" / "tiny.json").write_text(json.dumps({"benchmark": INFO}))
    return tmp_path


class HostArrays(npbench.ManagedArrays):
    """NumPy arrays in managed memory."""

    def __init__(self):
        self.closed = False

    def allocating(self):
        return nullcontext()

    def empty(self, like):
        return np.asarray(managedmem.empty(like.shape, like.dtype))

    def on_host(self, array):
        return array

    def wait(self):
        Device(0).sync()

    def close(self):
        self.closed = True


class TestNPBench:
    def test_step_of_a_program(self, checkout):
        phases = npbench.Phases(npbench.Source.of(checkout, "tiny"), HostArrays())
        for _ in range(2):
            added, total, changed = phases.step()
            assert added.tolist() == list(range(1, 1001))
            assert total.tolist() == [3000]
            assert changed.tolist() == [3] * 1000

    def test_rows(self, checkout):
        made = []

        def make():
            made.append(HostArrays())
            return made[-1]

        policy = {"A": MigrationPolicy.prefer(Device(0))}
        rows = list(
            npbench.measure(
                checkout,
                make=make,
                tune=lambda *a, **k: fake_tune(*a, policies=policy, **k),
                programs=["tiny"],
                repetitions=3,
            )
        )
        assert [row.operation for row in rows] == ["tiny", "tiny: before / after"]
        assert list(rows[0].results) == ["before", "after"]
        assert [memory.closed for memory in made] == [True]
        assert "of 1 programs" in section(command.GROUPS["npbench"], rows)

    @pytest.mark.emulator_only
    def test_without_a_gpu(self, checkout):
        (row,) = npbench.measure(checkout)
        assert row.note == "needs CuPy and a GPU"

    def test_host_sees_memory_of_cupy(self):
        cupy = peers.cupy_on_gpu()
        if cupy is None:
            pytest.skip("needs CuPy with a GPU")
        with closing(npbench.ManagedArrays(cupy)) as memory:
            with memory.allocating():
                array = memory.empty(np.empty((3, 4), np.float32))
            memory.on_host(array)[:] = 2
            array += 1
            memory.wait()
            assert memory.on_host(array).tolist() == [[3.0] * 4] * 3
            with pytest.raises(ValueError, match="not contiguous"):
                memory.on_host(array.T)
            del array
