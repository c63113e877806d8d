"""load_file(), load_model() and save_file(): files of safetensors, and the homes of offload()."""

import gc
import json
import os
import struct
from concurrent.futures import ThreadPoolExecutor

import pytest

from constants import EMULATED
from offloaded import assert_same_module, batch, layers, nn, plain, same
from tensors import DTYPES, mt, torch

DEVICE = 0
STORED = [*DTYPES, torch.int8, torch.int16, torch.int32, torch.uint16, torch.uint32, torch.uint64]


@pytest.fixture
def safetensors():
    """The format's own library."""
    return pytest.importorskip("safetensors.torch", reason="needs safetensors")


def some_tensors():
    generator = torch.Generator().manual_seed(0)
    found = {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 4), "one": torch.ones(1)}
    for dtype in STORED:
        numbers = torch.randint(0, 100, (3, 5), generator=generator).to(dtype)
        found[str(dtype)] = numbers
    return found


def assert_same_tensors(one, other):
    assert set(one) == set(other)
    for name in one:
        assert one[name].shape == other[name].shape, name
        assert same(one[name].view(-1).view(torch.uint8), other[name].view(-1).view(torch.uint8))
        assert one[name].dtype == other[name].dtype


class Block(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.register_buffer("scale", torch.rand(width))
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width, bias=False)

    def forward(self, x):
        return x + self.second(torch.relu(self.first(x))) * self.scale


class Tied(nn.Module):
    """Blocks between an embedding and a head with the same weight."""

    def __init__(self, count=4, width=64):
        super().__init__()
        self.embedding = nn.Linear(width, width, bias=False)
        self.blocks = nn.ModuleList(Block(width) for _ in range(count))
        self.head = nn.Linear(width, width, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture
def model():
    torch.manual_seed(1)
    return Tied()


@pytest.fixture
def file(model, tmp_path):
    path = tmp_path / "model.safetensors"
    mt.save_file(model, path, metadata={"format": "pt"})
    return path


def on_meta():
    with torch.device("meta"):
        return Tied()


def shards(model, folder):
    """Two files with an index, as Transformers writes them."""
    state = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
    names = sorted(state)
    places = {}
    for n, part in enumerate((names[::2], names[1::2])):
        file = f"model-{n + 1}-of-2.safetensors"
        mt.save_file({name: state[name] for name in part}, folder / file)
        places |= dict.fromkeys(part, file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))
    return index


class TestLoadFile:
    def test_of_what_the_formats_library_wrote(self, safetensors, tmp_path):
        tensors = some_tensors()
        safetensors.save_file(tensors, tmp_path / "a.safetensors")
        assert_same_tensors(mt.load_file(tmp_path / "a.safetensors"), tensors)

    def test_is_on_the_cpu_and_outlives_the_file(self, tmp_path):
        path = tmp_path / "a.safetensors"
        mt.save_file({"a": torch.arange(1000.0)}, path)
        found = mt.load_file(str(path))
        path.unlink()
        assert found["a"].device.type == "cpu"
        assert torch.equal(found["a"] + 1, torch.arange(1000.0) + 1)

    @pytest.mark.parametrize("name", ["model.safetensors.index.json", ""])
    def test_of_several_files(self, model, tmp_path, name):
        shards(model, tmp_path)
        found = mt.load_file(tmp_path / name)
        assert_same_tensors(found, {k: v for k, v in model.state_dict().items() if k in found})
        assert len(found) == len(model.state_dict()) - 1

    def test_a_tensor_of_many_pieces(self, tmp_path, monkeypatch):
        monkeypatch.setattr("managedmem.torch._load._PIECE", 1 << 10)
        monkeypatch.setattr("managedmem.torch._files._PIECE", 3000)
        tensor = torch.rand(77, 33)
        mt.save_file({"a": tensor}, tmp_path / "a.safetensors")
        assert same(mt.load_file(tmp_path / "a.safetensors")["a"], tensor)
        halves = mt.load_file(tmp_path / "a.safetensors", dtype=torch.bfloat16)
        assert same(halves["a"], tensor.bfloat16())

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
    def test_in_another_dtype(self, file, model, dtype):
        tensors = {"a": torch.rand(3, 5), "n": torch.arange(4), "e": torch.empty(0)}
        mt.save_file(tensors, file)
        found = mt.load_file(file, dtype=dtype)
        assert same(found["a"], tensors["a"].to(dtype))
        assert same(found["n"], tensors["n"])
        assert found["e"].dtype == dtype

    def test_takes_exactly_its_size(self, file, model, monkeypatch):
        made = []
        make = mt._ranks._Slab

        def noted(*arguments):
            made.append(arguments)
            return make(*arguments)

        monkeypatch.setattr("managedmem.torch._ranks._Slab", noted)
        mt.load_file(file, device=DEVICE)
        total = sum(-(-t.nbytes // 512) * 512 for t in {*model.state_dict(keep_vars=True).values()})
        assert made == [(DEVICE, total, True)]

    @pytest.mark.parametrize(
        ("arguments", "error", "words"),
        [
            ({"dtype": torch.int8}, TypeError, "dtype must be a floating-point"),
            ({"dtype": "float16"}, TypeError, "dtype must be a floating-point"),
            ({"device": "cpu"}, ValueError, "must be a CUDA device"),
            ({"device": 99}, ValueError, "99"),
        ],
    )
    def test_bad_arguments(self, file, arguments, error, words):
        with pytest.raises(error, match=words):
            mt.load_file(file, **arguments)

    def test_no_room_on_the_host(self, file, monkeypatch):
        monkeypatch.setattr("managedmem.torch._load.host_available", lambda: 1000)
        with pytest.raises(MemoryError, match="bytes of host memory, and 1,000 are available"):
            mt.load_file(file)


def header(row, length=None):
    text = json.dumps({"a": row}).encode() if not isinstance(row, bytes) else row
    return struct.pack("<Q", len(text) if length is None else length) + text + bytes(16)


ROW = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
BAD_FILES = {
    "empty": (b"", "not a safetensors file"),
    "short": (b"1234", "not a safetensors file"),
    "huge header": (header(ROW, 1 << 60), "not a safetensors file"),
    "header beyond its end": (header(ROW, 10_000), "not a safetensors file"),
    "no json": (header(b"what is this"), "no valid safetensors header"),
    "a list": (header(b"[1, 2]"), "no valid safetensors header"),
    "no shape": (header({"dtype": "F32", "data_offsets": [0, 8]}), "no valid safetensors header"),
    "negative": (header({**ROW, "shape": [-2]}), "no valid safetensors header"),
    "fraction": (header({**ROW, "shape": [2.0]}), "no valid safetensors header"),
    "backwards": (header({**ROW, "data_offsets": [8, 0]}), "no valid safetensors header"),
    "three offsets": (header({**ROW, "data_offsets": [0, 4, 8]}), "no valid safetensors header"),
    "nested": (header(b"[" * 200_000), "no valid safetensors header"),
    "no torch shape": (
        header({**ROW, "shape": [0, 1 << 40, 1 << 40]}),
        "no valid safetensors header",
    ),
    "no torch number": (header({**ROW, "shape": [0, 1 << 70]}), "no valid safetensors header"),
    "another size": (header({**ROW, "shape": [3]}), "has 8 bytes for 3 elements of F32"),
    "unknown dtype": (header({**ROW, "dtype": "F4"}), "dtype F4, which this torch does not have"),
    "cut off": (
        header({**ROW, "shape": [20], "data_offsets": [0, 80]}),
        "was cut off: 'a' ends at",
    ),
    "more than tensors": (header(ROW), "has 8 bytes behind its last tensor"),
    "a hole": (
        header({**ROW, "data_offsets": [8, 16]}),
        "has 8 bytes of no tensor in front of 'a'",
    ),
}


class TestBadFiles:
    def test_tensors_that_share_bytes(self, tmp_path):
        path = tmp_path / "a.safetensors"
        text = json.dumps({"a": ROW, "b": {**ROW, "data_offsets": [4, 12]}}).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(12))
        with pytest.raises(ValueError, match=r"'b' and 'a' overlap, by 4 bytes"):
            mt.load_file(path)

    @pytest.mark.parametrize("absolute", [False, True])
    def test_an_index_that_names_another_folder(self, absolute, tmp_path):
        mt.save_file({"a": torch.ones(1)}, tmp_path / "b.safetensors")
        (tmp_path / "model").mkdir()
        name = str(tmp_path / "b.safetensors") if absolute else "../b.safetensors"
        index = tmp_path / "model" / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(ValueError, match=r"b.safetensors', a file outside of its folder"):
            mt.load_file(tmp_path / "model")

    def test_links_may_lead_out_of_the_folder(self, tmp_path):
        mt.save_file({"a": torch.ones(1)}, tmp_path / "b.safetensors")
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "a.safetensors").symlink_to(tmp_path / "b.safetensors")
        index = tmp_path / "model" / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": {"a": "a.safetensors"}}))
        assert same(mt.load_file(tmp_path / "model")["a"], torch.ones(1))

    @pytest.mark.parametrize("name", BAD_FILES)
    def test_is_refused_by_name(self, tmp_path, name):
        data, words = BAD_FILES[name]
        path = tmp_path / "bad.safetensors"
        path.write_bytes(data)
        with pytest.raises(ValueError, match=words) as error:
            mt.load_file(path)
        assert "bad.safetensors" in str(error.value)

    @pytest.mark.parametrize(
        "text", ["", "[]", "[" * 200_000, "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}']
    )
    def test_of_an_index(self, tmp_path, text):
        (tmp_path / "x.safetensors.index.json").write_text(text)
        with pytest.raises(ValueError, match="not a safetensors index"):
            mt.load_file(tmp_path)

    def test_an_index_that_names_too_much(self, model, tmp_path):
        index = shards(model, tmp_path)
        content = json.loads(index.read_text())
        content["weight_map"]["more"] = "model-1-of-2.safetensors"
        index.write_text(json.dumps(content))
        with pytest.raises(ValueError, match="names 'more', which model-1-of-2"):
            mt.load_file(index)

    def test_folders(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="snapshot_download"):
            mt.load_file("someone/model")
        with pytest.raises(FileNotFoundError, match="no file whose name ends in"):
            mt.load_file(tmp_path)
        for name in "ab":
            mt.save_file({"x": torch.ones(1)}, tmp_path / f"{name}.safetensors")
        with pytest.raises(ValueError, match="2 files that may be meant"):
            mt.load_file(tmp_path)

    def test_a_file_that_shrinks_while_it_is_read(self, file, monkeypatch):
        monkeypatch.setattr("managedmem.torch._load.os.preadv", lambda *_: 0)
        with pytest.raises(ValueError, match="was cut off while"):
            mt.load_file(file)

    def test_a_file_that_is_replaced_while_it_is_read(self, tmp_path, monkeypatch):
        path = tmp_path / "a.safetensors"
        mt.save_file({"a": torch.zeros(8)}, path)
        available = mt._load.host_available

        def replaced():
            mt.save_file({"another": torch.ones(100)}, path)
            return available()

        monkeypatch.setattr("managedmem.torch._load.host_available", replaced)
        with pytest.raises(ValueError, match="was replaced while it was read"):
            mt.load_file(path)


class TestLoadModel:
    @pytest.mark.parametrize("make", [on_meta, Tied])
    def test_has_the_tensors_of_the_file(self, file, model, make):
        made = make()
        made.embedding.weight.requires_grad_(False)
        assert mt.load_model(made, file) == ([], [])
        assert_same_module(made, model)
        assert made.head.weight is made.embedding.weight
        assert not made.head.weight.requires_grad
        assert made.blocks[0].first.weight.requires_grad

    def test_of_several_files_in_another_dtype(self, model, tmp_path):
        shards(model, tmp_path)
        made = on_meta()
        mt.load_model(made, tmp_path, dtype=torch.float64)
        assert_same_module(made, model.double())

    def test_any_name_of_a_tied_parameter_will_do(self, model, tmp_path):
        state = {k: v for k, v in model.state_dict().items() if k != "embedding.weight"}
        mt.save_file(state, tmp_path / "a.safetensors")
        made = on_meta()
        assert mt.load_model(made, tmp_path / "a.safetensors") == ([], [])
        assert_same_module(made, model)

    def test_a_tied_parameter_that_is_not_tied_yet_is_told(self, file):
        made = on_meta()
        made.head.weight = nn.Parameter(made.head.weight.detach())
        with pytest.raises(RuntimeError, match=r"lacks 'head.weight'\. strict=False ignores it"):
            mt.load_model(made, file)
        made.tie_weights = lambda: setattr(made.head, "weight", made.embedding.weight)
        with pytest.raises(
            RuntimeError, match=r"'\. If it is tied, call model\.tie_weights\(\) bef"
        ):
            mt.load_model(made, file)
        made.tie_weights()
        assert mt.load_model(made, file) == ([], [])
        assert made.head.weight is made.embedding.weight

    def test_other_names_are_errors_or_told(self, model, tmp_path):
        state = model.state_dict()
        for name in ("blocks.0.scale", "blocks.1.first.bias"):
            state[f"old.{name}"] = state.pop(name)
        path = tmp_path / "a.safetensors"
        mt.save_file(state, path)
        made, before = Tied(), None
        before = {name: value.clone() for name, value in made.state_dict().items()}
        with pytest.raises(
            RuntimeError, match=r"lacks 'blocks\.0\.scale', 'blocks\.1\.first\.bias'; the"
        ):
            mt.load_model(made, path)
        assert_same_tensors(made.state_dict(), before)
        missing, unexpected = mt.load_model(made, path, strict=False)
        assert missing == ["blocks.0.scale", "blocks.1.first.bias"]
        assert sorted(unexpected) == ["old.blocks.0.scale", "old.blocks.1.first.bias"]
        assert same(made.blocks[0].scale, before["blocks.0.scale"])
        assert same(made.blocks[1].first.weight, model.blocks[1].first.weight)

    def test_other_shapes_are_errors(self, file):
        made = Tied(width=32)
        before = {name: value.clone() for name, value in made.state_dict().items()}
        with pytest.raises(
            RuntimeError, match=r"'embedding.weight' has shape \(32, 32\) in the mo"
        ):
            mt.load_model(made, file, strict=False)
        assert_same_tensors(made.state_dict(), before)

    def test_a_buffer_that_no_file_has(self, file):
        with torch.device("meta"):
            made = Tied()
            made.register_buffer("angles", torch.rand(3), persistent=False)
        with pytest.raises(ValueError, match="the buffer 'angles' is on the meta device"):
            mt.load_model(made, file)
        assert made.embedding.weight.is_meta

    @pytest.mark.parametrize("arguments", [{"model": 3}, {"strict": 1}, {"dtype": 3}])
    def test_bad_arguments(self, file, model, arguments):
        with pytest.raises(TypeError):
            mt.load_model(**{"model": model, "path": file, **arguments})


class TestOffload:
    @pytest.fixture
    def loaded(self, file, model):
        made = on_meta()
        mt.load_model(made, file, device=DEVICE)
        return made

    @pytest.fixture
    def no_move(self, monkeypatch):
        def refuse(*_):
            raise AssertionError("something was copied home")

        monkeypatch.setattr("managedmem.torch._offload_lane.move_home", refuse)

    def test_copies_nothing_home(self, loaded, model, no_move):
        before = {name: value.data_ptr() for name, value in loaded.state_dict().items()}
        with mt.offload(loaded, DEVICE, budget="96 KiB") as handle:
            x = batch(handle)
            assert handle.stats()["streamed"] > 0
            assert same(loaded(x), plain(model, handle)(x))
        assert {name: value.data_ptr() for name, value in loaded.state_dict().items()} == before
        assert all(value.is_cpu for value in loaded.state_dict().values())
        assert_same_module(loaded, model)

    def test_of_tensors_from_load_file(self, file, model, no_move):
        made = on_meta()
        tensors = mt.load_file(file, device=DEVICE)
        made.load_state_dict(tensors, strict=False, assign=True)
        made.head.weight = made.embedding.weight
        del tensors
        with mt.offload(made, DEVICE, budget="96 KiB") as handle:
            x = batch(handle)
            assert same(made(x), plain(model, handle)(x))

    def test_training_is_that_of_the_plain_model(self, loaded, model):
        twin = model
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (loaded, twin)]
        handle = mt.offload(loaded, DEVICE, budget="128 KiB", optimizer=optimizers[0])
        twin.to(handle.device)
        x = batch(handle)
        for _ in range(3):
            for each, optimizer in zip((loaded, twin), optimizers, strict=True):
                each(x).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        handle.remove()
        for (name, one), other in zip(loaded.named_parameters(), twin.parameters(), strict=True):
            assert torch.allclose(one.cpu(), other.cpu(), atol=1e-6), name

    def test_some_parameters_of_other_memory(self, loaded, model):
        loaded.blocks[1].first.bias = nn.Parameter(model.blocks[1].first.bias.detach().clone())
        with mt.offload(loaded, DEVICE, budget="96 KiB") as handle:
            x = batch(handle)
            assert same(loaded(x), plain(model, handle)(x))
        assert_same_module(loaded, model)

    def test_two_models_cannot_share_it(self, file, model):
        tensors = mt.load_file(file, device=DEVICE)
        made = [on_meta(), on_meta()]
        for each in made:
            each.load_state_dict(tensors, strict=False, assign=True)
            each.head.weight = each.embedding.weight
        with mt.offload(made[0], DEVICE, budget="96 KiB") as handle:
            with pytest.raises(ValueError, match=r"of another offloaded model \(Tied\)"):
                mt.offload(made[1], DEVICE, budget="96 KiB")
            x = batch(handle)
            assert same(made[0](x), plain(model, handle)(x))
        assert all(same(each(x.cpu()), model(x.cpu())) for each in made)

    def test_needs_no_room_on_the_host(self, loaded, monkeypatch):
        monkeypatch.setattr("managedmem.torch._offload_room.host_available", lambda: 0)
        with mt.offload(loaded, DEVICE, budget="96 KiB") as handle:
            assert handle.stats()["streamed"] > 0

    @pytest.mark.skipif(not EMULATED, reason="counts page-locked memory of the emulated driver")
    def test_the_memory_ends_with_its_last_tensor(self, file):
        from managedmem import emulator

        made = on_meta()
        with emulator.recording() as calls:
            mt.load_model(made, file)
            handle = mt.offload(made, DEVICE, budget="96 KiB")
            bias = made.blocks[0].first.bias.detach()
            handle.remove()
            del made, handle, bias
            gc.collect()
        names = [call.name for call in calls]
        assert names.count("cuMemHostRegister") == names.count("cuMemHostUnregister") == 1


class TestSaveFile:
    def test_the_formats_library_reads_it(self, safetensors, tmp_path):
        tensors = some_tensors()
        path = tmp_path / "a.safetensors"
        mt.save_file(tensors, path, metadata={"format": "pt", "step": "3"})
        assert_same_tensors(safetensors.load_file(path), tensors)
        with pytest.importorskip("safetensors").safe_open(path, "pt") as opened:
            assert opened.metadata() == {"format": "pt", "step": "3"}

    def test_views_are_written_as_they_look(self, tmp_path):
        square = torch.arange(12.0).reshape(3, 4)
        complex_one = torch.tensor([1 + 2j, 3 - 4j])
        tensors = {"t": square.t(), "part": square[:, 1:3], "conj": complex_one.conj()}
        tensors |= {"column": square[:, 1], "expanded": torch.ones(1).expand(3, 4)}
        mt.save_file(tensors, tmp_path / "a.safetensors")
        found = mt.load_file(tmp_path / "a.safetensors")
        for name, tensor in tensors.items():
            assert torch.equal(found[name], tensor.resolve_conj()), name

    def test_of_an_offloaded_model(self, model, tmp_path):
        want = {name: value.clone() for name, value in model.state_dict().items()}
        del want["head.weight"]
        with mt.offload(model, DEVICE, budget="96 KiB") as handle:
            model(batch(handle))
            mt.save_file(model, tmp_path / "a.safetensors")
        assert_same_tensors(mt.load_file(tmp_path / "a.safetensors"), want)

    def test_threads_write_the_same_file(self, tmp_path):
        path = tmp_path / "a.safetensors"
        wanted = [{"a": torch.full((50_000,), float(i))} for i in range(4)]

        def save(tensors):
            for _ in range(20):
                mt.save_file(tensors, path)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(save, wanted))
        assert any(same(mt.load_file(path)["a"], each["a"]) for each in wanted)
        assert list(tmp_path.iterdir()) == [path]

    def test_a_name_as_long_as_the_system_allows(self, tmp_path):
        path = tmp_path / ("a" * 255)
        mt.save_file({"a": torch.ones(3)}, path)
        assert same(mt.load_file(path)["a"], torch.ones(3))

    @pytest.mark.parametrize("kind", ["pipe", "folder"])
    def test_what_is_no_regular_file_stays(self, kind, tmp_path):
        path = tmp_path / kind
        path.mkdir() if kind == "folder" else os.mkfifo(path)
        before = path.stat().st_mode
        with pytest.raises(ValueError, match="is not a regular file"):
            mt.save_file({"a": torch.ones(3)}, path)
        assert path.stat().st_mode == before
        assert list(tmp_path.iterdir()) == [path]

    def test_a_failing_write_leaves_the_file(self, file, model, tmp_path, monkeypatch):
        before = file.read_bytes()

        def fail(tensor):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("managedmem.torch._files._pieces", fail)
        with pytest.raises(OSError, match="No space"):
            mt.save_file(model, file)
        assert file.read_bytes() == before
        assert [path.name for path in tmp_path.iterdir()] == [file.name]

    @pytest.mark.parametrize(
        ("tensors", "error", "words"),
        [
            ([torch.ones(1)], TypeError, "a module or a mapping, got list"),
            ({"a": 3}, TypeError, "tensors by name, got 'a': 3"),
            ({3: torch.ones(1)}, TypeError, "tensors by name, got 3"),
            ({"a": torch.ones(1, device="meta")}, ValueError, "'a' is on the meta device"),
            ({"a": torch.ones(1, 1).to_sparse()}, ValueError, "'a' is of layout torch.sparse_coo"),
            ({"a": torch.ones(1, dtype=torch.complex128)}, ValueError, "'a' has torch.complex128"),
            ({"__metadata__": torch.ones(1)}, ValueError, "cannot be named '__metadata__'"),
        ],
    )
    def test_what_a_file_cannot_have(self, tmp_path, tensors, error, words):
        with pytest.raises(error, match=words):
            mt.save_file(tensors, tmp_path / "a.safetensors")
        assert list(tmp_path.iterdir()) == []

    def test_bad_metadata(self, tmp_path):
        with pytest.raises(TypeError, match="metadata must map str to str"):
            mt.save_file({"a": torch.ones(1)}, tmp_path / "a.safetensors", metadata={"n": 3})


def test_modules_whose_names_are_numbers(tmp_path):
    model = layers(3)
    mt.save_file(model, tmp_path / "a.safetensors")
    made = layers(3).to("meta")
    mt.load_model(made, tmp_path / "a.safetensors")
    assert_same_module(made, model)
