"""Architectures that hear."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional


class RelativeAttention(nn.Module):
    """Transformer-XL's: queries meet keys and sinusoids of distances, which are then shifted into place."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.place = nn.Linear(width, width, bias=False)
        self.u, self.w = (nn.Parameter(0.3 * torch.randn(heads, width // heads)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        batch, steps, _ = x.shape
        y = self.norm(x)
        q, k, v = (layer(y).unflatten(2, (self.heads, -1)) for layer in (self.q, self.k, self.v))
        apart = torch.arange(steps - 1, -steps, -1).to(x.dtype)
        angles = apart[:, None] * torch.exp(torch.arange(0, self.width, 2) * (-math.log(1e4) / self.width))
        sinusoids = torch.stack([angles.sin(), angles.cos()], -1).flatten(1).to(x.dtype)
        places = self.place(sinusoids).unflatten(1, (self.heads, -1))
        content = torch.einsum("nqhd,nkhd->nhqk", q + self.u, k)
        position = torch.einsum("nqhd,phd->nhqp", q + self.w, places)
        shifted = functional.pad(position, (1, 0)).view(batch, self.heads, 2 * steps, steps)[:, :, 1:]
        position = shifted.reshape(batch, self.heads, steps, 2 * steps - 1)[..., :steps]
        weights = ((content + position) / math.sqrt(self.width // self.heads)).softmax(-1)
        return self.out(torch.einsum("nhqk,nkhd->nqhd", weights, v).flatten(2))


class Conformer(nn.Module):
    """Half a feed-forward net, attention, a gated depthwise convolution, and the other half."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.before, self.after = self.feed_forward(width), self.feed_forward(width)
        self.attention, self.norm, self.last = (
            RelativeAttention(width, 2),
            nn.LayerNorm(width),
            nn.LayerNorm(width),
        )
        self.conv = nn.Sequential(
            nn.Conv1d(width, 2 * width, 1),
            nn.GLU(dim=1),
            nn.Conv1d(width, width, 7, padding=3, groups=width),
            nn.BatchNorm1d(width),
            nn.SiLU(),
            nn.Conv1d(width, width, 1),
        )

    @staticmethod
    def feed_forward(width: int) -> nn.Sequential:
        return nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.before(x)
        x = x + self.attention(x)
        x = x + self.conv(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return self.last(x + 0.5 * self.after(x))


class Crnn(nn.Module):
    """Convolutions, their columns as steps of an LSTM in both directions, and scores for CTC."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.LeakyReLU(0.1),
            nn.MaxPool2d((2, 1)),
        )
        self.rnn, self.head = nn.LSTM(32, 8, bidirectional=True), nn.Linear(16, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).permute(3, 0, 1, 2).flatten(2)
        return self.head(self.rnn(x)[0]).log_softmax(-1)


class Detector(nn.Module):
    """One branch of a detector of voices: a learned short-time transform, convolutions, an LSTM cell."""

    def __init__(self, hop: int) -> None:
        super().__init__()
        self.transform = nn.Conv1d(1, 8, 2 * hop, hop, bias=False)
        self.conv, self.cell, self.head = nn.Conv1d(4, 6, 3, padding=1), nn.LSTMCell(6, 5), nn.Conv1d(5, 1, 1)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        wave = functional.pad(x.unsqueeze(1), (0, 4), mode="reflect")
        real, imaginary = self.transform(wave).chunk(2, 1)
        spectrum = torch.sqrt(real * real + imaginary * imaginary + 1e-6)
        h, c = self.cell(functional.relu(self.conv(spectrum)).mean(2), (state[0], state[1]))
        probability = torch.sigmoid(self.head(functional.relu(h.unsqueeze(2))))
        return probability.squeeze(2), torch.stack([h, c])


class VoiceDetector(nn.Module):
    """As Silero's: one network for each sample rate, chosen by an input."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = Detector(8), Detector(4)

    def forward(self, x: Tensor, state: Tensor, sr: Tensor) -> tuple[Tensor, Tensor]:
        if sr == 16000:
            y, following = self.wide(x, state)
        else:
            y, following = self.narrow(x, state)
        return y, following


class ConditionalDetector(VoiceDetector):
    """The same with torch.cond, which the other exporter takes."""

    def forward(self, x: Tensor, state: Tensor, sr: Tensor) -> tuple[Tensor, Tensor]:
        if torch.compiler.is_exporting():
            return torch.cond(sr == 16000, self.wide, self.narrow, (x, state))
        return super().forward(x, state, sr)


class WaveNet(nn.Module):
    """Causal convolutions with growing dilations, gated; the skipped parts are added up."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv1d(1, 8, 1)
        self.dilated = nn.ModuleList(nn.Conv1d(8, 16, 2, dilation=2**i) for i in range(4))
        self.residual = nn.ModuleList(nn.Conv1d(8, 8, 1) for _ in range(4))
        self.skip = nn.ModuleList(nn.Conv1d(8, 10, 1) for _ in range(4))
        self.head = nn.Sequential(nn.ReLU(), nn.Conv1d(10, 10, 1), nn.ReLU(), nn.Conv1d(10, 6, 1))

    def forward(self, x: Tensor) -> Tensor:
        x, total = self.enter(x), None
        for i, (dilated, residual, skip) in enumerate(
            zip(self.dilated, self.residual, self.skip, strict=True)
        ):
            signal, gate = dilated(functional.pad(x, (2**i, 0))).chunk(2, 1)
            y = torch.tanh(signal) * torch.sigmoid(gate)
            total = skip(y) if total is None else total + skip(y)
            x = x + residual(y)
        return self.head(total)


class Spectrogram(nn.Module):
    """A front end: short-time Fourier transform, mel bands, logarithm; then a small convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(16))
        self.mel, self.conv = nn.Parameter(torch.rand(9, 5)), nn.Conv1d(5, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.stft(x, 16, 4, window=self.window, center=True, return_complex=True)
        parts = torch.view_as_real(spectrum)
        power = parts.pow(2).sum(-1)
        mel = torch.log(torch.clamp(power.transpose(1, 2) @ self.mel, min=1e-5))
        return self.conv(mel.transpose(1, 2))


class Wav2Vec(nn.Module):
    """A strided convolution of samples with group normalization, and positions by a weight-normed one."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv1d(1, 8, 10, 5, bias=False),
            nn.GroupNorm(8, 8),
            nn.GELU(),
            nn.Conv1d(8, 8, 3, 2),
            nn.GELU(),
        )
        self.norm = nn.LayerNorm(8)
        conv = nn.Conv1d(8, 8, 4, padding=2, groups=2)
        self.positions = nn.utils.parametrizations.weight_norm(conv, name="weight", dim=2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.features(x.unsqueeze(1)).transpose(1, 2)).transpose(1, 2)
        return x + functional.gelu(self.positions(x)[:, :, :-1])
