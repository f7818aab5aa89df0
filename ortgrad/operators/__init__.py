"""What an operator is: its declaration, the call that a node carries, its schema for onnx."""
