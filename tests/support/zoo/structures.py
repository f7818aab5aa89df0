"""Architectures on points, graphs and differential equations."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class PointNet(nn.Module):
    """A learned transformation of the points, layers for each point, and the maximum over them."""

    def __init__(self) -> None:
        super().__init__()
        self.t_conv = nn.Sequential(nn.Conv1d(3, 8, 1), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 12, 1))
        self.t_head = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 9))
        self.register_buffer("identity", torch.eye(3).flatten())
        self.features = nn.Sequential(
            nn.Conv1d(3, 10, 1), nn.BatchNorm1d(10), nn.ReLU(), nn.Conv1d(10, 12, 1)
        )
        self.segment = nn.Conv1d(24, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        matrix = self.t_head(torch.max(self.t_conv(x), 2)[0]) + self.identity
        x = torch.bmm(x.transpose(2, 1), matrix.view(-1, 3, 3)).transpose(2, 1)
        local = self.features(x)
        whole = torch.max(local, 2, keepdim=True)[0].expand_as(local)
        return functional.log_softmax(self.segment(torch.cat([local, whole], 1)).transpose(2, 1), -1)


class GraphNetwork(nn.Module):
    """Messages along edges, added up at their targets; then the mean over the neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(11, 8), nn.GRUCell(8, 4)
        self.own, self.others = nn.Linear(4, 5), nn.Linear(4, 5, bias=False)

    def forward(self, x: Tensor, edges: Tensor, features: Tensor) -> Tensor:
        source, target = edges[0], edges[1]
        pairs = torch.cat([x[source], x[target], features], 1)
        messages = functional.softplus(self.message(pairs))
        total = torch.zeros(x.shape[0], 8, dtype=x.dtype)
        total = total.scatter_add(0, target[:, None].expand(-1, 8), messages)
        x = self.update(total, x)
        at = target[:, None].expand(-1, 4)
        total = torch.zeros_like(x).scatter_add(0, at, x[source])
        degree = torch.zeros_like(x).scatter_add(0, at, torch.ones_like(x[source])).clamp(min=1)
        return functional.elu(self.own(x) + self.others(total / degree))


class GraphAttention(nn.Module):
    """Attention over the neighbours in a dense adjacency matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 6, bias=False)
        self.source, self.target = nn.Parameter(torch.randn(6, 1)), nn.Parameter(torch.randn(6, 1))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        h = self.project(x)
        count = x.shape[0]
        linked = torch.zeros(count, count, dtype=x.dtype).index_put(
            (edges[0], edges[1]), torch.ones(edges.shape[1], dtype=x.dtype)
        )
        linked = linked + torch.eye(count, dtype=x.dtype)
        scores = functional.leaky_relu(h @ self.source + (h @ self.target).T, 0.2)
        weights = torch.where(linked > 0, scores, torch.full_like(scores, -9e15)).softmax(1)
        return functional.elu(weights @ h)


class NeuralOde(nn.Module):
    """Runge-Kutta steps through a learned field; how many is an input."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(5, 12), nn.Linear(12, 4)

    def field(self, t: Tensor, x: Tensor) -> Tensor:
        time = t.expand(x.shape[0], 1)
        return self.two(torch.tanh(self.one(torch.cat([x, time], 1))))

    def forward(self, x: Tensor, steps: Tensor) -> Tensor:
        count = int(steps)
        h = torch.ones(1, dtype=x.dtype) / count
        t = torch.zeros(1, dtype=x.dtype)
        for _ in range(count):
            k1 = self.field(t, x)
            k2 = self.field(t + h / 2, x + h / 2 * k1)
            k3 = self.field(t + h / 2, x + h / 2 * k2)
            k4 = self.field(t + h, x + h * k3)
            x = x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
            t = t + h
        return x


class DeepSets(nn.Module):
    """Sum, mean, maximum, minimum and deviation over the elements of a set."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 6), nn.Linear(30, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.selu(self.inner(x))
        parts = [x.sum(1), x.mean(1), x.amax(1), x.amin(1), x.std(1)]
        return self.outer(torch.cat(parts, 1))
