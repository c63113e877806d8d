"""managedmem.tune(): its arguments, its result, and what the result can be turned into."""

import ctypes
import functools
import gc
import json
import re
import textwrap

import pytest

import managedmem
from constants import KIB, MIB
from driver import capturing, raw_driver
from managedmem import Device, Host, MigrationPolicy, PrefetchPlan, Stream, emulator
from managedmem.typing import TuneResult, TuneUnstableError
from programs import run_python
from step_costs import RUN, Noise, tuned
from threads import at_once

np = pytest.importorskip("numpy", reason="needs NumPy")


NO_ADVICE = {"read_mostly": False, "preferred_location": None, "accessed_by": []}
DISCARDS = managedmem._managedmem._driver_info()["version"] >= 13000


@pytest.fixture
def x():
    with managedmem.empty(2 * MIB, name="x") as buffer:
        yield buffer


@pytest.fixture
def y():
    with managedmem.empty(2 * MIB, name="y") as buffer:
        yield buffer


def nothing():
    pass


def fill():
    pytest.fail("an argument is refused before any run")


def a_coroutine():
    async def found():
        pass

    return found


class TestArguments:
    @pytest.mark.parametrize(
        ("step", "error", "text"),
        [
            (3, TypeError, "step must be callable, or a list or tuple of callables, got 3"),
            ([], ValueError, "step has no phases"),
            ([fill, 3], TypeError, r"step\[1\] must be callable, or a pair \(name, callable\)"),
            ([fill, fill], ValueError, r"step\[0\] and step\[1\] are both named 'fill'"),
            ([("a", fill), ("a", nothing)], ValueError, "both named 'a'"),
            ([("", fill)], ValueError, r"step\[0\] has an empty name"),
            (a_coroutine(), TypeError, "must not be a coroutine function"),
        ],
    )
    def test_step(self, x, step, error, text):
        with pytest.raises(error, match=text):
            managedmem.tune(step, x)

    @pytest.mark.parametrize(
        ("more", "error", "text"),
        [
            ({"pairs": 4}, ValueError, "pairs must be at least 5, got 4"),
            ({"pairs": 5.0}, TypeError, "pairs must be an int, got 5.0"),
            ({"pairs": True}, TypeError, "pairs must be an int, got True"),
            ({"warmup": -1}, ValueError, "warmup must be at least 0, got -1"),
            ({"max_seconds": "a"}, TypeError, "max_seconds must be a number, got 'a'"),
            (
                {"max_seconds": float("nan")},
                ValueError,
                "max_seconds must be at least 0 and finite",
            ),
            (
                {"max_seconds": float("inf")},
                ValueError,
                "max_seconds must be at least 0 and finite",
            ),
            ({"min_gain": 1.0}, ValueError, "min_gain must be at least 0 and below 1"),
            ({"min_gain": -0.1}, ValueError, "min_gain must be at least 0 and below 1"),
            ({"max_noise": -1}, ValueError, "max_noise must be at least 0"),
            ({"verify": 3}, TypeError, "verify must be callable or None, got 3"),
            ({"keep": 1}, TypeError, "keep must be True or False, got 1"),
            ({"points": ["read"]}, ValueError, "points has 'read'; the phases are fill"),
            ({"points": 5}, TypeError, r"points must be names of phases \(fill\), got 5"),
            ({"disposable": ["z"]}, ValueError, "disposable has 'z', which buffers does not have"),
            ({"disposable": "z"}, ValueError, "disposable has 'z', which buffers does not have"),
            ({"disposable": {"x": "read"}}, ValueError, "phase 'read' overwrites 'x'; the phases"),
        ],
    )
    def test_numbers_and_choices(self, x, more, error, text):
        with pytest.raises(error, match=text):
            managedmem.tune(fill, {"x": x}, **more)

    def test_memory(self, x):
        part = x[: KIB * 8]
        closed = managedmem.empty(4096)
        closed.close()
        for buffers, error, text in (
            ({3: x}, TypeError, "the names of buffers must be non-empty str, got 3"),
            ({"": x}, TypeError, "the names of buffers must be non-empty str, got ''"),
            ({"n": np.zeros(4096)}, ValueError, "buffer 'n': address .* is (not .*)?system memory"),
            ([3], TypeError, r"buffer 'buffers\[0\]': a target must be a ManagedBuffer"),
            (closed, RuntimeError, r"buffer 'buffers\[0\]': ManagedBuffer is closed"),
            ({"x": x, "part": part}, ValueError, "buffers 'x' and 'part' overlap"),
            ([x, x], ValueError, r"overlap: give each byte once"),
        ):
            with pytest.raises(error, match=text):
                managedmem.tune(fill, buffers)

    @pytest.mark.skipif(not DISCARDS, reason="needs CUDA 13.0")
    def test_disposable_memory_must_be_discardable(self, x):
        read_only = x.__cuda_array_interface__ | {"data": (x.handle, True)}

        class ReadOnly:
            __cuda_array_interface__ = read_only

        for name, target, text in (
            ("part", x[100:200], "they hold no whole page of 4096 bytes"),
            ("frozen", ReadOnly(), "cannot discard a read-only target"),
        ):
            with pytest.raises(ValueError, match=f"disposable '{name}': .*{text}"):
                managedmem.tune(fill, {name: target}, disposable=[name])

    def test_a_capture_is_refused(self, x):
        with Stream() as stream, capturing(stream) as capture:
            with pytest.raises(RuntimeError, match="would end the capture of a CUDA graph"):
                managedmem.tune(fill, x)
        assert capture.result == 0

    @pytest.mark.usefixtures("current_device")
    def test_a_capture_is_refused_without_a_source_of_events(self, x):
        driver, handle = raw_driver(), ctypes.c_void_p()
        Device(0).set_current()
        assert driver.cuStreamCreate(ctypes.byref(handle), 0) == 0  # a blocking one
        with managedmem.trace(), capturing(Stream.from_handle(handle.value)) as capture:
            with pytest.raises(RuntimeError, match="would end the capture of a CUDA graph"):
                managedmem.tune(fill, x)
        assert driver.cuStreamDestroy_v2(handle) == 0
        assert capture.result == 0

    @pytest.mark.emulator_only
    def test_a_short_time_is_refused(self, x, clock):
        with pytest.raises(ValueError, match=r"max_seconds=0\.01 is too short.*Give max_seconds="):
            tuned(lambda: clock.spend(RUN), x, clock, max_seconds=0.01)


class TestNames:
    def test_phases(self):
        phases_of = managedmem._tune.phases_of

        def names(step):
            return [phase.name for phase in phases_of(step)]

        assert names(fill) == ["fill"]
        assert names(("x y", fill)) == ["x y"]
        assert names(lambda: None) == ["step"]
        assert names(functools.partial(fill)) == ["step"]
        assert names([fill, lambda: None, lambda: None]) == ["fill", "phase_2", "phase_3"]
        assert names((fill, ("read", nothing))) == ["fill", "read"]

    def test_targets(self, x, y):
        named = managedmem._tune.named_targets
        assert list(named(x)) == ["x"]
        assert list(named([x, y])) == ["x", "y"]
        assert list(named(iter([x, y]))) == ["x", "y"]
        assert list(named((x[:4096], x[4096:]))) == ["buffers[0]", "buffers[1]"]
        with managedmem.empty(4096) as other, managedmem.empty(4096, name="buffers[0]") as odd:
            assert list(named([other, x])) == ["buffers[0]", "x"]
            assert list(named([other, odd])) == ["buffers[0]", "buffers[1]"]
            assert list(named(other)) == ["buffers[0]"]
            assert list(named(memoryview(other))) == ["buffers[0]"]


@pytest.fixture
def result(x, y, clock, steps):
    """x is written by the host and read by the device, y the other way round."""
    filled = [("fill", lambda: steps.host_writes(x))]
    step = [
        *filled,
        ("compute", lambda: (steps.device_uses(x), steps.device_uses(y, write=True))),
        ("read", lambda: steps.host_reads(y)),
    ]
    found = tuned(step, [x, y], clock, disposable=["y"])
    yield found
    MigrationPolicy.default().apply([x, y])


@pytest.mark.emulator_only
class TestResult:
    def test_numbers(self, result):
        assert result.speedup == pytest.approx(result.before.median / result.after.median)
        assert result.speedup > 1.5
        assert result.gain.median == pytest.approx(result.before.median - result.after.median)
        assert len(result.pairs) == 5
        assert result.phases == ("fill", "compute", "read")
        assert result.evidence == "emulator, 2 traced runs"
        assert result.machine["emulated"] is True
        assert {t.verdict for t in result.trials} > {"kept"}
        assert len({*result.trials, *result.trials}) == len(result.trials)
        for trial in result.trials:
            text = f"<TuneTrial change={trial.change!r} rule={trial.rule!r} reason={trial.reason!r}"
            assert repr(trial) == f"{text} gain={trial.gain} verdict={trial.verdict!r}>"
            if trial.verdict == "kept":
                assert trial.gain.low > 0.03 * min(first for first, _ in trial.pairs)
        assert repr(result).startswith("<TuneResult speedup=")

    def test_the_advice_is_left_applied(self, result, x, y):
        for name, buffer in (("x", x), ("y", y)):
            expected = result.policies.get(name, MigrationPolicy())
            assert MigrationPolicy.of(buffer) == expected

    def test_text(self, result):
        text = str(result)
        assert f"{result.speedup:.2f} x as fast" in text
        assert "noise 0.0% of a run, evidence emulator, 2 traced runs" in text
        for trial in result.trials:
            assert " ".join(trial.reason.split()) in " ".join(text.split())
        assert max(map(len, text.splitlines())) <= 100

    def test_html(self, result):
        import xml.etree.ElementTree as tree

        root = tree.fromstring(result._repr_html_())
        rows = root.findall(".//tbody/tr")
        assert len(rows) == len(result.trials)
        assert rows[0].findall("td")[3].text == "kept"
        assert "<script" not in result._repr_html_()

    def test_picture(self, result):
        matplotlib = pytest.importorskip("matplotlib", reason="needs matplotlib")
        matplotlib.use("Agg")
        from matplotlib import pyplot

        ax = result.plot()
        labels = [text.get_text().replace("\n", " ") for text in ax.get_yticklabels()]
        tried = sorted((t for t in result.trials if t.pairs), key=lambda t: t.verdict != "kept")
        tried = tried[:20]
        assert len(labels) == len(tried) + 1
        assert labels[-1] == "all kept changes"
        for label, trial in zip(labels, tried, strict=False):
            assert trial.change.startswith(label.removesuffix(" ..."))
        bars = [patch.get_width() for patch in ax.patches if abs(patch.get_height() - 0.6) < 1e-9]
        last = 100 * result.gain.median / result.before.median
        assert bars[len(tried)] == pytest.approx(last, rel=0.01)
        assert min(bars) >= -100
        assert "%" in ax.get_xlabel()
        assert f"{result.speedup:.2f} x" in ax.get_title()
        _, given = pyplot.subplots()
        assert result.plot(ax=given) is given
        with pyplot.style.context("dark_background"):
            dark = result.plot()
        assert {line.get_color() for line in dark.lines} == {dark.spines["left"].get_edgecolor()}
        dark.figure.canvas.draw()
        pyplot.close("all")

    def test_json(self, result, x, y, tmp_path):
        path = tmp_path / "found.json"
        result.to_json(path)
        loaded = TuneResult.from_json(path)
        assert loaded.to_dict() == result.to_dict() == json.loads(path.read_text())
        assert str(loaded) == str(result)
        for name in ("plans", "discards", "step"):
            with pytest.raises(RuntimeError, match="this result was loaded: apply"):
                getattr(loaded, name)
        MigrationPolicy.default().apply([x, y])
        assert loaded.apply([x, y]) is loaded
        for name, policy in result.policies.items():
            assert MigrationPolicy.of({"x": x, "y": y}[name]) == policy
        assert plan_texts(loaded.plans) == plan_texts(result.plans)
        assert plan_texts(loaded.discards) == plan_texts(result.discards)

    def test_a_loaded_result_gets_a_step(self, result, x, y, tmp_path):
        result.to_json(tmp_path / "found.json")
        loaded = TuneResult.from_json(tmp_path / "found.json")
        with pytest.raises(ValueError, match="step must have the phases fill, compute, read, got"):
            loaded.apply([x, y], step=fill)
        with pytest.raises(ValueError, match=r"buffers lacks '[xy]'"):
            loaded.apply({"z": x})
        ran = []
        step = [(name, lambda name=name: ran.append(name) or name) for name in result.phases]
        assert loaded.apply([x, y], step=step).step() == result.phases
        assert tuple(ran) == result.phases

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "x = 1",
            "[]",
            "{}",
            '{"version": 2}',
            '{"version": 1}',
            '{"version": 1, "phases": 3}',
        ],
    )
    def test_other_json_is_refused(self, tmp_path, text):
        path = tmp_path / "other.json"
        path.write_text(text)
        with pytest.raises(ValueError, match=r"other.json is not a result of tune\(\)"):
            TuneResult.from_json(path)

    def test_paths_are_no_file_descriptors(self, result):
        for method in (result.to_json, TuneResult.from_json):
            with pytest.raises(
                TypeError, match=r"expected str, bytes or os\.PathLike object, not int"
            ):
                method(1)

    @pytest.mark.parametrize(
        ("key", "value", "reason"),
        [
            ("phases", [], "phases must be different names"),
            ("phases", ["a", "a"], "phases must be different names"),
            ("phases", "step", "phases must be a list, got str"),
            ("phases", [["a"]], "each of phases must be a str, got list"),
            ("policies", {"x": 3}, "each of policies must be a dict, got int"),
            ("policies", {"x": {**NO_ADVICE, "read_mostly": "0\nevil()"}}, "read_mostly takes"),
            ("policies", {"x": {**NO_ADVICE, "accessed_by": "Host()"}}, "must be a list, got str"),
            ("policies", {"x": {**NO_ADVICE, "preferred_location": 1}}, "a str, got int"),
            ("prefetches", {"fill": [["x", "Host()\nevil()"]]}, "is not a location"),
            ("prefetches", {"fill": [["x", f"Device({10**30})"]]}, "out of range"),
            ("prefetches", {"fill": [[["x"], "Host()"]]}, "must be a str, got list"),
            ("prefetches", {"fill": [["x"]]}, "pairs of a name and a location"),
            ("discards", {"other": []}, "discards has 'other', which is not a phase"),
            ("before", {"median": "1", "low": 1, "high": 1}, "before must be a number, got str"),
            ("after", {"median": 10**400, "low": 1, "high": 1}, "too large"),
            ("before", {"median": 1}, "missing 2 required"),
            ("noise", "a lot", "noise must be a number, got str"),
            ("seconds", True, "seconds must be a number, got bool"),
            ("pairs", [[1, 2, 3]], "2 numbers, got 3"),
            ("notes", [1], "each of notes must be a str, got int"),
            ("machine", [["a", "b"]], "machine must be a dict, got list"),
            ("trials", [{}], "it lacks 'change'"),
        ],
    )
    def test_values_of_other_types_are_refused(self, result, tmp_path, key, value, reason):
        path = tmp_path / "other.json"
        path.write_text(json.dumps({**result.to_dict(), key: value}))
        with pytest.raises(ValueError, match=re.escape(f"{path} is not a result of tune(): ")) as e:
            TuneResult.from_json(path)
        assert reason in str(e.value)

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            *(("change", 1), ("verdict", None), ("evidence", {"moved": "all"}), ("estimate", "1")),
            *(("cost", None), ("gain", 1), ("pairs", []), ("more", 1)),
        ],
    )
    def test_trials_of_other_types_are_refused(self, result, tmp_path, key, value):
        path = tmp_path / "other.json"
        found = result.to_dict()
        tried = next(trial for trial in found["trials"] if trial["gain"])
        path.write_text(json.dumps({**found, "trials": [{**tried, key: value}]}))
        with pytest.raises(ValueError, match=r"is not a result of tune\(\): "):
            TuneResult.from_json(path)

    def test_deep_json_is_refused(self, tmp_path):
        path = tmp_path / "deep.json"
        path.write_text('{"version": 1, "machine": ' + "[" * 100_000 + "]" * 100_000 + "}")
        with pytest.raises(ValueError, match=r"is not a result of tune\(\): not JSON"):
            TuneResult.from_json(path)

    def test_python_of_names_that_only_look_alike(self, result, tmp_path):
        """Python reads the ligature as f and i, and wide letters as plain ones."""
        names = ["\ufb01t", "fit", "\uff42uffers"]
        found = result.to_dict()
        found |= {"phases": names, "policies": {}, "discards": {}, "trials": []}
        found["prefetches"] = {name: [["x", "Host()"]] for name in names[:2]}
        path = tmp_path / "found.json"
        path.write_text(json.dumps(found))
        text = TuneResult.from_json(path).to_python()
        ran = []
        phases = {name: functools.partial(ran.append, name) for name in names}
        with managedmem.empty(1) as x:
            space = {"buffers": {"x": x}, "phases": phases, "fit": phases["fit"]}
            exec(text, space)
            assert len([v for v in space.values() if isinstance(v, PrefetchPlan)]) == 2
            space["tuned_step"]()
        assert ran == names

    def test_python_does_the_same(self, result, x, y):
        MigrationPolicy.default().apply([x, y])
        ran = []
        names = {phase: functools.partial(ran.append, phase) for phase in result.phases}
        space = {"buffers": {"x": x, "y": y}, **names}
        exec(result.to_python(), space)
        for name, buffer in (("x", x), ("y", y)):
            expected = result.policies.get(name, MigrationPolicy())
            assert MigrationPolicy.of(buffer) == expected
        made = {k: v for k, v in space.items() if isinstance(v, PrefetchPlan)}
        expected = {f"before_{k}": v for k, v in result.plans.items()}
        expected |= {f"discards_before_{k}": v for k, v in result.discards.items()}
        assert plan_texts(made) == plan_texts(expected)
        space["tuned_step"]()
        assert tuple(ran) == result.phases

    def test_python_of_odd_names(self, x, clock, steps):
        odd = "it's {x}\n"
        clock.in_place = 1e-6
        step = [
            ("phase 1", lambda: steps.host_writes(x)),
            ("class", lambda: steps.device_uses(x, write=True)),
            ("tuned_step", lambda: clock.spend(RUN)),
        ]
        found = tuned(step, {odd: x}, clock)
        assert set(found.plans) == {"phase 1", "class"}
        ran = []
        phases = {name: functools.partial(ran.append, name) for name, _ in step}
        space = {"buffers": {odd: x}, "phases": phases}
        exec(found.to_python(), space)
        comment = "# `phases` maps names to functions: 'phase 1', 'class', 'tuned_step'."
        assert comment in found.to_python().splitlines()
        space["tuned_step"]()
        assert ran == ["phase 1", "class", "tuned_step"]
        assert plan_texts(found.plans) == {
            "phase 1": plan_texts(space)["before_1"],
            "class": plan_texts(space)["before_class"],
        }

    def test_python_of_many_names_is_wrapped(self, result, x, y, tmp_path):
        result.to_json(tmp_path / "found.json")
        policy = MigrationPolicy(preferred_location=Host(), accessed_by={Device(0)})
        found = TuneResult.from_json(tmp_path / "found.json")
        found.policies = {"layers.0.weight": policy, "layers.1.weight": policy}
        text = found.to_python()
        assert max(map(len, text.splitlines())) <= 100
        MigrationPolicy.default().apply([x, y])
        both = {"layers.0.weight": x, "layers.1.weight": y, "x": x, "y": y}
        exec(text, {"buffers": both})
        assert MigrationPolicy.of(x) == MigrationPolicy.of(y) == policy

    def test_the_step_runs_with_its_plans(self, result):
        with emulator.recording() as calls:
            found = result.step()
        assert len(found) == 3
        moving = [c.name for c in calls if "Prefetch" in c.name]
        assert len(moving) >= len(result.plans) + len(result.discards)

    def test_collections_stay_out_of_the_runs(self, x, clock):
        states = []

        def step():
            states.append(gc.isenabled())
            clock.spend(RUN)

        assert gc.isenabled()
        tuned(step, x, clock)
        assert gc.isenabled()
        assert states.count(True) == managedmem._tune.TRACED_RUNS


def plan_texts(plans):
    return {
        name: [(e.pointer, e.nbytes, str(e.location)) for e in plan]
        for name, plan in plans.items()
        if isinstance(plan, PrefetchPlan)
    }


@pytest.mark.emulator_only
class TestTargets:
    def test_parts_and_memory_of_others(self, x, y, clock, steps):
        class Array:
            __cuda_array_interface__ = y.__cuda_array_interface__

        half = x[: 1 * MIB]

        def fill():
            steps.host_writes(half)
            steps.host_writes(y)

        def compute():
            steps.device_uses(half, write=True)
            steps.device_uses(y, write=True)

        clock.in_place = 0
        found = tuned([fill, compute], {"half": half, "foreign": Array()}, clock)
        assert set(found.policies) == {"half", "foreign"}
        assert MigrationPolicy.of(y) == MigrationPolicy.of(half) == found.policies["half"]
        assert MigrationPolicy.of(x[MIB:]) == MigrationPolicy.default()

    def test_another_thread(self, x, y, clock, steps):
        step = [lambda: steps.host_writes(x), lambda: steps.device_uses(x, write=True)]
        (found,) = at_once(lambda: tuned(step, [x, y], clock))
        assert found.speedup > 1.1
        assert found.phases == ("phase_1", "phase_2")

    def test_the_device_of_the_moves(self, x, clock, device1):
        def fill():
            memoryview(x)[:] = bytes(x.nbytes)
            clock.spend(RUN)

        def compute():
            emulator.touch(x, device1, write=True)
            clock.spend(RUN)

        found = tuned([fill, compute], x, clock)
        (policy,) = found.policies.values()
        assert policy == MigrationPolicy(preferred_location=Host(), accessed_by=[device1])
        prefetches = [trial.change for trial in found.trials if "before compute" in trial.change]
        assert prefetches
        assert all("prefetch x to Device(1) before compute" in text for text in prefetches)


@pytest.mark.emulator_only
class TestMachines:
    """Programs on emulated machines that lack something."""

    PROGRAM = """
        import managedmem
        from managedmem import Device, emulator
        from outcomes import refusal
        from step_costs import StepClock, Steps, tuned

        x, y = (managedmem.empty(2 << 20, name=name) for name in "xy")
        clock = StepClock()
        steps = Steps(clock)
        clock.in_place = 1e-6

        def fill():
            steps.host_writes(x)
            steps.host_writes(y)

        def compute():
            steps.device_uses(x, write=True)
            steps.device_uses(y, write=True)

    """

    def run(self, program, emulated):
        run_python(
            textwrap.dedent(self.PROGRAM) + textwrap.dedent(program),
            emulator=f"{emulated},schedule=eager",
        )

    def test_disposable_needs_cuda_13(self):
        self.run(
            """
            text = refusal(
                NotImplementedError,
                lambda: managedmem.tune([fill, compute], [x, y], disposable=[x]),
            )
            assert "disposable= needs a driver of CUDA 13.0 or newer" in text, text
            assert text.endswith("this one is of CUDA 12.2"), text
            assert tuned([fill, compute], [x, y], clock).speedup > 1.1
            """,
            "profile=old12",
        )

    def test_devices_without_concurrent_access_get_nothing(self):
        self.run(
            """
            result = tuned([fill, compute], [x, y], clock)
            assert not result.trials
            text = "Device(0) has no concurrent_managed_access"
            assert any(note.startswith(text) for note in result.notes), result
            """,
            "profile=wsl",
        )

    def test_a_small_device_is_not_filled(self):
        self.run(
            """
            free = Device(0).memory_info.free
            assert free < 4.4 * 2**20, free
            result = tuned([fill, compute], [x, y], clock)
            for trial in result.trials:
                assert "prefetch x, y to Device(0)" not in trial.change, trial
            assert any(trial.rule == "R7" for trial in result.trials), result
            text = "not tried: with what was kept, it would fill a device"
            assert any(trial.verdict == text for trial in result.trials), result
            (plan,) = [plan for phase, plan in result.plans.items() if phase == "compute"]
            assert plan.nbytes == 2 << 20
            """,
            "devices=1,capacity_mib=4",
        )


@pytest.mark.emulator_only
def test_without_a_gain_nothing_changes(x, clock):
    with MigrationPolicy.prefer(Host()).applied(x):
        found = tuned(lambda: clock.spend(RUN), x, clock)
        assert MigrationPolicy.of(x) == MigrationPolicy.prefer(Host())
    assert (found.speedup, found.gain, found.policies, found.plans) == (1.0, None, {}, {})
    assert "no change was proved to gain" in str(found)
    assert "the runs moved nothing by faults" in str(found)
    assert found.to_python().splitlines()[0] == "# managedmem.tune() proved no change."
    exec(found.to_python(), {"step": nothing})
    assert "<table" not in found._repr_html_()


@pytest.mark.emulator_only
class TestCounts:
    """On the emulated driver, bytes and faults decide."""

    @pytest.fixture
    def table(self):
        with managedmem.empty(2 * MIB, name="table") as buffer:
            memoryview(buffer)[:] = bytes(buffer.nbytes)
            yield buffer

    @staticmethod
    def tune(step, buffers, **more):
        return managedmem.tune(step, buffers, **{"pairs": 5, "warmup": 1, "keep": False, **more})

    @pytest.fixture
    def found(self, table):
        """A device and numpy() read it in turn."""

        def use():
            emulator.touch(table, Device(0))

        def look():
            return table.numpy().sum()

        return self.tune([use, look], table)

    def test_numbers(self, found):
        assert found.judged_by == "bytes and faults"
        assert found.policies == {"table": MigrationPolicy.read_duplicated()}
        assert found.counts["bytes"] == (4 * MIB, 0)
        assert found.counts["faults"][0] > found.counts["faults"][1] == 0
        assert (found.speedup, found.gain, found.pairs) == (1.0, None, ())
        assert found.noise == 0
        kept = [trial for trial in found.trials if trial.verdict == "kept"]
        assert [trial.rule for trial in kept] == ["R3"]
        assert kept[0].evidence["viewed"] == 2 * MIB
        assert "2.0M to the host by numpy()" in kept[0].reason
        for trial in found.trials:
            assert (trial.gain, trial.estimate) == (None, None)
            assert set(trial.counts) == {"bytes", "faults"}

    def test_use_in_place_has_bytes(self, found):
        (trial,) = [trial for trial in found.trials if trial.rule == "R5"]
        assert trial.counts["bytes"] == (4 * MIB, 2 * MIB)

    def test_texts(self, found):
        faults = found.counts["faults"][0]
        before, after = f"4.0M and {faults} faults", "0 and 0 faults"
        headline = f"{before} -> {after} per run, judged by bytes and faults"
        assert str(found).splitlines()[0] == headline
        assert f"{before} -&gt; {after}" in found._repr_html_()
        assert repr(found).startswith(
            f"<TuneResult judged by bytes and faults: bytes=4194304->0 faults={faults}->0 kept=1 "
        )
        (note,) = [note for note in found.notes if "emulated" in note]
        assert note == (
            "judged by bytes and faults: times of the emulated driver mean nothing for a GPU"
        )
        for text in (str(found), found.to_python()):
            assert " x as fast" not in text
            assert not re.search(r"gain -?\d|\d (ms|us) per run", text)
        first = found.to_python().splitlines()[0]
        assert first == f"# managedmem.tune() on the emulated driver: {headline}."

    def test_json(self, found, tmp_path):
        found.to_json(tmp_path / "found.json")
        data = json.loads((tmp_path / "found.json").read_text())
        assert data["judged_by"] == "bytes and faults"
        assert data["counts"]["bytes"] == [4 * MIB, 0]
        loaded = TuneResult.from_json(tmp_path / "found.json")
        assert loaded.to_dict() == found.to_dict() == data
        assert str(loaded) == str(found)
        for value in (3, {}, {"bytes": [1, 2]}, {"bytes": [1], "faults": [1, 2]}):
            (tmp_path / "bad.json").write_text(json.dumps({**data, "counts": value}))
            with pytest.raises(ValueError, match="is not a result of tune"):
                TuneResult.from_json(tmp_path / "bad.json")
        del data["counts"], data["judged_by"]  # as written before there were counts
        (tmp_path / "old.json").write_text(json.dumps(data))
        assert TuneResult.from_json(tmp_path / "old.json").judged_by == "seconds"

    def test_picture(self, found):
        matplotlib = pytest.importorskip("matplotlib", reason="needs matplotlib")
        matplotlib.use("Agg")
        from matplotlib import pyplot

        ax = found.plot()
        bars = [patch.get_width() for patch in ax.patches if abs(patch.get_height() - 0.3) < 1e-9]
        assert len(bars) == 2 * (len([t for t in found.trials if t.pairs]) + 1)
        assert bars[-2:] == [100, 100]
        assert ax.get_title() == "tune(), judged by bytes and faults"
        assert ax.get_xlabel().startswith("bytes (upper bars) and faults (lower bars)")
        pyplot.close("all")

    def test_prefetches_by_the_user_and_numpy(self, table):
        def step():
            table.prefetch(Device(0))
            return table.numpy().sum()

        found = self.tune(step, table)
        assert found.policies == {"table": MigrationPolicy.read_duplicated()}
        assert "2.0M to the device as requested" in found.trials[0].reason
        assert not any("prefetches of the step" in note for note in found.notes)

    def test_a_device_that_writes(self, table):
        def step():
            emulator.touch(table, Device(0), write=True)
            return table.numpy().sum()

        found = self.tune(step, table)
        assert "R3" not in {trial.rule for trial in found.trials}

    def test_what_numpy_brings_and_the_host_overwrites(self, table):
        def use():
            emulator.touch(table, Device(0))

        def fill():
            table.numpy()[:] = 3

        found = self.tune([fill, use], table, disposable={"table": "fill"})
        assert "discard_prefetch table at Host() before fill" in {t.change for t in found.trials}

    def test_fewer_faults_for_more_bytes_are_no_gain(self, table):
        def use():
            table.prefetch(Host())
            emulator.touch(table[: 512 * KIB], Device(0))

        found = self.tune(use, table)
        assert found.policies == found.plans == {}
        assert str(found).startswith("1.0M and ")
        before, after = found.counts["faults"]
        assert before == after > 0
        assert "no change was proved to gain, judged by bytes and faults" in str(found)

    def test_an_unsteady_step(self, table):
        runs = iter(range(10_000))

        def step():
            table.prefetch(Host())
            emulator.touch(table[: KIB * 64 * (1 + next(runs) % 5)], Device(0))

        with pytest.raises(TuneUnstableError, match="bytes or faults differ by"):
            self.tune(step, table, max_noise=0.01)


def test_a_step_on_the_real_clock(x):
    found = managedmem.tune(
        lambda: x.fill(1), x, pairs=5, warmup=1, max_noise=1000, min_gain=0.9, keep=False
    )
    assert found.before.low <= found.before.median <= found.before.high
    assert MigrationPolicy.of(x) == MigrationPolicy.default()


@pytest.mark.emulator_only
def test_an_unstable_step(x, clock):
    noise = Noise(clock, 1, share=3)
    with pytest.raises(TuneUnstableError, match="varies too much to be tuned: over 5"):
        tuned(noise, x, clock)
