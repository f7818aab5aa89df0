"""The interface and the files of onnxruntime.training 1.19.2, on top of the native training.

Users import them under the names that they have in onnxruntime: `ortgrad.training.api`,
`ortgrad.training.artifacts` and `ortgrad.training.onnxblock`. Two parts of 1.19.2 are in lower layers, which
need them as well: the format of checkpoints in `ortgrad.training.checkpoint`, because a Trainer saves in it,
and the operators in `ortgrad.dialects`, because models that contain them are opened like any others.
"""
