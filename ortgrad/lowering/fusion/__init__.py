"""Fused nodes: several element-wise nodes as one operator, whose kernel is generated from its program."""
