"""Architectures that make pictures or densities."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional


class Vae(nn.Module):
    """Means and variances, a sample made with given noise, its picture, and the divergence from the prior."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.ReLU())
        self.mean, self.log_variance = nn.Linear(20, 3), nn.Linear(20, 3)
        self.decoder = nn.Sequential(nn.Linear(3, 20), nn.ReLU(), nn.Linear(20, 64), nn.Sigmoid())

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.encoder(x)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        picture = self.decoder(mean + torch.exp(0.5 * log_variance) * noise).view(x.shape)
        divergence = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp(), 1)
        return picture, divergence


class Generator(nn.Module):
    """As in a DCGAN: transposed convolutions and batch normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.ConvTranspose2d(6, 12, 4, 1, 0, bias=False),
            nn.BatchNorm2d(12),
            nn.ReLU(True),
            nn.ConvTranspose2d(12, 8, 4, 2, 1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(True),
            nn.ConvTranspose2d(8, 3, 3, 2, 1, output_padding=1),
            nn.Tanh(),
        )

    def forward(self, z: Tensor) -> Tensor:
        return self.layers(z[:, :, None, None])


class Diffusion(nn.Module):
    """A block of a diffusion U-Net: time embedding, group norm, attention over the pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 16))
        self.enter, self.leave = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)
        self.norms = nn.ModuleList(nn.GroupNorm(4, 8) for _ in range(4))
        self.one, self.two = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.scale_shift, self.qkv, self.out = nn.Linear(16, 16), nn.Conv2d(8, 24, 1), nn.Conv2d(8, 8, 1)
        self.down, self.up = nn.Conv2d(8, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        frequencies = torch.exp(torch.arange(4) * (-math.log(100.0) / 4)).to(x.dtype)
        angles = t[:, None] * frequencies
        time = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        x = self.enter(x)
        y = self.one(functional.silu(self.norms[0](x)))
        scale, shift = self.scale_shift(functional.silu(time))[:, :, None, None].chunk(2, 1)
        x = x + self.two(functional.silu(self.norms[1](y) * (1 + scale) + shift))
        small = self.down(x)
        q, k, v = self.qkv(self.norms[2](small)).flatten(2).chunk(3, 1)
        weights = torch.softmax(torch.einsum("ncq,nck->nqk", q, k) * 8**-0.5, -1)
        mixed = torch.einsum("nqk,nck->ncq", weights, v).view(small.shape)
        x = x + self.up(functional.interpolate(small + self.out(mixed), scale_factor=2.0, mode="nearest"))
        return self.leave(functional.silu(self.norms[3](x)))


class Flow(nn.Module):
    """RealNVP: affine couplings, actnorm, and the logarithm of the density."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(
            nn.Sequential(nn.Linear(3, 10), nn.ELU(), nn.Linear(10, 10), nn.Mish(), nn.Linear(10, 6))
            for _ in range(2)
        )
        self.scale, self.shift = nn.Parameter(torch.zeros(6)), nn.Parameter(torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        x = (x + self.shift) * self.scale.exp()
        volume = self.scale.sum()
        for net in self.nets:
            fixed, moved = x.chunk(2, 1)
            log_scale, shift = net(fixed).chunk(2, 1)
            log_scale = torch.tanh(log_scale)
            x = torch.cat([moved * log_scale.exp() + shift, fixed], 1)
            volume = volume + log_scale.sum(1)
        return volume - 0.5 * (x.square() + math.log(2 * math.pi)).sum(1)


class SuperResolution(nn.Module):
    """Residual blocks and a pixel shuffle, with a learned slope."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.inner = (
            nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect"),
            nn.Conv2d(8, 8, 3, padding=1),
        )
        self.slope, self.leave = nn.PReLU(8), nn.Conv2d(8, 12, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.slope(self.enter(x))
        y = functional.pixel_shuffle(self.leave(y + self.inner(y)), 2)
        bicubic = functional.interpolate(x, scale_factor=2.0, mode="bicubic", align_corners=False)
        return bicubic + y


class StyleGenerator(nn.Module):
    """As in StyleGAN: styles scale the weights of a convolution, which are normalized for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 8), nn.LeakyReLU(0.2))
        self.start, self.affine = nn.Parameter(torch.randn(1, 5, 4, 4)), nn.Linear(8, 5)
        self.weight, self.bias = nn.Parameter(torch.randn(7, 5, 3, 3)), nn.Parameter(torch.randn(7))
        self.strength, self.to_rgb = nn.Parameter(torch.tensor(0.3)), nn.Conv2d(7, 3, 1)

    def forward(self, z: Tensor, noise: Tensor) -> Tensor:
        z = z * torch.rsqrt(z.square().mean(1, keepdim=True) + 1e-8)
        style = self.affine(self.map(z)) + 1
        # With the styles on the input and the norms on the output, one convolution serves all samples.
        norm = torch.rsqrt(torch.einsum("oikl,ni->no", self.weight.square(), style.square()) + 1e-8)
        x = functional.interpolate(self.start, scale_factor=2.0, mode="bilinear", align_corners=False)
        x = functional.conv2d(x * style[:, :, None, None], self.weight, padding=1) * norm[:, :, None, None]
        x = functional.leaky_relu(x + self.strength * noise + self.bias[:, None, None], 0.2) * math.sqrt(2)
        return self.to_rgb(x)
