"""The learning curve, under the name that earlier installations know."""

from dppo.tools.pictures.learning_curve import LearningCurve

__all__ = ["LearningCurve"]
