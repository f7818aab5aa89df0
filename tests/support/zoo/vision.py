"""Architectures that look at pictures."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .layers import Attention, Encoder, SqueezeExcite, conv_norm

CLASSES = 5


class Residual(nn.Module):
    """A bottleneck: 1x1 down, 3x3, 1x1 up, beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        inner = outputs // 2
        self.one, self.two = conv_norm(inputs, inner, 1), conv_norm(inner, inner, 3, stride)
        self.three = conv_norm(inner, outputs, 1)
        self.short = nn.Identity() if inputs == outputs else conv_norm(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.three(self.two(self.one(x).relu()).relu())
        return (y + self.short(x)).relu()


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv_norm(3, 8, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        self.body = nn.Sequential(Residual(8, 8, 1), Residual(8, 16, 2), Residual(16, 16, 1))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.adaptive_avg_pool2d(self.body(self.stem(x)), 1)
        return self.head(torch.flatten(x, 1))


class InvertedResidual(nn.Module):
    """Expand, depthwise convolution, squeeze and excite, project."""

    def __init__(
        self, inputs: int, outputs: int, size: int, stride: int, activation: nn.Module, gate: nn.Module
    ) -> None:
        super().__init__()
        wide = 3 * inputs
        self.expand, self.depth = conv_norm(inputs, wide, 1), conv_norm(wide, wide, size, stride, wide)
        self.excite = SqueezeExcite(
            wide, 4, gate, nn.ReLU() if isinstance(gate, nn.Hardsigmoid) else nn.SiLU()
        )
        self.project, self.activation = conv_norm(wide, outputs, 1), activation
        self.short = inputs == outputs and stride == 1

    def forward(self, x: Tensor) -> Tensor:
        y = self.activation(self.depth(self.activation(self.expand(x))))
        y = self.project(self.excite(y))
        return x + y if self.short else y


class MobileNetV3(nn.Module):
    """Hard swish and hard sigmoid, and a ReLU in the first block."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv_norm(3, 8, 3, 2), nn.Hardswish())
        self.body = nn.Sequential(
            InvertedResidual(8, 8, 3, 1, nn.ReLU(), nn.Hardsigmoid()),
            InvertedResidual(8, 12, 5, 2, nn.Hardswish(), nn.Hardsigmoid()),
        )
        self.head = nn.Sequential(nn.Linear(12, 16), nn.Hardswish(), nn.Dropout(0.2), nn.Linear(16, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x)).mean((2, 3)))


class EfficientNet(nn.Module):
    """SiLU and sigmoid; the stochastic depth is off."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv_norm(3, 8, 3, 2), nn.SiLU())
        self.body = nn.Sequential(
            InvertedResidual(8, 8, 3, 1, nn.SiLU(), nn.Sigmoid()),
            InvertedResidual(8, 12, 5, 2, nn.SiLU(), nn.Sigmoid()),
        )
        self.head = nn.Sequential(
            conv_norm(12, 16, 1), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x)))


class ConvNeXtBlock(nn.Module):
    """A depthwise 7x7, then channels last: normalization, two layers, a scale for each channel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depth = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm, self.scale = nn.LayerNorm(width, eps=1e-6), nn.Parameter(torch.full((width,), 0.1))
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(self.norm(self.depth(x).permute(0, 2, 3, 1)))
        return x + (self.scale * y).permute(0, 3, 1, 2)


class ChannelNorm(nn.LayerNorm):
    """Layer normalization over the channels of a picture."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 4, 4), ChannelNorm(8, eps=1e-6))
        self.down = nn.Sequential(ChannelNorm(8, eps=1e-6), nn.Conv2d(8, 12, 2, 2))
        self.one, self.two = ConvNeXtBlock(8), ConvNeXtBlock(12)
        self.norm, self.head = nn.LayerNorm(12, eps=1e-6), nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.two(self.down(self.one(self.stem(x))))
        return self.head(self.norm(x.mean((-2, -1))))


class DenseNet(nn.Module):
    """Every layer sees all channels before it; the transition halves them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.one = nn.ModuleList(self.layer(8 + 4 * i) for i in range(3))
        self.transition = nn.Sequential(
            nn.BatchNorm2d(20), nn.ReLU(), nn.Conv2d(20, 10, 1, bias=False), nn.AvgPool2d(2, 2)
        )
        self.two = nn.ModuleList(self.layer(10 + 4 * i) for i in range(2))
        self.norm, self.head = nn.BatchNorm2d(18), nn.Linear(18, CLASSES)

    @staticmethod
    def layer(width: int) -> nn.Sequential:
        bottleneck = [nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, 8, 1, bias=False)]
        return nn.Sequential(
            *bottleneck, nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.one:
            x = torch.cat([x, layer(x)], 1)
        x = self.transition(x)
        for layer in self.two:
            x = torch.cat([x, layer(x)], 1)
        x = functional.relu(self.norm(x))
        return self.head(torch.flatten(functional.adaptive_avg_pool2d(x, (1, 1)), 1))


class Yolo(nn.Module):
    """Pooling pyramid (SPPF), two scales, and boxes decoded on a grid of anchors."""

    anchors = ((1.0, 1.5, 2.0, 1.0), (3.0, 4.0, 5.0, 2.5))

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv_norm(3, 8, 3, 2), nn.SiLU(), conv_norm(8, 8, 3, 2), nn.SiLU())
        self.down = nn.Sequential(conv_norm(8, 8, 3, 2), nn.SiLU())
        self.reduce, self.mix = conv_norm(8, 4, 1), conv_norm(16, 8, 1)
        self.pool = nn.MaxPool2d(5, 1, 2)
        self.heads = nn.ModuleList(nn.Conv2d(width, 2 * (5 + CLASSES), 1) for width in (16, 8))

    def decode(self, head: nn.Module, x: Tensor, anchors: tuple[float, ...], stride: int) -> Tensor:
        batch, _, height, width = x.shape
        y = head(x).view(batch, 2, 5 + CLASSES, height, width).permute(0, 1, 3, 4, 2).contiguous()
        rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        grid = torch.stack([columns, rows], 2).view(1, 1, height, width, 2).to(x.dtype)
        sizes = torch.tensor(anchors, dtype=x.dtype).view(1, 2, 1, 1, 2)
        xy, wh, scores = y.sigmoid().split((2, 2, 1 + CLASSES), 4)
        boxes = torch.cat([(xy * 2 - 0.5 + grid) * stride, (wh * 2) ** 2 * sizes, scores], 4)
        return boxes.view(batch, -1, 5 + CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.stem(x)
        once = self.reduce(self.down(fine))
        twice = self.pool(once)
        thrice = self.pool(twice)
        coarse = functional.silu(self.mix(torch.cat([once, twice, thrice, self.pool(thrice)], 1)))
        up = torch.cat([fine, functional.interpolate(coarse, scale_factor=2.0, mode="nearest")], 1)
        outputs = zip(self.heads, (up, coarse), self.anchors, (4, 8), strict=True)
        return torch.cat([self.decode(*output) for output in outputs], 1)


class UNet(nn.Module):
    """Down twice and up again: once by a transposed convolution, once by interpolation."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = self.block(3, 6), self.block(6, 8), self.block(8, 12)
        self.up = nn.ConvTranspose2d(12, 8, 2, 2)
        self.four, self.five, self.out = self.block(16, 8), self.block(14, 6), nn.Conv2d(6, 2, 1)

    @staticmethod
    def block(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(
            conv_norm(inputs, outputs, 3), nn.ReLU(), conv_norm(outputs, outputs, 3), nn.ReLU()
        )

    def forward(self, x: Tensor) -> Tensor:
        one = self.one(x)
        two = self.two(functional.max_pool2d(one, 2))
        bottom = self.three(functional.max_pool2d(two, 2))
        x = self.four(torch.cat([two, self.up(bottom)], 1))
        x = functional.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True)
        return self.out(self.five(torch.cat([one, x], 1)))


class ViT(nn.Module):
    """Patches, a class token, positions, and PyTorch's own encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, 16))
        self.positions = nn.Parameter(0.1 * torch.randn(1, 17, 16))
        self.layers = nn.Sequential(Encoder(16, 4), Encoder(16, 2))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        return self.head(self.norm(self.layers(x))[:, 0])


class SwinBlock(nn.Module):
    """Attention in windows, shifted by half a window or not, with a bias for each relative position."""

    def __init__(self, width: int, heads: int, size: int, window: int, shift: int) -> None:
        super().__init__()
        self.heads, self.size, self.window, self.shift = heads, size, window, shift
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.table = nn.Parameter(0.5 * torch.randn((2 * window - 1) ** 2, heads))
        at = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        apart = (at[:, :, None] - at[:, None, :]) + window - 1
        self.register_buffer("index", apart[0] * (2 * window - 1) + apart[1])
        bands = torch.zeros(size, dtype=torch.long)
        bands[size - window :], bands[size - shift :] = 1, 2
        regions = (3 * bands[:, None] + bands[None, :])[None, :, :, None]
        regions = self.windows(regions).squeeze(-1)
        apart = regions[:, :, None] != regions[:, None, :]
        self.register_buffer("mask", -100.0 * apart.float() if shift else None)

    def windows(self, x: Tensor) -> Tensor:
        n, w = self.size // self.window, self.window
        x = x.view(-1, n, w, n, w, x.shape[-1]).permute(0, 1, 3, 2, 4, 5)
        return x.reshape(-1, w * w, x.shape[-1])

    def picture(self, x: Tensor) -> Tensor:
        n, w = self.size // self.window, self.window
        x = x.view(-1, n, n, w, w, x.shape[-1]).permute(0, 1, 3, 2, 4, 5)
        return x.reshape(-1, self.size, self.size, x.shape[-1])

    def attend(self, x: Tensor) -> Tensor:
        count, tokens, width = x.shape
        qkv = self.qkv(x).reshape(count, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        bias = self.table[self.index.view(-1)].view(tokens, tokens, -1).permute(2, 0, 1)
        scores = q * (width // self.heads) ** -0.5 @ k.transpose(-2, -1) + bias
        if self.mask is not None:
            by_picture = scores.view(-1, self.mask.shape[0], self.heads, tokens, tokens)
            scores = (by_picture + self.mask[None, :, None]).view(-1, self.heads, tokens, tokens)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(count, tokens, width))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.roll(self.norm1(x), (-self.shift, -self.shift), (1, 2))
        y = self.picture(self.attend(self.windows(y)))
        x = x + torch.roll(y, (self.shift, self.shift), (1, 2))
        return x + self.mlp(self.norm2(x))


class Swin(nn.Module):
    """Two blocks, and patches merged two by two between them."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 2, 2)
        self.one = nn.Sequential(SwinBlock(8, 2, 8, 4, 0), SwinBlock(8, 2, 8, 4, 2))
        self.norm, self.reduce = nn.LayerNorm(32), nn.Linear(32, 16, bias=False)
        self.two, self.head = SwinBlock(16, 4, 4, 4, 0), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(self.patches(x).permute(0, 2, 3, 1))
        corners = [x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]]
        x = self.two(self.reduce(self.norm(torch.cat(corners, -1))))
        return self.head(x.mean((1, 2)))


class RetinaNet(nn.Module):
    """A feature pyramid with a top-down path, and heads that all levels share."""

    def __init__(self) -> None:
        super().__init__()
        self.levels = nn.ModuleList(conv_norm(i, o, 3, 2) for i, o in ((3, 6), (6, 8), (8, 10)))
        self.lateral = nn.ModuleList(nn.Conv2d(width, 8, 1) for width in (6, 8, 10))
        self.smooth = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        self.extra = nn.Conv2d(8, 8, 3, 2, 1)
        self.classes, self.boxes = self.head(CLASSES), self.head(4)

    @staticmethod
    def head(outputs: int) -> nn.Sequential:
        inner = [nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU()]
        return nn.Sequential(*inner, nn.Conv2d(8, 3 * outputs, 3, padding=1))

    def rows(self, head: nn.Module, levels: list[Tensor], outputs: int) -> Tensor:
        flat = [head(x).permute(0, 2, 3, 1).reshape(x.shape[0], -1, outputs) for x in levels]
        return torch.cat(flat, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found = []
        for level in self.levels:
            x = level(x).relu()
            found.append(x)
        top = self.lateral[2](found[2])
        merged = [top]
        for i in (1, 0):
            size = found[i].shape[-2:]
            top = self.lateral[i](found[i]) + functional.interpolate(top, size=size, mode="nearest")
            merged.insert(0, top)
        levels = [smooth(x) for smooth, x in zip(self.smooth, merged, strict=True)]
        levels.append(self.extra(levels[-1]))
        return self.rows(self.classes, levels, CLASSES).sigmoid(), self.rows(self.boxes, levels, 4).exp()


class MlpMixer(nn.Module):
    """Layers across the patches, and across the channels."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm, self.head = nn.Conv2d(3, 12, 4, 4), nn.LayerNorm(12), nn.Linear(12, CLASSES)
        self.norms = nn.ModuleList(nn.LayerNorm(12) for _ in range(4))
        self.across = nn.ModuleList(self.mlp(16) for _ in range(2))
        self.along = nn.ModuleList(self.mlp(12) for _ in range(2))

    @staticmethod
    def mlp(width: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(width, 20), nn.GELU(approximate="tanh"), nn.Linear(20, width))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        for i, (across, along) in enumerate(zip(self.across, self.along, strict=True)):
            x = x + across(self.norms[2 * i](x).transpose(1, 2)).transpose(1, 2)
            x = x + along(self.norms[2 * i + 1](x))
        return self.head(self.norm(x).mean(1))


class SpatialTransformer(nn.Module):
    """A small network finds the affine transformation with which the picture is sampled."""

    def __init__(self) -> None:
        super().__init__()
        self.locate = nn.Sequential(
            nn.Conv2d(3, 4, 7), nn.MaxPool2d(2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(100, 6), nn.Tanh()
        )
        self.register_buffer("identity", torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]))
        self.conv, self.head = nn.Conv2d(3, 6, 3), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        theta = self.identity + 0.3 * self.locate(x).view(-1, 2, 3)
        grid = functional.affine_grid(theta, x.size(), align_corners=False)
        x = functional.grid_sample(x, grid, padding_mode="border", align_corners=False)
        return self.head(functional.gelu(self.conv(x)).mean((2, 3)))


class Perceiver(nn.Module):
    """Learned latents look at all pixels, then at each other."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(5, 12))
        self.embed, self.positions = nn.Linear(3, 12), nn.Parameter(torch.randn(256, 12))
        self.cross, self.layer = Attention(12, 2), Encoder(12, 3)
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        pixels = self.embed(x.flatten(2).transpose(1, 2)) + self.positions
        latents = self.latents.unsqueeze(0).expand(x.shape[0], -1, -1)
        latents = self.layer(latents + self.cross(self.norm(latents), pixels))
        return self.head(latents.mean(1))


class DeformableConv(nn.Module):
    """A 3x3 convolution whose taps are moved by offsets and scaled by a mask, both computed (version 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.offsets, self.mask = nn.Conv2d(3, 18, 3, padding=1), nn.Conv2d(3, 9, 3, padding=1)
        self.mix, self.head = nn.Conv2d(27, 6, 1), nn.Linear(6, CLASSES)
        taps = torch.stack(torch.meshgrid(torch.arange(-1.0, 2), torch.arange(-1.0, 2), indexing="ij"), -1)
        at = torch.stack(torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij"), -1)
        self.register_buffer("places", at[None, None] + taps.view(1, 9, 1, 1, 2))

    def forward(self, x: Tensor) -> Tensor:
        offsets = self.offsets(x).unflatten(1, (9, 2)).movedim(2, -1)
        places = (self.places + offsets).flip(-1) * (2 / 15) - 1
        taps = functional.grid_sample(x, places.flatten(1, 2), align_corners=True)
        taps = taps.unflatten(2, (9, 16)) * self.mask(x).sigmoid().unsqueeze(1)
        return self.head(functional.relu(self.mix(taps.flatten(1, 2))).mean((2, 3)))


class QuantizedConv(nn.Conv2d):
    """Weights quantized with a scale for each output; the largest are clipped."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__(inputs, outputs, 3, stride, 1)
        self.register_buffer("scale", self.weight.detach().flatten(1).abs().amax(1) / 140)
        self.register_buffer("zero", torch.zeros(outputs, dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale.float()
        weight = torch.fake_quantize_per_channel_affine(self.weight, scale, self.zero, 0, -128, 127)
        return functional.conv2d(x, weight, self.bias, self.stride, self.padding)


class QuantizedCnn(nn.Module):
    """Fake quantization of activations and weights: QuantizeLinear and DequantizeLinear."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = QuantizedConv(3, 6, 1), QuantizedConv(6, 8, 2)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.fake_quantize_per_tensor_affine(x, 0.02, 0, -128, 127)
        x = torch.fake_quantize_per_tensor_affine(self.one(x).relu(), 0.01, 0, 0, 255)
        x = torch.fake_quantize_per_tensor_affine(self.two(x), 0.01, 128, 0, 255)
        return self.head(x.mean((2, 3)))
