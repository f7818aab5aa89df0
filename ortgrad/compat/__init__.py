"""The interface and the files of onnxruntime.training 1.19.2, on top of the native training.

Users import them under the names that they have in onnxruntime: `ortgrad.training.api`,
`ortgrad.training.artifacts` and `ortgrad.training.onnxblock`.
"""
