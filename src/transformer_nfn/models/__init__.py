"""Transformer-NFN, what it reads, and what it is compared with."""

from transformer_nfn.models.boosting import LightGBMPredictor, XGBoostPredictor
from transformer_nfn.models.forest import RandomForestPredictor
from transformer_nfn.models.invariant_predictors import InvariantBoosting, InvariantMLP
from transformer_nfn.models.invariants import invariant_features
from transformer_nfn.models.mlp import MLP
from transformer_nfn.models.network import Network, map_network, network_of, tensors_of
from transformer_nfn.models.predictor import PredictorError, TabularPredictor
from transformer_nfn.models.statnn import StatNN
from transformer_nfn.models.transformer_nfn import BlockEncoder, TransformerNFN
from transformer_nfn.models.whole_network import WholeNetwork

__all__ = [
    "MLP",
    "BlockEncoder",
    "InvariantBoosting",
    "InvariantMLP",
    "LightGBMPredictor",
    "Network",
    "PredictorError",
    "RandomForestPredictor",
    "StatNN",
    "TabularPredictor",
    "TransformerNFN",
    "WholeNetwork",
    "XGBoostPredictor",
    "invariant_features",
    "map_network",
    "network_of",
    "tensors_of",
]
