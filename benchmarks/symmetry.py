"""How fast is the group? Acting on many networks at once, and comparing two large blocks.

    python benchmarks/symmetry.py [--json] [--networks 10000]

Both sides of every ratio run in this process, warm, and the median of several runs counts.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable, Iterator

import torch

from transformer_nfn import spaces, symmetry
from transformer_nfn.spaces import Weights
from transformer_nfn.symmetry import Element


def median_time(run: Callable[[], object], repeats: int) -> float:
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def literal_act(U: Weights, g: Element) -> Weights:
    """The paper's action on one network as one would write it down: eight lines, no checks."""
    tau, pi_O, pi_A = g.perms["head"], g.perms["feature"], g.perms["neuron"]
    G, H = g.linears["qk"][tau], g.linears["vo"][tau]
    G_inv, H_inv = torch.linalg.inv(G), torch.linalg.inv(H)
    return {
        "W_Q": U["W_Q"][:, :, tau] @ G,
        "W_K": U["W_K"][:, :, tau] @ G_inv.mT,
        "W_V": U["W_V"][:, :, tau] @ H,
        "W_O": (H_inv @ U["W_O"][:, :, tau])[..., pi_O],
        "W_A": U["W_A"][:, :, pi_O][..., pi_A],
        "W_B": U["W_B"][:, :, pi_A],
        "b_A": U["b_A"][:, :, pi_A],
        "b_B": U["b_B"],
    }


def acting(networks: int, dtype: torch.dtype, device: str) -> dict[str, float]:
    """Seconds to act on zoo-size blocks: all at once, by a loop over our act, by a literal loop."""
    space = spaces.attention_block(32, 2, 16, 16, 64)
    generator = torch.Generator().manual_seed(0)
    U = space.randn(networks, generator=generator, dtype=dtype)
    U = {name: w.to(device) for name, w in U.items()}
    g = space.group.random(generator, batch=networks, dtype=dtype, device=device)
    part = min(networks, 500)

    def singles() -> Iterator[tuple[Weights, Element]]:
        return (({n: w[i : i + 1] for n, w in U.items()}, g[i]) for i in range(part))

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    def at_once() -> None:
        g.act(U)
        wait()

    def loop() -> None:
        for weights, element in singles():
            element.act(weights)
        wait()

    def literal() -> None:
        for weights, element in singles():
            literal_act(weights, element)
        wait()

    once = median_time(at_once, 7)
    scale = networks / part
    ours, theirs = median_time(loop, 3) * scale, median_time(literal, 3) * scale
    return {
        "networks": networks,
        "at_once_s": once,
        "loop_s": ours,
        "literal_loop_s": theirs,
        "ratio_loop": ours / once,
        "ratio_literal_loop": theirs / once,
    }


def comparing() -> dict[str, dict[str, float | bool | None]]:
    """Seconds to compare two blocks of D=768, h=12, DA=3072: same, perturbed, unrelated."""
    space = spaces.attention_block(768, 12, 64, 64, 3072)
    generator = torch.Generator().manual_seed(0)
    U = space.randn(1, generator=generator)
    g = space.group.random(generator)
    noisy = {n: w * (1 + 1e-3 * torch.randn(w.shape, generator=generator)) for n, w in U.items()}
    others = {
        "same": g.act(U),
        "perturbed by 1e-3": g.act(noisy),
        "unrelated": g.act(space.randn(1, generator=generator)),
    }
    out: dict[str, dict[str, float | bool | None]] = {}
    for name, V in others.items():
        start = time.perf_counter()
        found = symmetry.compare(space, U, V)
        spent = time.perf_counter() - start
        out[name] = {"seconds": spent, "same_function": found.same_function}
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", type=int, default=10_000)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    large = comparing()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    acts = {
        str(dtype).removeprefix("torch."): acting(options.networks, dtype, options.device)
        for dtype in (torch.float32, torch.float64)
    }
    if options.json:
        print(json.dumps({"compare": large, "compare_peak_gib": peak, "act": acts}))
        return
    print(f"threads: {torch.get_num_threads()}, device for acting: {options.device}")
    print("\ncompare, D=768, h=12, DA=3072, float32 weights")
    for name, row in large.items():
        print(f"  {name:20s} {row['seconds']:.2f} s   same_function={row['same_function']}")
    print(f"  peak memory of the process so far: {peak:.2f} GiB")
    print(f"\nact on {options.networks} blocks, D=32, h=2, DA=64, one element each")
    for dtype, row in acts.items():
        print(
            f"  {dtype}: at once {row['at_once_s']:.3f} s; loop over act {row['loop_s']:.2f} s "
            f"({row['ratio_loop']:.0f}×); literal loop {row['literal_loop_s']:.2f} s "
            f"({row['ratio_literal_loop']:.0f}×)"
        )


if __name__ == "__main__":
    main()
