"""Comparison of gradients with finite differences."""

from ortgrad.check.gradients import check_gradients
from ortgrad.check.result import GradientCheck

__all__ = ["GradientCheck", "check_gradients"]
