"""One peer's process for models.py and field.py, which time whole models.

    python model_worker.py PEER        PEER: forward, a value of kernels=, or a key of PEERS

Requests are those of serving.py. "build" and "load" have the path of the model, the names of the weights
(null: all), the name of the output to differentiate, a folder for files, and for PyTorch kind and sizes.
A step is one call: forward and backward towards all weights. Results are the output and a gradient for each
weight, by its name.

Sessions run as in a training loop: the weights are bound once, the inputs in every step.
"""

import contextlib
import os
import sys
from pathlib import Path

import numpy as np
from serving import serve, session_runner


@contextlib.contextmanager
def quiet():
    """Nothing reaches stderr, not even from native code."""
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


def forward_peer():
    """The model as it is, on stock onnxruntime."""
    import onnxruntime

    def load(request, feeds):
        session = onnxruntime.InferenceSession(request["model"], providers=["CPUExecutionProvider"])
        return session_runner(session, feeds, {request["of"]: request["of"]})

    return load, None


def ortgrad_peer(kernels):
    import onnx

    import ortgrad

    def file(request):
        return Path(request["folder"]) / "backward.onnx"

    def build(request):
        backward = ortgrad.build_gradient_model(request["model"], wrt=request["weights"], of=request["of"])
        large = backward.ByteSize() > 1 << 30
        onnx.save(backward, file(request), save_as_external_data=large, location="backward.data")

    def load(request, feeds):
        session = ortgrad.InferenceSession(str(file(request)), kernels=kernels)
        names = {request["of"]: request["of"]}
        for output in session.get_outputs():
            weight = output.name.removesuffix("_grad")
            if weight != output.name and (request["weights"] is None or weight in request["weights"]):
                names[output.name] = weight
        return session_runner(session, feeds, names, request["weights"])

    return load, build


def onnx_ad_peer():
    import onnx
    import onnx_ad
    import onnxruntime
    from onnx import helper

    def build(request):
        model = onnx.load(request["model"])
        graph = model.graph
        weights = [t for t in graph.initializer if t.name in request["weights"]]
        for tensor in weights:
            # It differentiates towards inputs.
            graph.initializer.remove(tensor)
            graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
        backward = onnx_ad.reverse(model, inputs=request["weights"], outputs=[request["of"]], layout="onnx")
        onnx.save(backward, Path(request["folder"]) / "backward.onnx")

    def load(request, feeds):
        path = str(Path(request["folder"]) / "backward.onnx")
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        of = request["of"]
        names = {of: of, **{f"adj_{weight}": weight for weight in request["weights"]}}
        # The last axis counts the seeds.
        fed = {**feeds, f"adj_{of}": np.ones(1, np.float32)}
        run, named = session_runner(session, fed, names, request["weights"])
        return run, lambda raw: {
            name: value if name == of else value[..., 0] for name, value in named(raw).items()
        }

    return load, build


def ort_training_peer():
    import onnx
    import onnxruntime
    from onnxruntime.training import artifacts
    from onnxruntime.training.api import CheckpointState, Module

    onnxruntime.set_default_logger_severity(3)

    def build(request):
        # It writes a file into the working folder, and much on stderr.
        os.chdir(request["folder"])
        with quiet():
            artifacts.generate_artifacts(
                onnx.load(request["model"]),
                requires_grad=request["weights"],
                artifact_directory=request["folder"],
            )

    def load(request, feeds):
        folder = Path(request["folder"])
        state = CheckpointState.load_checkpoint(str(folder / "checkpoint"))
        module = Module(str(folder / "training_model.onnx"), state)
        module.train()
        fed = [feeds[name] for name in module.input_names()]

        def run():
            module.lazy_reset_grad()  # gradients are written, not added
            return module(*fed)

        def results(loss):
            gradients = {name: state.parameters[name].grad for name in request["weights"]}
            return {request["of"]: loss, **gradients}

        return run, results

    return load, build


def torch_peer(compiled):
    import torch
    import workloads_torch

    def load(request, feeds):
        kind, sizes = request["kind"], request["sizes"]
        tensors = {name: torch.from_numpy(array) for name, array in feeds.items()}
        values = workloads_torch.from_onnx(kind, tensors)
        weights = [name for name in values if name not in ("x", "label")]
        for name in weights:
            values[name].requires_grad_()
        forward = workloads_torch.KINDS[kind]
        if compiled:
            torch.compiler.reset()
            forward = torch.compile(forward)
        wrt = [values[name] for name in weights]

        def run():
            loss = forward(values, sizes)
            return loss, torch.autograd.grad(loss, wrt)

        def results(raw):
            loss, gradients = raw
            named = workloads_torch.to_onnx(kind, dict(zip(weights, gradients, strict=True)))
            return {name: value.detach().numpy() for name, value in {request["of"]: loss, **named}.items()}

        return run, results

    return load, None


PEERS = {
    "forward": forward_peer,
    "onnx-ad": onnx_ad_peer,
    "ort-training": ort_training_peer,
    "torch": lambda: torch_peer(compiled=False),
    "torch-compile": lambda: torch_peer(compiled=True),
}

if __name__ == "__main__":
    name = sys.argv[1]
    serve(*(PEERS[name]() if name in PEERS else ortgrad_peer(name)))
