"""Predictors of accuracy: data, training, prediction, evaluation, guard."""
