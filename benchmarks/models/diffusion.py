"""A UNet of 1.7 GB, with a quarter as its budget: four steps of a diffusion model."""

from __future__ import annotations

from typing import Any

import torch

from .common import GIB, Job, Measured, Meter, Place
from .language import Weights, grouped
from .process import library

NEED = (4 * GIB, 6 * GIB)  # of the device and of the host
UNITS = ("ResnetBlock2D", "Transformer2DModel", "Downsample2D", "Upsample2D")
SHAPE = {"cross_attention_dim": 768, "sample_size": 64}  # as Stable Diffusion 1.5
TINY: dict[str, Any] = {
    "block_out_channels": (16, 32),
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 16,
    "norm_num_groups": 4,
    "sample_size": 8,
}


class Diffusion(Weights):
    """The contenders."""

    def made(self) -> Any:
        torch.manual_seed(7)
        with torch.device(self.place.device):
            model = library("diffusers").UNet2DConditionModel(**self.config)
        model.to(self.place.dtype)
        self.place.give_back()
        return model.eval().requires_grad_(False)

    @torch.inference_mode()
    def denoised(self, model: Any, steps: int = 4) -> Any:
        place, draw = self.place, torch.Generator().manual_seed(3)
        side, width = self.config["sample_size"], self.config["cross_attention_dim"]
        latents = torch.randn(2, 4, side, side, generator=draw).to(place.device, place.dtype)
        text = torch.randn(2, 77, width, generator=draw).to(place.device, place.dtype)
        for step in (801, 601, 401, 201)[:steps]:
            latents = latents - 0.1 * model(latents, step, encoder_hidden_states=text).sample
        return latents

    def units(self, model: Any) -> list[Any]:
        """Blocks, in the order of a call."""
        order: list[Any] = []
        hooks = [
            module.register_forward_pre_hook(lambda module, _: order.append(module))
            for module in model.modules()
            if type(module).__name__ in UNITS
        ]
        self.denoised(model, 1)
        for hook in hooks:
            hook.remove()
        return [module for module in order if any(True for _ in module.parameters())]

    def measured(self, meter: Meter, model: Any) -> Measured:
        for _ in range(2):
            numbers = meter.watch(lambda: self.denoised(model))
        times = self.place.timed(lambda: self.denoised(model), 2 if self.place.tiny else 7, 3.0)
        return Measured({("four steps", "ms"): times}, [numbers])

    def called(self, model: Any) -> int:
        self.denoised(model)
        return 4

    def group_layers(self, model: Any) -> None:
        grouped(self.place, model, "block_level", num_blocks_per_group=1)


def jobs(place: Place) -> list[Job]:
    """The job of this group; none without diffusers."""
    if not library("diffusers"):
        return []
    diffusion = Diffusion(place, TINY if place.tiny else SHAPE, 0.25, "")
    others = diffusion.others()
    others.pop("accelerate", None)
    size = "tiny" if place.tiny else "1.7 GB in a quarter"
    return [Job(f"UNet, {size}", diffusion.contenders() | others)]
