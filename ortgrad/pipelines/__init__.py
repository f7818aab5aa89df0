"""From a model to another: build_gradient_model, prepare, explain."""
