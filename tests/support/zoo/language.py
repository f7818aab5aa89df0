"""Architectures that read tokens, or sequences of vectors."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from .layers import Attention, RMSNorm

VOCABULARY = 13
WIDTH = 16


class Bert(nn.Module):
    """Three embeddings, a mask as a large negative bias, normalization after the sums, a pooler."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(32, WIDTH)
        self.types, self.norm = nn.Embedding(2, WIDTH), nn.LayerNorm(WIDTH, eps=1e-12)
        self.register_buffer("positions", torch.arange(32).unsqueeze(0))
        self.attention = nn.ModuleList(Attention(WIDTH, 4) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH, eps=1e-12) for _ in range(4))
        self.pooler = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor, attention_mask: Tensor, types: Tensor) -> tuple[Tensor, Tensor]:
        positions = self.positions[:, : ids.shape[1]]
        x = self.norm(self.words(ids) + self.places(positions) + self.types(types))
        bias = (1.0 - attention_mask[:, None, None, :].to(x.dtype)) * torch.finfo(torch.float32).min
        for i, attention in enumerate(self.attention):
            x = self.norms[2 * i](x + attention(x, mask=bias))
            x = self.norms[2 * i + 1](x + self.down[i](functional.gelu(self.up[i](x))))
        return x, torch.tanh(self.pooler(x[:, 0]))


class Gpt(nn.Module):
    """Tokens after those in a cache of keys and values; the longer cache is an output."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(64, WIDTH)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU("tanh"), nn.Linear(32, WIDTH)) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(5))
        self.register_buffer("causal", torch.ones(64, 64, dtype=torch.bool).tril())

    def forward(self, ids: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        """The cache is [layers, keys and values, N, heads, past, width of a head]."""
        past, new = cache.shape[4], ids.shape[1]
        x = self.words(ids) + self.places(torch.arange(past, past + new))
        seen = self.causal[past : past + new, : past + new]
        longer = []
        for i, (qkv, out, mlp) in enumerate(zip(self.qkv, self.out, self.mlp, strict=True)):
            heads = qkv(self.norms[2 * i](x)).unflatten(2, (3, 4, -1)).permute(2, 0, 3, 1, 4)
            q, k, v = heads.unbind(0)
            k, v = torch.cat([cache[i, 0], k], 2), torch.cat([cache[i, 1], v], 2)
            longer.append(torch.stack([k, v]))
            scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            x = x + out((weights @ v).transpose(1, 2).flatten(2))
            x = x + mlp(self.norms[2 * i + 1](x))
        return self.norms[4](x) @ self.words.weight.T, torch.stack(longer)


class Llama(nn.Module):
    """Rotary positions, two heads of queries for each of keys and values, RMS norm, a gated net."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.q, self.kv = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, 24, bias=False), nn.Linear(WIDTH, 24, bias=False)
        self.down = nn.Linear(24, WIDTH, bias=False)
        self.norms = nn.ModuleList(RMSNorm(WIDTH) for _ in range(3))
        self.register_buffer("frequencies", 100.0 ** -torch.tensor([0.0, 0.5]))

    def rotate(self, x: Tensor, steps: int) -> Tensor:
        angles = torch.arange(steps).to(x.dtype)[:, None] * self.frequencies
        cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        y = self.norms[0](x)
        q = self.q(y).unflatten(2, (4, -1)).transpose(1, 2)
        k, v = self.kv(y).unflatten(2, (4, -1)).transpose(1, 2).chunk(2, 1)
        k = self.rotate(k, ids.shape[1])[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2)
        v = v[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2)
        y = functional.scaled_dot_product_attention(self.rotate(q, ids.shape[1]), k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        x = x + self.down(functional.silu(self.gate(y)) * self.up(y))
        return self.head(self.norms[2](x))


class RelativeBias(nn.Module):
    """T5: distances in buckets, exact when near and logarithmic when far."""

    def __init__(self, heads: int, both: bool) -> None:
        super().__init__()
        self.table, self.both = nn.Embedding(8, heads), both

    def forward(self, queries: int, keys: int) -> Tensor:
        apart = torch.arange(keys)[None, :] - torch.arange(queries)[:, None]
        buckets, offset = (4, (apart > 0).long() * 4) if self.both else (8, torch.zeros_like(apart))
        apart = apart.abs() if self.both else -torch.min(apart, torch.zeros_like(apart))
        exact = buckets // 2
        far = exact + (torch.log(apart.float() / exact) / math.log(16 / exact) * (buckets - exact)).long()
        far = torch.min(far, torch.full_like(far, buckets - 1))
        return self.table(offset + torch.where(apart < exact, apart, far)).permute(2, 0, 1).unsqueeze(0)


class UnscaledAttention(Attention):
    """T5's attention does not scale the products."""

    def forward(self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        context = x if context is None else context
        q, k, v = self.split(self.q(x)), self.split(self.k(context)), self.split(self.v(context))
        weights = (q @ k.transpose(-1, -2) + mask).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class T5(nn.Module):
    """An encoder and a decoder without biases, whose attention has a bias for relative positions."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.encode, self.decode = (
            UnscaledAttention(WIDTH, 4, bias=False),
            UnscaledAttention(WIDTH, 4, bias=False),
        )
        self.cross = UnscaledAttention(WIDTH, 4, bias=False)
        self.both, self.causal = RelativeBias(4, True), RelativeBias(4, False)
        self.norms = nn.ModuleList(RMSNorm(WIDTH) for _ in range(7))
        self.wi = nn.ModuleList(nn.Linear(WIDTH, 32, bias=False) for _ in range(2))
        self.wo = nn.ModuleList(nn.Linear(32, WIDTH, bias=False) for _ in range(2))

    def feed_forward(self, i: int, x: Tensor) -> Tensor:
        return self.wo[i](self.wi[i](x).relu())

    def forward(self, ids: Tensor, attention_mask: Tensor, target: Tensor) -> Tensor:
        x = self.words(ids)
        masked = attention_mask[:, None, None, :] == 0
        bias = self.both(ids.shape[1], ids.shape[1]).masked_fill(masked, -1e4)
        x = x + self.encode(self.norms[0](x), mask=bias)
        x = self.norms[2](x + self.feed_forward(0, self.norms[1](x)))
        y, steps = self.words(target), target.shape[1]
        later = torch.ones(steps, steps, dtype=torch.bool).triu(1)
        y = y + self.decode(self.norms[3](y), mask=self.causal(steps, steps).masked_fill(later, -1e4))
        crossed = torch.zeros_like(masked, dtype=x.dtype).masked_fill(masked, -1e4)
        y = y + self.cross(self.norms[4](y), x, crossed)
        y = self.norms[6](y + self.feed_forward(1, self.norms[5](y)))
        return y * WIDTH**-0.5 @ self.words.weight.T


class Seq2Seq(nn.Module):
    """An LSTM of two layers, in both directions, whose last states start another one."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 8)
        self.encoder = nn.LSTM(8, 6, num_layers=2, bidirectional=True, batch_first=True)
        self.bridge = nn.ModuleList(nn.Linear(12, 10) for _ in range(2))
        self.decoder, self.head = nn.LSTM(8, 10, batch_first=True), nn.Linear(10, VOCABULARY)

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        _, states = self.encoder(self.words(ids))
        last = [torch.cat([state[-2], state[-1]], 1) for state in states]
        h, c = (bridge(state).tanh().unsqueeze(0) for bridge, state in zip(self.bridge, last, strict=True))
        return self.head(self.decoder(self.words(target), (h, c))[0])


class GruWithAttention(nn.Module):
    """Bahdanau's: additive attention to the states of a GRU, at every step of a GRU cell."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.encoder = (
            nn.Embedding(VOCABULARY, 8),
            nn.GRU(8, 6, batch_first=True, bidirectional=True),
        )
        self.query, self.key, self.score = nn.Linear(10, 7), nn.Linear(12, 7, bias=False), nn.Linear(7, 1)
        self.cell, self.head = nn.GRUCell(20, 10), nn.Linear(22, VOCABULARY)

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        states, _ = self.encoder(self.words(ids))
        keys, h = self.key(states), states.new_zeros(ids.shape[0], 10)
        outputs = []
        for i in range(target.shape[1]):
            weights = self.score(torch.tanh(self.query(h).unsqueeze(1) + keys)).softmax(1)
            context = (weights * states).sum(1)
            h = self.cell(torch.cat([self.words(target[:, i]), context], 1), h)
            outputs.append(self.head(torch.cat([h, context], 1)))
        return torch.stack(outputs, 1).log_softmax(-1)


class Mamba(nn.Module):
    """A selective state space: step sizes and matrices depend on the input; the scan is a cumulative sum."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.conv = nn.Linear(8, 24, bias=False), nn.Conv1d(12, 12, 4, groups=12, padding=3)
        self.select, self.step = nn.Linear(12, 2 + 2 * 4, bias=False), nn.Linear(2, 12)
        self.a_log = nn.Parameter(torch.log(torch.arange(1.0, 5).repeat(12, 1)))
        self.d, self.leave, self.norm = nn.Parameter(torch.ones(12)), nn.Linear(12, 8, bias=False), RMSNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        inner, gate = self.enter(self.norm(x)).chunk(2, -1)
        inner = functional.silu(self.conv(inner.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        step, b, c = self.select(inner).split([2, 4, 4], -1)
        step = functional.softplus(self.step(step)).unsqueeze(-1)
        decay = torch.cumsum(step * -torch.exp(self.a_log), 1)
        states = torch.cumsum(step * inner.unsqueeze(-1) * b.unsqueeze(2) * torch.exp(-decay), 1)
        y = (states * torch.exp(decay) * c.unsqueeze(2)).sum(-1) + self.d * inner
        return x + self.leave(y * functional.silu(gate))


class Rwkv(nn.Module):
    """Tokens mixed with their predecessors, and a decaying weighted mean in place of attention."""

    steps = 5

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.rand(5, 8))
        self.decay, self.first = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))
        self.k, self.v, self.r, self.out = (nn.Linear(8, 8, bias=False) for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))
        self.key, self.value, self.gate = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 8)

    def mixed(self, x: Tensor, i: int) -> Tensor:
        before = functional.pad(x, (0, 0, 1, -1))
        return x * self.mix[i] + before * (1 - self.mix[i])

    def attend(self, x: Tensor) -> Tensor:
        k, v, r = (project(self.mixed(x, i)) for i, project in enumerate((self.k, self.v, self.r)))
        decay, outputs = -torch.exp(self.decay), []
        top = total = torch.zeros_like(k[:, 0])
        largest = top - 1e30
        for i in range(self.steps):
            key, value = k[:, i], v[:, i]
            now = torch.maximum(largest, self.first + key)
            old, new = torch.exp(largest - now), torch.exp(self.first + key - now)
            outputs.append((old * top + new * value) / (old * total + new))
            now = torch.maximum(largest + decay, key)
            old, new = torch.exp(largest + decay - now), torch.exp(key - now)
            top, total, largest = old * top + new * value, old * total + new, now
        return self.out(r.sigmoid() * torch.stack(outputs, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norms[0](x))
        y = self.norms[1](x)
        key = torch.square(self.key(self.mixed(y, 3)).relu())
        return x + torch.sigmoid(self.gate(self.mixed(y, 4))) * self.value(key)


class MixtureOfExperts(nn.Module):
    """Each token goes to the two experts of four with the highest scores, weighted by their softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(4, 8, 12) / 3), nn.Parameter(torch.randn(4, 12, 8) / 3)

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = torch.topk(self.router(x), 2, -1)
        gates = torch.zeros_like(self.router(x)).scatter(-1, chosen, scores.softmax(-1))
        inner = functional.gelu(torch.einsum("ntd,edh->neth", x, self.up))
        return torch.einsum("neth,ehd,nte->ntd", inner, self.down, gates)


class MixtureByRows(MixtureOfExperts):
    """The same, with the weights of the chosen experts gathered for every token."""

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = torch.topk(self.router(x), 2, -1)
        inner = functional.gelu(torch.einsum("ntd,ntkdh->ntkh", x, self.up[chosen]))
        rows = torch.einsum("ntkh,ntkhd->ntkd", inner, self.down[chosen])
        return (rows * scores.softmax(-1).unsqueeze(-1)).sum(2)


class Transformer(nn.Module):
    """PyTorch's own layers, as an encoder and a decoder with a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        options = {"dim_feedforward": 24, "dropout": 0.0, "batch_first": True}
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 2, activation="gelu", **options)
        self.decoder = nn.TransformerDecoderLayer(WIDTH, 4, norm_first=True, **options)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        later = torch.full((target.shape[1], target.shape[1]), -torch.inf, dtype=target.dtype).triu(1)
        return self.decoder(target, self.encoder(source), tgt_mask=later)
