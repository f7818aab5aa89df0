"""Graph passes on onnx-ir models, one per file; each takes a model and returns it."""
