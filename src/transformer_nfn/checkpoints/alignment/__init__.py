"""How near can one network be brought to another without changing what it computes?"""

from transformer_nfn.checkpoints.alignment.files import Aligned, align
from transformer_nfn.checkpoints.alignment.network import NetworkAlignment, align_networks
from transformer_nfn.checkpoints.alignment.whole import Alignment

__all__ = ["Aligned", "Alignment", "NetworkAlignment", "align", "align_networks"]
