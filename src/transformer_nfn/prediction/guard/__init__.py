"""Guard against damaged networks: outlier scores, warnings and corrected predictions."""

from transformer_nfn.prediction.guard.guard import GUARD_FILE, Assessment, Guard

__all__ = ["GUARD_FILE", "Assessment", "Guard"]
