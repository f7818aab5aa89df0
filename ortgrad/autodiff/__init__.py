"""Gradient rules, and the backward pass that applies them."""
