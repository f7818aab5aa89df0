"""Definitions of onnxruntime's own operators, as optimised models hold them, in standard operators."""
