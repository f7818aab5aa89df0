"""Training on the stock onnxruntime, with the interface of onnxruntime.training 1.19.2."""
