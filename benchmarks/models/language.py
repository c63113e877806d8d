"""Language models: a Llama of 6.8 GB in 2 GiB, and GPT-2's shape with half or all in the budget."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import managedmem
import managedmem.torch as ours

from .by_hand import stream
from .common import GIB, Job, Measured, Meter, Place, check_managed, nbytes_of
from .process import library

NEED = (9 * GIB, 24 * GIB)  # of the device and of the host, at full size
MODELS = "transformers.models"
SLOW = 20_000  # nanoseconds; a launch that takes longer has waited
RESIDENT = ("resident",)
PROBES = 4  # launches that are timed after each layer
TURNS = 4  # of two models, for each repetition

Values = dict[tuple[str, str], list[float]]


def llama(place: Place) -> Any:
    """The shape of Llama 3.2 3B with 32 layers, and a vocabulary of 32,000 at each end."""
    shape: dict[str, Any] = {"hidden_size": 3072, "intermediate_size": 8192, "vocab_size": 32000}
    shape |= {"num_attention_heads": 24, "num_key_value_heads": 8}
    if place.tiny:
        shape = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 512}
        shape |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    return library("transformers").LlamaConfig(
        **shape, num_hidden_layers=4 if place.tiny else place.layers(32)
    )


def gpt2(place: Place) -> Any:
    shape = {"n_layer": 4, "n_embd": 64, "n_head": 4, "vocab_size": 512} if place.tiny else {}
    return library("transformers").GPT2Config(**shape)


def made(place: Place, config: Any) -> Any:
    """A model with random weights, the same in every process, drawn on the device."""
    torch.manual_seed(7)
    with torch.device(place.device):
        model = library("transformers").AutoModelForCausalLM.from_config(config, dtype=place.dtype)
    place.give_back()
    return model.eval().requires_grad_(False)


class Generation:
    """A prompt and given tokens: random weights would repeat one token, and so its experts.

    A token is timed with a wait at its end, as in the loop of generate(); the processor time of
    the caller is that before the wait.
    """

    def __init__(self, place: Place, model: Any) -> None:
        self.place, self.model = place, model
        self.length = 16 if place.tiny else 512
        self.logits: list[Any] = []
        self.prompt: list[float] = []
        self.tokens: list[float] = []
        self.caller: list[float] = []

    def call(self, ids: Any, past: Any) -> Any:
        """Call the model; keep the time, and the processor time of the caller."""
        self.place.wait()
        begin, spent = time.perf_counter_ns(), time.thread_time_ns()
        out = self.model(input_ids=ids, past_key_values=past, use_cache=True, logits_to_keep=1)
        spent = time.thread_time_ns() - spent
        self.place.wait()
        took = time.perf_counter_ns() - begin
        self.logits.append(out.logits[:, -1].clone())
        (self.tokens if past is not None else self.prompt).append(took)
        if past is not None:
            self.caller.append(spent)
        return out.past_key_values

    @torch.inference_mode()
    def run(self, tokens: int) -> None:
        """A prompt and so many tokens."""
        device = self.place.device
        given = (torch.arange(tokens, device=device) * 7919 + 13) % 499
        self.logits = []
        past = self.call(torch.arange(self.length, device=device).view(1, -1) * 7 % 500, None)
        for token in given:
            past = self.call(token.view(1, 1), past)

    def forget(self) -> None:
        """Forget the times, not the logits."""
        self.prompt, self.tokens, self.caller = [], [], []

    def values(self) -> Values:
        found = {("the prompt", "ms"): self.prompt, ("a token", "ms"): self.tokens}
        found["caller's processor, a token", "us"] = self.caller
        return {figure: values for figure, values in found.items() if values}


def generated(place: Place, meter: Meter, model: Any, tokens: int = 16) -> Measured:
    """Two passes that are not timed, in which the memory is watched, then the timed ones.

    If a token takes more than half a second, one pass of each is enough.
    """
    generation = Generation(place, model)
    meter.watch(partial(generation.run, 2))
    slow = statistics.median(generation.tokens) > 5e8
    if not slow:
        meter.watch(partial(generation.run, 2))
    generation.forget()
    for _ in range(1 if slow else place.repetitions):
        generation.run(2 if slow or place.tiny else tokens)
    return Measured(generation.values(), generation.logits)


def grouped(place: Place, module: Any, level: str, **options: Any) -> None:
    """Apply the group offloading of diffusers."""
    if not place.tiny:
        options |= {"use_stream": True, "record_stream": True}
    library("diffusers.hooks").apply_group_offloading(
        module,
        onload_device=place.device,
        offload_device=torch.device("cpu"),
        offload_type=level,
        non_blocking=True,
        exclude_kwargs=["past_key_values"],
        **options,
    )


# --- contenders ---------------------------------------------------------------------------


class Weights:
    """The contenders of a model whose layers are called in a fixed order."""

    def __init__(self, place: Place, config: Any, budget: float, inner: str) -> None:
        self.place, self.config, self.budget, self.inner = place, config, budget, inner

    def made(self) -> Any:
        return made(self.place, self.config)

    def limit(self, model: Any) -> int:
        """The budget in bytes; `budget` itself is in bytes, or a share."""
        share = self.budget <= 1
        return int(self.budget * (nbytes_of(model.parameters()) if share else 1))

    def units(self, model: Any) -> list[Any]:
        return list(model.get_submodule(self.inner))

    def measured(self, meter: Meter, model: Any) -> Measured:
        return generated(self.place, meter, model)

    def called(self, model: Any) -> int:
        """Call the model a few times; the number of calls."""
        generation = Generation(self.place, model)
        generation.run(2)
        return len(generation.logits)

    def resident(self, meter: Meter) -> Measured:
        return self.measured(meter, self.made())

    def ours(
        self,
        meter: Meter,
        prepare: Callable[[Any], Any] = lambda model: model,
        read_only: bool = False,
    ) -> Measured:
        model = self.place.to_cpu(prepare(self.made()))
        begin = time.perf_counter_ns()
        handle = ours.offload(model, "cuda:0", budget=self.limit(model), read_only=read_only)
        self.place.wait()
        started = float(time.perf_counter_ns() - begin)
        found = self.measured(meter, model)
        found.values["offload() itself", "ms"] = [started]
        before = handle.stats()
        calls = self.called(model)
        loaded = handle.stats()["bytes_loaded"] - before["bytes_loaded"]
        found.values["loaded, a call", "MB"] = [loaded / calls]
        found.values["loaded, a call@not on the device", "MB"] = [float(before["streamed"])]
        if handle.last_error:
            raise RuntimeError(handle.last_error)
        return found

    def ours_again(self, meter: Meter) -> Measured:
        """offload() of weights that are in page-locked memory already."""
        model = self.place.to_cpu(self.made())
        for parameter in model.parameters() if not self.place.tiny else ():
            parameter.data = parameter.data.pin_memory()
        begin = time.perf_counter_ns()
        meter.watch(lambda: ours.offload(model, "cuda:0", budget=self.limit(model)))
        return Measured({("offload() itself", "ms"): [float(time.perf_counter_ns() - begin)]})

    def by_hand(self, meter: Meter) -> Measured:
        model = self.made()
        stream(self.place, model, self.units(model), self.limit(model))
        return self.measured(meter, model)

    def diffusers(self, meter: Meter, level: str) -> Measured:
        """Group offloading with copies on a stream."""
        model = self.place.to_cpu(self.made())
        if level == "leaf":
            grouped(self.place, model, "leaf_level")
        else:
            self.group_layers(model)
        return self.measured(meter, model)

    def group_layers(self, model: Any) -> None:
        """Stream the layers; the ends of the model stay on the device, as by hand."""
        inner = model.get_submodule(self.inner.rpartition(".")[0])
        for child in model.children():
            if child is not inner:
                child.to(self.place.device)
        embedding, inner.embed_tokens = inner.embed_tokens, torch.nn.Identity()
        grouped(self.place, inner, "block_level", num_blocks_per_group=1)
        inner.embed_tokens = embedding.to(self.place.device)

    def accelerate(self, meter: Meter) -> Measured:
        model = self.place.to_cpu(self.made())
        return self.measured(meter, library("accelerate").cpu_offload(model, self.place.device))

    def page_faults(self, meter: Meter) -> Measured:
        """A prompt; all weights come from the host by page faults. There is no budget."""
        model = self.made()
        check_managed(self.place, nbytes_of(model.parameters()))
        ours.to_managed(model, device=self.place.device)
        self.place.give_back()
        generation = Generation(self.place, model)
        for turn in range(1 + self.place.repetitions):
            ours.prefetch(model, managedmem.Host())
            self.place.wait()
            if turn:
                generation.run(0)
            else:
                meter.watch(partial(generation.run, 0))
                generation.forget()
        return Measured(generation.values(), generation.logits)

    def others(self) -> dict[str, Callable[[Meter], Measured]]:
        """The contenders of other libraries."""
        found: dict[str, Callable[[Meter], Measured]] = {}
        if library("accelerate"):
            if library("diffusers.hooks"):  # these hooks call accelerate, but do not require it
                found["diffusers leaf"] = lambda meter: self.diffusers(meter, "leaf")
                found["diffusers block"] = lambda meter: self.diffusers(meter, "block")
            found["accelerate"] = self.accelerate
        return found

    def contenders(self) -> dict[str, Callable[[Meter], Measured]]:
        return {"resident": self.resident, "ours": self.ours, "by hand": self.by_hand}


class Small(Weights):
    """A model for which launches are the limit: those that wait are counted."""

    def measured(self, meter: Meter, model: Any) -> Measured:
        found = generated(self.place, meter, model, tokens=32)
        slow: list[float] = []
        generation, probe = Generation(self.place, model), torch.ones(64, device=self.place.device)

        def launch(*_: object) -> None:
            for _turn in range(PROBES):
                begin = time.perf_counter_ns()
                probe.add_(1)
                spent = time.perf_counter_ns() - begin
                if spent > SLOW:
                    slow.append(spent)

        hooks = [unit.register_forward_hook(launch) for unit in self.units(model)]
        generation.run(2)
        slow.clear()
        generation.run(32)
        for hook in hooks:
            hook.remove()
        found.values["launches over 20 us, a token", "launches"] = [len(slow) / 33]
        found.values["time of these launches, a token", "us"] = [sum(slow) / 33]
        return found

    def all_fits(self, meter: Meter) -> Measured:
        """Tokens in turn with a resident model; offload() has a budget for everything."""
        resident = self.made()
        model = self.place.to_cpu(copy.deepcopy(resident))
        ours.offload(model, "cuda:0", budget=2 * nbytes_of(model.parameters()))
        mine, theirs = Generation(self.place, model), Generation(self.place, resident)
        for turn in range(1 + self.place.repetitions * TURNS):
            for each in (mine, theirs):
                work = partial(each.run, self.few())
                if turn:
                    work()
                else:
                    meter.watch(work)
                    each.forget()
        times = {("a token", "ms"): mine.tokens, ("a token@resident", "ms"): theirs.tokens}
        return Measured(times, mine.logits)

    def alone(self, meter: Meter) -> Measured:
        """The logits of the resident model."""
        generation = Generation(self.place, self.made())
        meter.watch(partial(generation.run, self.few()))
        return Measured({}, generation.logits)

    def few(self) -> int:
        """The tokens of a turn: short turns meet the same disturbances on both sides."""
        return 3 if self.place.tiny else 8


def jobs(place: Place) -> list[Job]:
    """The jobs of this group; none without transformers."""
    if not (library(f"{MODELS}.llama.modeling_llama") and library(f"{MODELS}.gpt2.modeling_gpt2")):
        return []
    large = Weights(
        place, llama(place), 0.3 if place.tiny else 2 * GIB * place.share, "model.layers"
    )
    small = Small(place, gpt2(place), 0.5, "transformer.h")
    contenders = large.contenders() | large.others()
    contenders |= {"page faults": large.page_faults, "ours, page-locked": large.ours_again}
    gigabytes = "tiny" if place.tiny else f"{6.8 * place.share:.1f} GB in {2 * place.share:g} GiB"
    return [
        Job(f"Llama, {gigabytes}", contenders),
        Job("GPT-2's shape, half in the budget", small.contenders()),
        Job("GPT-2's shape, all fits", {"resident": small.alone, "ours": small.all_fits}, RESIDENT),
    ]
