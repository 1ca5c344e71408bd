"""Models that predict the accuracy of a network from its weights."""

from transformer_nfn.models.baselines import MLP, StatNN
from transformer_nfn.models.invariants import InvariantBoosting, InvariantMLP, invariant_features
from transformer_nfn.models.network import Network, map_network, network_of, tensors_of
from transformer_nfn.models.neural_graph import NeuralGraph
from transformer_nfn.models.probing import HiddenProbe, ProbeGen
from transformer_nfn.models.tabular import PredictorError, TabularPredictor
from transformer_nfn.models.tensor_tables import (
    StatisticsBoosting,
    StatisticsLinear,
    StatisticsMLP,
    WeightsMLP,
)
from transformer_nfn.models.transformer_nfn import BlockEncoder, TransformerNFN
from transformer_nfn.models.trees import (
    LightGBMPredictor,
    RandomForestPredictor,
    XGBoostPredictor,
)
from transformer_nfn.models.whole_network import WholeCheckpoint, WholeNetwork

__all__ = [
    "MLP",
    "BlockEncoder",
    "HiddenProbe",
    "InvariantBoosting",
    "InvariantMLP",
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
    "TabularPredictor",
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
