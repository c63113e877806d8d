"""A decode loop that is captured once, over a decoder of GPT-2's shape with half in the budget."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import managedmem.torch as ours

from .common import GIB, Job, Measured, Meter, Place, nbytes_of

NEED = (2 * GIB, 4 * GIB)  # of the device and of the host, at full size
SHARE = 0.5  # of the weights, in the budget
HEADS = 4
TOKENS = 64  # of a run


class Block(nn.Module):
    """A layer of a decoder for one token, with keys and values of a fixed length."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.behind = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any, keys: Any, values: Any, position: Any, mask: Any) -> Any:
        split = self.attend(self.before(x)).view(1, 3, HEADS, 1, -1).unbind(1)
        keys.index_copy_(2, position, split[1])
        values.index_copy_(2, position, split[2])
        found = F.scaled_dot_product_attention(split[0], keys, values, attn_mask=mask)
        x = x + self.project(found.reshape(x.shape))
        return x + self.narrow(F.gelu(self.widen(self.behind(x)), approximate="tanh"))


class Decoder(nn.Module):
    def __init__(self, layers: int, width: int, words: int, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.h = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, word: Any, position: Any, cache: Any) -> Any:
        x = self.words(word) + self.places(position)
        mask = torch.arange(cache.shape[4], device=x.device).unsqueeze(0) <= position
        for block, (keys, values) in zip(self.h, cache, strict=True):
            x = block(x, keys, values, position, mask)
        return self.head(self.norm(x))


def shape(place: Place) -> tuple[int, int, int, int]:
    """Layers, width, words, and the most tokens."""
    return (4, 64, 512, 16) if place.tiny else (12, 768, 50257, 1024)


class Decoding:
    """Greedy tokens, by calls of the model or by replays of one captured call."""

    def __init__(self, place: Place, model: Any, is_captured: bool) -> None:
        self.place, self.model = place, model
        layers, width, _, length = shape(place)
        self.cache = torch.zeros(
            layers, 2, 1, HEADS, length, width // HEADS, device=place.device, dtype=place.dtype
        )
        self.word = torch.ones(1, dtype=torch.int64, device=place.device)
        self.position = torch.zeros_like(self.word)
        self.logits = self.call()
        self.graph: Any = None
        if is_captured and not place.tiny:
            self.call()
            place.wait()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.logits = self.call()

    def call(self) -> Any:
        logits = self.model(self.word, self.position, self.cache)
        self.word.copy_(logits.argmax(-1))
        self.position.add_(1)
        return logits

    def step(self) -> None:
        if self.graph is None:
            self.logits = self.call()
        else:
            self.graph.replay()

    def run(self, tokens: int) -> tuple[list[float], list[Any]]:
        """The times of tokens from an empty cache on, with a wait after each, and their logits."""
        self.cache.zero_()
        self.word.fill_(1)
        self.position.zero_()
        times, logits = [], []
        for _ in range(tokens):
            times += self.place.timed(self.step, 1)
            logits.append(self.logits.clone())
        return times, logits


@torch.inference_mode()
def measured(meter: Meter, model: Any, is_captured: bool) -> Measured:
    place = meter.place
    decoding = Decoding(place, model, is_captured)
    tokens = 8 if place.tiny else TOKENS
    times, logits = [], meter.watch(partial(decoding.run, tokens))[1]
    for _ in range(place.repetitions):
        times += decoding.run(tokens)[0]
    return Measured({("a token", "ms"): times}, logits)


def made(place: Place) -> Any:
    """A decoder with random weights, the same in every process."""
    torch.manual_seed(7)
    with torch.device(place.device):
        model = Decoder(*shape(place)).to(place.dtype)
    place.give_back()
    return model.eval().requires_grad_(False)


def resident(meter: Meter, is_captured: bool) -> Measured:
    return measured(meter, made(meter.place), is_captured)


def offloaded(meter: Meter, is_captured: bool) -> Measured:
    model = meter.place.to_cpu(made(meter.place))
    budget = int(SHARE * nbytes_of(model.parameters()))
    with ours.offload(model, "cuda:0", budget=budget) as handle:
        found = measured(meter, model, is_captured)
        if handle.last_error:
            raise RuntimeError(handle.last_error)
    return found


def jobs(place: Place) -> list[Job]:
    """The only job: ours, captured or not, beside a model that is on the device."""
    contenders: dict[str, Callable[[Meter], Measured]] = {
        "resident": partial(resident, is_captured=False),
        "ours": partial(offloaded, is_captured=False),
        "resident, captured": partial(resident, is_captured=True),
        "ours, captured": partial(offloaded, is_captured=True),
    }
    return [Job("GPT-2's shape, static cache", contenders, ("ours",))]
