"""Whole networks of any width, number of heads and depth: parameters belong to roles."""

from transformer_nfn.nn.roles.layers import RoleLayers
from transformer_nfn.nn.roles.normal import NormalForm, evenly_sized, normal_form

__all__ = ["NormalForm", "RoleLayers", "evenly_sized", "normal_form"]
