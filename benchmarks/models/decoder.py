"""A decoder in plain torch, for ranks: its layers are what fully_shard() divides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .common import Place


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder."""

    width: int = 2048
    hidden: int = 5632
    heads: int = 32
    words: int = 32000
    layers: int = 18

    @classmethod
    def of(cls, place: Place) -> Shape:
        """1.1 billion parameters at full size."""
        if place.tiny:
            return cls(64, 128, 4, 256, 3)
        return cls(layers=place.layers(18))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, hidden = shape.width, shape.hidden
        self.heads = shape.heads
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
        self.asked = nn.Linear(width, 3 * width, bias=False)
        self.mixed = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, found: Tensor) -> Tensor:
        batch, length, width = found.shape
        asked = self.asked(self.before(found)).view(batch, length, 3, self.heads, -1)
        query, key, value = asked.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        found = found + self.mixed(mixed.transpose(1, 2).reshape(batch, length, width))
        gate, up = self.up(self.between(found)).chunk(2, -1)
        return torch.add(found, self.down(functional.silu(gate) * up))


class Decoder(nn.Module):
    """Gives the loss of the next words."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.words, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.words, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        found = self.embedding(ids)
        for block in self.blocks:
            found = block(found)
        words = self.head(self.norm(found[:, :-1]))
        return functional.cross_entropy(words.flatten(0, 1).float(), ids[:, 1:].flatten())


def made(place: Place) -> Any:
    """A decoder with the same numbers in each rank, made on the device."""
    torch.manual_seed(7)
    with torch.device(place.device):
        model = Decoder(Shape.of(place)).to(place.dtype)
    place.give_back()
    return model.train()
