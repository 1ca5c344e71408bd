"""Speed of the group action on many networks, and of comparing two large blocks.

    python benchmarks/symmetry.py [--json] [--networks 10000]

Both sides of every ratio run in this process, warm; medians of several runs. Large blocks (D=768,
12 heads, DA=3072) are measured in one process each, so that the memory is the peak of the process,
PyTorch (about 0.25 GiB) and the weights included.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator

import torch

from costs import in_a_process, median_seconds, peak_mib
from transformer_nfn import spaces, symmetry
from transformer_nfn.spaces import Weights
from transformer_nfn.symmetry import Element


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

    once = median_seconds(at_once, 7)
    scale = networks / part
    ours, theirs = median_seconds(loop, 3) * scale, median_seconds(literal, 3) * scale
    return {
        "networks": networks,
        "at_once_s": once,
        "loop_s": ours,
        "literal_loop_s": theirs,
        "ratio_loop": ours / once,
        "ratio_literal_loop": theirs / once,
    }


LARGE = {
    "fingerprint, paper's block": ("attention_block", "fingerprint"),
    "fingerprint, residual block": ("residual_stack", "fingerprint"),
    "compare, same": ("attention_block", "same"),
    "compare, perturbed by 1e-3": ("attention_block", "perturbed"),
    "compare, unrelated": ("attention_block", "unrelated"),
    "compare, residual block, same": ("residual_stack", "same"),
}


def large(kind: str, what: str) -> dict[str, float | bool | None]:
    """Seconds for one call on blocks of D=768, h=12, DA=3072 in float32, and the peak memory."""
    sizes = (768, 12, 64, 64, 3072)
    if kind == "attention_block":
        space = spaces.attention_block(*sizes)
    else:
        space = spaces.residual_stack(1, *sizes, d_in=64, d_out=10)
    generator = torch.Generator().manual_seed(0)
    U = space.randn(1, generator=generator)
    V, same = U, None
    if what != "fingerprint":
        g = space.group.random(generator)
        if what == "perturbed":
            noise = (torch.randn(w.shape, generator=generator) for w in U.values())
            V = {n: w * (1 + 1e-3 * next(noise)) for n, w in U.items()}
        elif what == "unrelated":
            V = space.randn(1, generator=generator)
        V = g.act(V)
    start = time.perf_counter()
    if what == "fingerprint":
        symmetry.fingerprint(space, U)
    else:
        same = symmetry.compare(space, U, V).same_function
    spent = time.perf_counter() - start
    return {"seconds": spent, "peak_gib": peak_mib() / 1024, "same_function": same}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", type=int, default=10_000)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    blocks = {name: in_a_process(large, *case) for name, case in LARGE.items()}
    acts = {
        str(dtype).removeprefix("torch."): acting(options.networks, dtype, options.device)
        for dtype in (torch.float32, torch.float64)
    }
    if options.json:
        print(json.dumps({"large": blocks, "act": acts}))
        return
    print(f"threads: {torch.get_num_threads()}, device for acting: {options.device}")
    print("\none call on blocks of D=768, h=12, DA=3072, float32 weights")
    for name, row in blocks.items():
        verdict = "" if row["same_function"] is None else f"   same_function={row['same_function']}"
        print(f"  {name:30s} {row['seconds']:.2f} s, {row['peak_gib']:.2f} GiB{verdict}")
    print(f"\nact on {options.networks} blocks, D=32, h=2, DA=64, one element each")
    for dtype, row in acts.items():
        print(
            f"  {dtype}: at once {row['at_once_s']:.3f} s; loop over act {row['loop_s']:.2f} s "
            f"({row['ratio_loop']:.0f}×); literal loop {row['literal_loop_s']:.2f} s "
            f"({row['ratio_literal_loop']:.0f}×)"
        )


if __name__ == "__main__":
    main()
