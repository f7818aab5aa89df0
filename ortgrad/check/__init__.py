"""Gradients against finite differences."""

from ortgrad.check.gradients import GradientCheck, check_gradients

__all__ = ["GradientCheck", "check_gradients"]
