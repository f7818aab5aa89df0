"""Translation of onnxruntime-training's operators and ONNX's Gradient to ortgrad's and standard operators."""
