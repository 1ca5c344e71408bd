"""Models that predict the accuracy of a network from its weights."""

from transformer_nfn.models.baselines import MLP, StatNN
from transformer_nfn.models.batch import Batch, RowLayout
from transformer_nfn.models.invariants import invariant_features
from transformer_nfn.models.learners import Learner, PredictorError
from transformer_nfn.models.neural_graph import NeuralGraph
from transformer_nfn.models.probing import HiddenProbe, ProbeGen
from transformer_nfn.models.tabular import Tabular
from transformer_nfn.models.tabular_presets import (
    InvariantBoosting,
    InvariantMLP,
    LightGBMPredictor,
    RandomForestPredictor,
    StatisticsBoosting,
    StatisticsLinear,
    StatisticsMLP,
    WeightsMLP,
    XGBoostPredictor,
)
from transformer_nfn.models.transformer_nfn import BlockEncoder, TransformerNFN
from transformer_nfn.models.whole_network import WholeCheckpoint, WholeNetwork

__all__ = [
    "MLP",
    "Batch",
    "BlockEncoder",
    "HiddenProbe",
    "InvariantBoosting",
    "InvariantMLP",
    "Learner",
    "LightGBMPredictor",
    "NeuralGraph",
    "PredictorError",
    "ProbeGen",
    "RandomForestPredictor",
    "RowLayout",
    "StatNN",
    "StatisticsBoosting",
    "StatisticsLinear",
    "StatisticsMLP",
    "Tabular",
    "TransformerNFN",
    "WeightsMLP",
    "WholeCheckpoint",
    "WholeNetwork",
    "XGBoostPredictor",
    "invariant_features",
]
