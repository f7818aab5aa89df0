"""One peer's process for run.py, which times single gradient nodes.

    python worker.py PEER        PEER: a value of kernels=, registered, stock, training or torch

Requests are those of serving.py; "load" has op_type, attributes, outputs, the path of the model and the
number of threads (null: the peer's default) too.
"""

import sys

import numpy as np
from serving import serve, session_runner

ALIGNMENT = 64


def aligned(array):
    """A copy whose memory begins where a cache line does, as all tensors inside of a model do."""
    memory = np.empty(array.nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def session_options(request):
    import onnxruntime

    options = onnxruntime.SessionOptions()
    if request["threads"]:
        options.intra_op_num_threads = request["threads"]
    return options


def bound_runner(session, feeds):
    """A call with all inputs bound once, and outputs in memory of the session."""
    names = {output.name: output.name for output in session.get_outputs()}
    return session_runner(session, feeds, names, bound=feeds)


def ortgrad_peer(kernels):
    import ortgrad

    def load(request, feeds):
        options = session_options(request)
        return bound_runner(ortgrad.InferenceSession(request["model"], options, kernels=kernels), feeds)

    return load


def registered_peer():
    """Compiled kernels in a plain session, in which nodes are not fused."""
    import onnxruntime

    import ortgrad

    def load(request, feeds):
        options = session_options(request)
        ortgrad.register(options)
        model = ortgrad.prepare(request["model"], kernels="compiled").SerializeToString()
        return bound_runner(
            onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"]), feeds
        )

    return load


def stock_peer():
    """The same kernels as Python operators of onnxruntime-extensions, called as it calls them."""
    import onnxruntime
    from onnxruntime_extensions import PyCustomOpDef, get_library_path, onnx_op

    import ortgrad
    from ortgrad.operators.call import parse_call
    from ortgrad.operators.declaration import CALL_ATTRIBUTE, all_operators
    from ortgrad.runtime.evaluate import declared_shapes, evaluate

    types = {"float32": PyCustomOpDef.dt_float, "float64": PyCustomOpDef.dt_double}
    types |= {"int32": PyCustomOpDef.dt_int32, "int64": PyCustomOpDef.dt_int64, "bool": PyCustomOpDef.dt_bool}

    def declare(operator, variant):
        dtypes = [np.dtype(t) for t in variant.outputs]

        @onnx_op(
            op_type=f"{operator.domain}::{operator.name}",
            inputs=[types[t] for t in variant.inputs],
            outputs=[types[t] for t in variant.outputs],
            attrs={CALL_ATTRIBUTE: PyCustomOpDef.dt_string},
        )
        def kernel(*feed, **attributes):
            call = parse_call(operator, attributes[CALL_ATTRIBUTE])
            shapes = declared_shapes(call, feed)
            values = evaluate(call, feed, dtypes, shapes, lambda i, shape: np.empty(shape, dtypes[i]))
            return tuple(np.zeros(0, t) if v is None else v for v, t in zip(values, dtypes, strict=True))

    for operator in all_operators():
        for variant in operator.variants():
            declare(operator, variant)

    def load(request, feeds):
        options = session_options(request)
        options.register_custom_ops_library(get_library_path())
        model = ortgrad.prepare(request["model"], kernels="python").SerializeToString()
        return bound_runner(
            onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"]), feeds
        )

    return load


def training_peer():
    import onnxruntime

    def load(request, feeds):
        options = session_options(request)
        return bound_runner(
            onnxruntime.InferenceSession(request["model"], options, providers=["CPUExecutionProvider"]), feeds
        )

    return load


def torch_peer():
    import torch

    aten = torch.ops.aten

    def quick_gelu(i, a):
        x = i["X"].requires_grad_()
        y = x * torch.sigmoid(a["alpha"] * x)
        return lambda: torch.autograd.grad(y, x, i["dY"], retain_graph=True)

    def dropout(i, a):
        scale = 1 / (1 - float(i["ratio"]))
        return lambda: aten.native_dropout_backward(i["dY"], i["mask"], scale)

    def softmax(function):
        return lambda i, a: lambda: function(i["dY"], i["Y"], a["axis"], torch.float32)

    def gelu(approximate):
        return lambda i, a: lambda: aten.gelu_backward(i["dY"], i["X"], approximate=approximate)

    def loss(i, a):
        rows = torch.tensor(float(len(i["label"])))
        nll = aten.nll_loss_backward
        # The loss's own backward, then LogSoftmax's: together what the ONNX operator is.
        return lambda: aten._log_softmax_backward_data(
            nll(i["dY"], i["log_prob"], i["label"], None, 1, -100, rows), i["log_prob"], 1, torch.float32
        )

    def conv(i, a):
        pads = a["pads"][: len(a["pads"]) // 2]
        none = [0] * len(pads)
        w = i["W"]
        return lambda: aten.convolution_backward(
            i["dY"],
            i["X"],
            w,
            [len(w)],
            a["strides"],
            pads,
            [1] * len(pads),
            False,
            none,
            a["group"],
            [True] * 3,
        )

    def max_pool(i, a):
        n, c, h, w = a["output_shape"]
        x = torch.zeros(n, c, h, w)
        # PyTorch counts within a plane.
        indices = i["Indices"] - torch.arange(n * c).reshape(n, c, 1, 1) * (h * w)
        k, s, p = a["kernel_shape"], a["strides"], a["pads"][:2]
        return lambda: aten.max_pool2d_with_indices_backward(i["dY"], x, k, s, p, [1, 1], False, indices)

    def average_pool(i, a):
        x = torch.zeros(a["output_shape"])
        k, s, p = a["kernel_shape"], a["strides"], a["pads"][:2]
        include = bool(a["count_include_pad"])
        return lambda: aten.avg_pool2d_backward(i["dY"], x, k, s, p, False, include, None)

    def swap(t):
        """ONNX keeps the gates as z, r, h; PyTorch as r, z, h."""
        z, r, h = t.chunk(3)
        return torch.cat([r, z, h])

    def gru(i, a):
        bias = i["B"][0].chunk(2)
        sources = [swap(i["W"][0]), swap(i["R"][0]), swap(bias[0]), swap(bias[1])]
        weights = [t.clone().requires_grad_() for t in sources]
        x, h0 = i["X"].requires_grad_(), i["H0"].requires_grad_()
        y, last = torch.gru(x, h0, weights, True, 1, 0.0, True, False, False)
        seeds = [i["dHAll"][:, 0], i["dHFinal"]]
        return lambda: torch.autograd.grad([y, last], [x, *weights, h0], seeds, retain_graph=True)

    def gru_results(raw):
        dx, dw, dr, db_w, db_r, dh0 = raw
        db = torch.cat([swap(db_w), swap(db_r)])
        return {"dX": dx, "dW": swap(dw)[None], "dR": swap(dr)[None], "dB": db[None], "dH0": dh0}

    def chain(i, a):
        def run():
            dx = i["dY"]
            for _ in range(a["count"]):
                dx = aten.threshold_backward(dx, i["X"], 0)
            return dx

        return run

    functions = {
        "chain": chain,
        "ReluGrad": lambda i, a: lambda: aten.threshold_backward(i["dY"], i["X"], 0),
        "SigmoidGrad": lambda i, a: lambda: aten.sigmoid_backward(i["dY"], i["Y"]),
        "TanhGrad": lambda i, a: lambda: aten.tanh_backward(i["dY"], i["Y"]),
        "LeakyReluGrad": lambda i, a: lambda: aten.leaky_relu_backward(i["dY"], i["Y"], a["alpha"], True),
        "QuickGeluGrad": quick_gelu,
        "GeluGrad": gelu("none"),
        "FastGeluGrad": gelu("tanh"),
        "BiasGeluGrad_dX": lambda i, a: (
            lambda: aten.gelu_backward(i["dY"], i["X"] + i["B"], approximate="none")
        ),
        "SoftmaxGrad": softmax(aten._softmax_backward_data),
        "SoftmaxGrad_13": softmax(aten._softmax_backward_data),
        "LogSoftmaxGrad": softmax(aten._log_softmax_backward_data),
        "LogSoftmaxGrad_13": softmax(aten._log_softmax_backward_data),
        "DropoutGrad": dropout,
        "TrainableDropoutGrad": dropout,
        "SoftmaxCrossEntropyLossGrad": loss,
        "ConvGrad": conv,
        "MaxPoolGrad": max_pool,
        "AveragePoolGrad": average_pool,
        "GRUGrad": gru,
    }

    def load(request, feeds):
        if request["threads"]:
            torch.set_num_threads(request["threads"])
        tensors = {name: torch.from_numpy(array) for name, array in feeds.items()}
        run = functions[request["op_type"]](tensors, request["attributes"])

        def results(raw):
            raw = [raw] if isinstance(raw, torch.Tensor) else raw
            named = (
                gru_results(raw)
                if request["op_type"] == "GRUGrad"
                else dict(zip(request["outputs"], raw, strict=True))
            )
            return {name: value.detach().numpy() for name, value in named.items()}

        return run, results

    return load


PEERS = {
    "registered": registered_peer,
    "stock": stock_peer,
    "training": training_peer,
    "torch": torch_peer,
}

if __name__ == "__main__":
    peer = sys.argv[1]
    loader = PEERS[peer]() if peer in PEERS else ortgrad_peer(peer)
    serve(lambda request, feeds: loader(request, {name: aligned(array) for name, array in feeds.items()}))
