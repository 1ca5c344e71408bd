"""How near can one network be brought to another without changing what it computes?"""

import transformer_nfn.symmetry.relate  # noqa: F401  (before `prove`, which it imports in turn)
from transformer_nfn.symmetry.alignment.files import Aligned, align
from transformer_nfn.symmetry.alignment.network import NetworkAlignment, align_networks
from transformer_nfn.symmetry.alignment.whole import Alignment

__all__ = ["Aligned", "Alignment", "NetworkAlignment", "align", "align_networks"]
