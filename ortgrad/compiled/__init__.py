"""Kernels that Numba compiles to machine code, and that onnxruntime calls without Python."""
