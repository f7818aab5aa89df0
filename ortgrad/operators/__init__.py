"""Operators: their declaration, the contract of their shapes, the call of a node, the schema for onnx."""
