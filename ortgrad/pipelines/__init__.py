"""The pipelines, which run passes in order: build_gradient_model, prepare, explain."""
