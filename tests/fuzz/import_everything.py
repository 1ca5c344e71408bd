"""Imports what commands import when they run, once, before children are forked."""

import importlib
import pkgutil

import compressed_tensors.compressors.pack_quantized
import compressed_tensors.entrypoints.convert  # noqa: F401
import gguf  # noqa: F401
import huggingface_hub.constants
import huggingface_hub.utils  # noqa: F401
import lightgbm  # noqa: F401
import matplotlib.figure  # noqa: F401
import onnx  # noqa: F401
import pyarrow.parquet  # noqa: F401
import scipy.stats  # noqa: F401
import xgboost  # noqa: F401

import transformer_nfn

for module in pkgutil.walk_packages(transformer_nfn.__path__, "transformer_nfn."):
    if ".kernels" not in module.name and not module.name.endswith("__main__"):
        importlib.import_module(module.name)
