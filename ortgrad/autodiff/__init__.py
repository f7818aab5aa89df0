"""Automatic differentiation: gradient rules, and the backward pass that applies them."""
