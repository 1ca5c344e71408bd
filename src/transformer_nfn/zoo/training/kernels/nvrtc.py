"""CUDA C++ source, compiled by NVRTC and launched by the CUDA driver."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from pathlib import Path

import torch

from transformer_nfn.zoo.errors import ZooError

# CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
MAX_SHARED = 8


@functools.cache
def library() -> ctypes.CDLL | None:
    """NVRTC from the library path, from the packages PyTorch depends on, or from CUDA's folder."""
    packages = Path(torch.__file__).parents[1] / "nvidia"
    places = [*packages.glob("*/lib/libnvrtc.so.*"), "/usr/local/cuda/lib64/libnvrtc.so"]
    for place in ("libnvrtc.so.13", "libnvrtc.so.12", *places):
        with contextlib.suppress(OSError):
            return ctypes.CDLL(str(place))
    return None


def compiled(source: str, defines: tuple[str, ...], architecture: str) -> bytes:
    """Machine code of ``source`` for an architecture such as ``sm_90a``."""
    nvrtc = library()
    assert nvrtc is not None
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    created = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), b"source.cu", 0, None, None
    )
    if created:
        raise ZooError(f"NVRTC could not be started: error {created}")
    options = [f"--gpu-architecture={architecture}", "--std=c++17", *defines]
    array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    if nvrtc.nvrtcCompileProgram(program, len(options), array):
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        first = next(iter(log.value.decode().splitlines()), "it says nothing")
        raise ZooError(f"NVRTC could not compile CUDA C++ for {architecture}: {first}")
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    binary = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, binary)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return binary.raw


class Module:
    """Compiled kernels, loaded on the current device.

    Args:
        shared: bytes of dynamic shared memory of every kernel.
        threads: threads per block, by the kernel's name.
    """

    def __init__(self, binary: bytes, shared: int, threads: dict[str, int]) -> None:
        self.shared, self.threads = shared, threads
        self.driver = ctypes.CDLL("libcuda.so.1")
        torch.cuda.current_stream().synchronize()  # there is a context now
        module = ctypes.c_void_p()
        self._check(self.driver.cuModuleLoadData(ctypes.byref(module), binary))
        self.functions = {name: self._function(module, name) for name in threads}

    def _check(self, code: int) -> None:
        if code:
            text = ctypes.c_char_p()
            self.driver.cuGetErrorString(code, ctypes.byref(text))
            raise ZooError(f"the CUDA driver reports error {code}: {(text.value or b'').decode()}")

    def _function(self, module: ctypes.c_void_p, name: str) -> ctypes.c_void_p:
        function = ctypes.c_void_p()
        at = ctypes.byref(function)
        self._check(self.driver.cuModuleGetFunction(at, module, name.encode()))
        self._check(self.driver.cuFuncSetAttribute(function, MAX_SHARED, self.shared))
        return function

    def launch(self, name: str, grid: tuple[int, int], argument: ctypes.Structure) -> None:
        """Launch a kernel of one argument on the current stream."""
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        size = (*grid, 1, self.threads[name], 1, 1)
        launch = self.driver.cuLaunchKernel
        self._check(launch(self.functions[name], *size, self.shared, stream, arguments, None))
