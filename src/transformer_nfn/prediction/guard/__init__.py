"""Guard against damaged networks: outlier scores, warnings and corrected predictions."""

from transformer_nfn.prediction.guard.guard import Assessment, Guard
from transformer_nfn.prediction.runs import GUARD_FILE

__all__ = ["GUARD_FILE", "Assessment", "Guard"]
