"""Node builders, one per gradient operator. Written by docs/generate.py from the declarations."""

from collections.abc import Mapping, Sequence

import onnx
from numpy.typing import DTypeLike

from ortgrad.prepare import Kernels

def make_model(
    nodes: onnx.NodeProto | Sequence[onnx.NodeProto],
    *,
    shapes: Mapping[str, Sequence[int | str | None]] | None = None,
    dtype: DTypeLike = "float32",
    kernels: Kernels = "python",
) -> onnx.ModelProto: ...
def average_pool_grad(
    dY: str,
    X_shape: str,
    outputs: str | Sequence[str] = ...,
    *,
    auto_pad: str = ...,
    ceil_mode: int = ...,
    dilations: Sequence[int] = ...,
    kernel_shape: Sequence[int] = ...,
    pads: Sequence[int] = ...,
    strides: Sequence[int] = ...,
    count_include_pad: int = ...,
    name: str = "",
    dtype: DTypeLike = "float32",
) -> onnx.NodeProto: ...
def bias_gelu_grad_dx(
    dY: str,
    X: str,
    B: str,
    outputs: str | Sequence[str] = ...,
    *,
    name: str = "",
    dtype: DTypeLike = "float32",
) -> onnx.NodeProto: ...
def conv_grad(
    dY: str,
    X: str,
    W: str,
    outputs: str | Sequence[str | None] = ...,
    *,
    auto_pad: str = ...,
    dilations: Sequence[int] = ...,
    group: int = ...,
    kernel_shape: Sequence[int] = ...,
    pads: Sequence[int] = ...,
    strides: Sequence[int] = ...,
    name: str = "",
    dtype: DTypeLike = "float32",
) -> onnx.NodeProto: ...
def dropout_grad(
    dY: str,
    mask: str | None = None,
    ratio: str | None = None,
    training_mode: str | None = None,
    outputs: str | Sequence[str] = ...,
    *,
    name: str = "",
    dtype: DTypeLike = "float32",
) -> onnx.NodeProto: ...
def fast_gelu_grad(
    dY: str,
    X: str,
    outputs: str | Sequence[str] = ...,
    *,
    name: str = "",
    dtype: DTypeLike = "float32",
) -> onnx.NodeProto: ...
def gelu_grad(
    dY: str,
    X: str,
    outputs: str | Sequence[str] = ...,
    *,
    name: str = "",
    dtype: DTypeLike = "float32",
) -> onnx.NodeProto: ...
def gru_grad(
    X: str,
    W: str,
    R: str,
    B: str | None = None,
    SL: str | None = None,
    H0: str | None = None,
    HAll: str | None = None,
    ZRH: str | None = None,
    dHAll: str | None = None,
    dHFinal: str | None = None,
    outputs: str | Sequence[str | None] = ...,
    *,
    activations: Sequence[str] = ...,
    activation_alpha: Sequence[float] = ...,
    activation_beta: Sequence[float] = ...,
    clip: float = ...,
    direction: str = ...,
    hidden_size: int = ...,
    layout: int = ...,
    linear_before_reset: int = ...,
    name: str = "",
    dtype: DTypeLike = "float32",
) -> onnx.NodeProto: ...
def gru_training(
    X: str,
    W: str,
    R: str,
    B: str | None = None,
    SL: str | None = None,
    H0: str | None = None,
    outputs: str | Sequence[str | None] = ...,
    *,
    activations: Sequence[str] = ...,
    activation_alpha: Sequence[float] = ...,
    activation_beta: Sequence[float] = ...,
    clip: float = ...,
    direction: str = ...,
    hidden_size: int = ...,
    layout: int = ...,
    linear_before_reset: int = ...,
    name: str = "",
    dtype: DTypeLike = "float32",
) -> onnx.NodeProto: ...
def in_place_accumulator_v2(
    accumulation_buffer: str,
    value: str,
    overwrite_flag: str | None = None,
    outputs: str | Sequence[str | None] = ...,
    *,
    name: str = "",
    dtype: DTypeLike = "float32",
) -> onnx.NodeProto: ...
def leaky_relu_grad(
    dY: str,
    Y: str,
    outputs: str | Sequence[str] = ...,
    *,
    alpha: float = ...,
    name: str = "",
    dtype: DTypeLike = "float32",
) -> onnx.NodeProto: ...
def log_softmax_grad(
    dY: str,
    Y: str,
    outputs: str | Sequence[str] = ...,
    *,
    axis: int = ...,
    name: str = "",
    dtype: DTypeLike = "float32",
) -> onnx.NodeProto: ...
def log_softmax_grad_13(
    dY: str,
    Y: str,
    outputs: str | Sequence[str] = ...,
    *,
    axis: int = ...,
    name: str = "",
    dtype: DTypeLike = "float32",
) -> onnx.NodeProto: ...
def max_pool_grad(
    dY: str,
    Indices: str,
    X_shape: str,
    outputs: str | Sequence[str] = ...,
    *,
    auto_pad: str = ...,
    ceil_mode: int = ...,
    dilations: Sequence[int] = ...,
    kernel_shape: Sequence[int] = ...,
    pads: Sequence[int] = ...,
    strides: Sequence[int] = ...,
    storage_order: int = ...,
    name: str = "",
    dtype: DTypeLike = "float32",
) -> onnx.NodeProto: ...
def quick_gelu_grad(
    dY: str,
    X: str,
    outputs: str | Sequence[str] = ...,
    *,
    alpha: float = ...,
    name: str = "",
    dtype: DTypeLike = "float32",
) -> onnx.NodeProto: ...
def relu_grad(
    dY: str,
    X: str,
    outputs: str | Sequence[str] = ...,
    *,
    name: str = "",
    dtype: DTypeLike = "float32",
) -> onnx.NodeProto: ...
def sigmoid_grad(
    dY: str,
    Y: str,
    outputs: str | Sequence[str] = ...,
    *,
    name: str = "",
    dtype: DTypeLike = "float32",
) -> onnx.NodeProto: ...
def softmax_cross_entropy_loss_grad(
    dY: str,
    log_prob: str,
    label: str,
    weight: str | None = None,
    outputs: str | Sequence[str] = ...,
    *,
    reduction: str = ...,
    ignore_index: int = ...,
    name: str = "",
    dtype: DTypeLike = "float32",
) -> onnx.NodeProto: ...
def softmax_grad(
    dY: str,
    Y: str,
    outputs: str | Sequence[str] = ...,
    *,
    axis: int = ...,
    name: str = "",
    dtype: DTypeLike = "float32",
) -> onnx.NodeProto: ...
def softmax_grad_13(
    dY: str,
    Y: str,
    outputs: str | Sequence[str] = ...,
    *,
    axis: int = ...,
    name: str = "",
    dtype: DTypeLike = "float32",
) -> onnx.NodeProto: ...
def tanh_grad(
    dY: str,
    Y: str,
    outputs: str | Sequence[str] = ...,
    *,
    name: str = "",
    dtype: DTypeLike = "float32",
) -> onnx.NodeProto: ...
def trainable_dropout_grad(
    dY: str,
    mask: str | None = None,
    ratio: str | None = None,
    training_mode: str | None = None,
    outputs: str | Sequence[str] = ...,
    *,
    name: str = "",
    dtype: DTypeLike = "float32",
) -> onnx.NodeProto: ...
