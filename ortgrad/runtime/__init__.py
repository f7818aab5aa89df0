"""Running models: sessions, and the calls from onnxruntime to the kernels."""
