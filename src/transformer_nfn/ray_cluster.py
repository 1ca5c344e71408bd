"""Connection to a Ray cluster, tasks and their results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformer_nfn.errors import TransformerNFNError, missing_extra


def import_ray(kind: type[TransformerNFNError]) -> Any:
    """Import ``ray``, or raise ``kind`` with the extra to install."""
    try:
        import ray
    except ImportError as error:
        raise missing_extra(kind, "ray", "ray", "--engine ray") from error
    return ray


@contextmanager
def ray_cluster(
    address: str | None, kind: type[TransformerNFNError], *, cores: int | None = None
) -> Iterator[Any]:
    """Connect to Ray; a connection made here ends with the block, an existing one stays.

    Args:
        address: address of the cluster; None starts one here, unless Ray runs already.
        kind: error class where there is no cluster.
        cores: cores of a cluster started here; None for all.
    """
    ray = import_ray(kind)
    if ray.is_initialized():
        yield ray
        return
    try:
        if address is None:
            ray.init(num_cpus=cores, include_dashboard=False, log_to_driver=False)
        else:
            ray.init(address=address, log_to_driver=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise kind(f"no Ray cluster at {address or 'this machine'} ({str(error)[:120]})") from error
    try:
        yield ray
    finally:
        ray.shutdown()


def one_core_task(ray: Any, work: Callable[..., Any], device: str, retries: int) -> Any:
    """A remote task for ``work``: one core, and on ``cuda`` one GPU.

    Args:
        retries: restarts of a task whose worker died.
    """
    gpus = 1 if "cuda" in device else 0
    return ray.remote(work).options(num_cpus=1, num_gpus=gpus, max_retries=retries)


def task_result(ray: Any, reference: Any, kind: type[TransformerNFNError], lost: str) -> Any:
    """The result of a task.

    Args:
        kind: error class, with one sentence, where the task raised one of ours or was lost.
        lost: the sentence where its workers died too often.
    """
    try:
        return ray.get(reference)
    except TransformerNFNError as error:
        # Ray wraps what a worker raised in a class of both kinds, with the worker's traceback.
        raise kind(str(getattr(error, "cause", error))) from error
    except ray.exceptions.RayError as error:
        raise kind(f"{lost} ({type(error).__name__})") from error
