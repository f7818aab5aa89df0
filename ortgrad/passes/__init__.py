"""Graph passes on onnx-ir models: one file each, a pass does one thing."""
