"""Models that predict the accuracy of a network from its weights."""

from transformer_nfn.models.baselines import MLP, StatNN
from transformer_nfn.models.invariants import invariant_features
from transformer_nfn.models.learners import Learner, PredictorError
from transformer_nfn.models.network import Network, map_network, network_of, tensors_of
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
    "BlockEncoder",
    "HiddenProbe",
    "InvariantBoosting",
    "InvariantMLP",
    "Learner",
    "LightGBMPredictor",
    "Network",
    "NeuralGraph",
    "PredictorError",
    "ProbeGen",
    "RandomForestPredictor",
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
    "map_network",
    "network_of",
    "tensors_of",
]
