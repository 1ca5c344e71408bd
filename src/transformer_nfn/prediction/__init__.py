"""Data sets of networks, protocol, training of predictors, runs, prediction with an interval."""
