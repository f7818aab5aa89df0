"""Running: sessions, kernels, and how onnxruntime calls them."""
