"""Connection to a Ray cluster: submit tasks and collect their results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from transformer_nfn.errors import TransformerNFNError, needs_extra


def import_ray(kind: type[TransformerNFNError]) -> Any:
    """The package ``ray``, or an error of this kind that names the extra to install."""
    with needs_extra(kind, "ray", "ray", "--engine ray"):
        import ray
    return ray


@contextmanager
def ray_cluster(
    address: str | None, kind: type[TransformerNFNError], *, cores: int | None = None
) -> Iterator[Any]:
    """Ray, connected; a connection made here ends with the block, one made before stays.

    Args:
        address: of the cluster; None starts one on this machine, unless Ray runs already.
        kind: of error to raise where there is no cluster.
        cores: of a cluster started here; None for all of them.
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


def one_core_task(ray: Any, work: Callable[..., Any], gpus: float, retries: int) -> Any:
    """``work`` as a task of the cluster: one core each, and so one thread.

    Args:
        gpus: that a task needs besides, or the part of one.
        retries: how often a task whose worker died is given to another.
    """

    @wraps(work)
    def on_one_thread(*arguments: Any, **options: Any) -> Any:
        import torch

        torch.set_num_threads(1)
        return work(*arguments, **options)

    return ray.remote(on_one_thread).options(num_cpus=1, num_gpus=gpus, max_retries=retries)


def task_result(ray: Any, reference: Any, kind: type[TransformerNFNError], lost: str) -> Any:
    """What a task gave.

    Args:
        kind: of error to raise, in one sentence, where the task raised one of ours or was lost.
        lost: what to say where its workers died too often.
    """
    try:
        return ray.get(reference)
    except TransformerNFNError as error:
        # Ray wraps what a worker raised in a class of both kinds, with the worker's traceback.
        raise kind(str(getattr(error, "cause", error))) from error
    except ray.exceptions.RayError as error:
        raise kind(f"{lost} ({type(error).__name__})") from error
