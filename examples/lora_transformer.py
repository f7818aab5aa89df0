"""Adapt a small transformer to other data with LoRA: the weights stay, small matrices beside them learn.

    python examples/lora_transformer.py [ADAPTERS.safetensors]

A transformer that reads a handwritten digit line by line learns the digits (they come with scikit-learn).
Then the images are mirrored. Adapters of rank 4 beside the attention and the feed-forward layers are
trained, stored in a file of their own, loaded again and merged into the weights.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime

from ortgrad import training
from ortgrad.cli.demo import digits
from ortgrad.training.lora import add_lora, load_lora, lora_parameters, merge_lora, save_lora

LAYERS, WIDTH = 2, 32
# Layer # of the encoder, with four heads.
LAYER = """
    n# = LayerNormalization(x#, norm#_1)
    flat_query# = MatMul(n#, layer#_query)
    flat_key# = MatMul(n#, layer#_key)
    flat_value# = MatMul(n#, layer#_value)
    split_query# = Reshape(flat_query#, heads)
    split_key# = Reshape(flat_key#, heads)
    split_value# = Reshape(flat_value#, heads)
    query# = Transpose<perm = [0, 2, 1, 3]>(split_query#)
    key# = Transpose<perm = [0, 2, 3, 1]>(split_key#)
    value# = Transpose<perm = [0, 2, 1, 3]>(split_value#)
    scores# = MatMul(query#, key#)
    scaled# = Mul(scores#, scale)
    chosen# = Softmax(scaled#)
    mixed# = MatMul(chosen#, value#)
    joined# = Transpose<perm = [0, 2, 1, 3]>(mixed#)
    flat# = Reshape(joined#, lines_shape)
    attended# = MatMul(flat#, layer#_out)
    y# = Add(x#, attended#)
    m# = LayerNormalization(y#, norm#_2)
    wide# = MatMul(m#, layer#_up)
    active# = Gelu(wide#)
    narrow# = MatMul(active#, layer#_down)
    x% = Add(y#, narrow#)
"""


def transformer() -> onnx.ModelProto:
    """Return an encoder of LAYERS layers over the eight lines of an image, with random weights."""
    layers = "".join(LAYER.replace("#", str(i)).replace("%", str(i + 1)) for i in range(LAYERS))
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["" : 21]>
        transformer (float[N, 1, 8, 8] image) => (float[N, 10] logits)
        <int64[1] one = {{1}}, float scale = {{{8**-0.5}}}, int64[4] heads = {{0, 8, 4, 8}},
         int64[3] lines_shape = {{0, 8, {WIDTH}}}> {{
            lines = Squeeze(image, one)
            embedded = MatMul(lines, embedding)
            x0 = Add(embedded, position)
            {layers}
            pooled = ReduceMean<keepdims = 0>(x{LAYERS}, one)
            logits = MatMul(pooled, head)
        }}
    """)
    shapes = {"embedding": (8, WIDTH), "position": (8, WIDTH), "head": (WIDTH, 10)}
    for i in range(LAYERS):
        shapes |= {f"layer{i}_{name}": (WIDTH, WIDTH) for name in ("query", "key", "value", "out")}
        shapes |= {f"layer{i}_up": (WIDTH, 4 * WIDTH), f"layer{i}_down": (4 * WIDTH, WIDTH)}
    generator = np.random.default_rng(0)
    arrays = {name: generator.normal(0, shape[0] ** -0.5, shape) for name, shape in shapes.items()}
    arrays |= {f"norm{i}_{k}": np.ones(WIDTH) for i in range(LAYERS) for k in (1, 2)}
    for name, array in arrays.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
    return model


def main(path: Path | None = None) -> tuple[float, float, float]:
    """Return the accuracy on mirrored digits before and after, and the share of trained numbers."""
    train, test = digits()
    first = training.fit(
        transformer(),
        (train.images, train.labels),
        loss="cross-entropy",
        learning_rate=0.005,
        schedule="cosine",
        epochs=10,
        progress=None,
    )
    print(f"digits: {first}")

    base = first.model
    adapted = add_lora(base, "layer*", rank=4)
    names = lora_parameters(adapted)
    sizes = {tensor.name: int(np.prod(tensor.dims)) for tensor in adapted.graph.initializer}
    share = sum(sizes[name] for name in names) / sum(sizes.values())
    trainer = training.Trainer(
        adapted, loss="cross-entropy", wrt=names, learning_rate=0.01, schedule="cosine"
    )
    held_out = (np.ascontiguousarray(test.images[..., ::-1]), test.labels)
    _, before = trainer.evaluate(held_out, "accuracy")
    mirrored = np.ascontiguousarray(train.images[..., ::-1])
    result = trainer.fit((mirrored, train.labels), epochs=15, progress=None)

    with tempfile.TemporaryDirectory() as folder:
        file = path or Path(folder) / "adapters.safetensors"
        save_lora(result, file, model=adapted)
        merged = merge_lora(load_lora(base, file))
        print(f"adapters: {len(names)} matrices, {share:.0%} of all numbers, {file.stat().st_size} bytes")
    session = onnxruntime.InferenceSession(merged.SerializeToString(), providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {"image": held_out[0]})
    after = float(np.mean(np.argmax(logits, axis=1) == held_out[1]))
    assert before is not None
    print(f"mirrored digits: before {before:.1%} right, after {after:.1%}")
    return before, after, share


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:2]))
