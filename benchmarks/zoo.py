"""How many networks × epochs a second: many at once against one at a time, in one run.

One at a time is what anybody would write: a plain module, autograd and ``torch.optim`` at
batch 128, with all cores as PyTorch's threads. Many at once is this library's trainer: on the
CPU one single-threaded process a core, on CUDA one process. Both sides prepare their batches
and update their weights; neither evaluates. An epoch is the task's whole training set. On the
CPU its time is projected from the steps that were timed; on CUDA whole epochs are timed, and the
median counts. There a line says what held-out evaluation after every epoch adds, and what the
fused kernels move and compute against ceilings measured in the same run; ``--agreement E``
trains 256 runs E epochs by PyTorch and by the paths of ``--ways`` and compares accuracies.

``--builds E,…`` times whole builds of so many epochs on CUDA, from loading the data to the
index: what ``tnfn zoo build`` does once kernels are compiled (a build of one epoch before it sees
to that, and its time is printed). Runs of the grid train on 85 % of the data on average, so a
build is counted twice: runs times epochs, and as passes over the whole training set. The networks
of the last build are then tested by the kernels and by plain PyTorch in float32.

``--widths 16,32,48,64`` times a mixed zoo instead: as many networks of each width, two heads each,
by every way in turn, and how much longer the first way takes for all widths than each other way.

    python benchmarks/zoo.py --data ../shared/data/mnist
    python benchmarks/zoo.py --data ../shared/data/mnist --tasks mnist --widths 16,32,48,64 \
        --ways compiled:bf16,fused:bf16
    python benchmarks/zoo.py --data ../shared/data/mnist --tasks mnist --ways "" --builds 12,100
    python benchmarks/zoo.py --data ../shared/data/ag_news --tasks ag_news --ways fused:bf16
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F

from transformer_nfn.io.assets import asset_folder
from transformer_nfn.known_tasks import WIDTH
from transformer_nfn.zoo import (
    BuildOptions,
    Config,
    Recipe,
    SizeGroup,
    SmallTransformer,
    Zoo,
    build,
    load_task,
    sample,
)
from transformer_nfn.zoo.module import to_state_dict
from transformer_nfn.zoo.store.folder import Folder
from transformer_nfn.zoo.training.backends import choose_runner, describe_path
from transformer_nfn.zoo.training.steps import TorchRunner
from transformer_nfn.zoo.training.tasks import Task
from transformer_nfn.zoo.training.trainer import Training, initial_weights, train

BATCH = 128


def the_task(name: str, data: str | None, width: int = WIDTH) -> Task:
    """A task; texts have the word vectors of the sample zoo."""
    if name == "ag_news":
        vectors = Folder.open(asset_folder("ag-news-sample", "zoo")).word_vectors()
        return load_task(name, data, vectors=vectors)
    return load_task(name, None if name == "digits" else data, group=SizeGroup(width))


def the_runs(count: int) -> list[Config]:
    """Runs of the grid, all with the whole training set so that epochs are alike."""
    return [replace(config, train_fraction=1.0) for config in sample(count)]


def optimizer(network: torch.nn.Module, c: Config) -> torch.optim.Optimizer:
    """The optimiser of a run from ``torch.optim``."""
    p, lr, wd = list(network.parameters()), c.learning_rate, c.l2
    if c.optimizer == "adam":
        return torch.optim.Adam(p, lr, weight_decay=wd)
    if c.optimizer == "rmsprop":
        return torch.optim.RMSprop(p, lr, weight_decay=wd)
    return torch.optim.SGD(p, lr, 0.9 if c.optimizer == "sgdm" else 0.0, weight_decay=wd)


def one_at_a_time(task: Task, configs: list[Config], steps: int, device: str) -> float:
    """Seconds a step of one network, averaged over ``configs``."""
    seconds = 0.0
    sizes = task.sizes
    for c in configs:
        network = SmallTransformer(sizes, c.dropout).to(device).train()
        named = sizes.to_named(initial_weights(sizes, c)[None])
        state = to_state_dict(sizes, {k: w[0] for k, w in named.items()})
        network.load_state_dict(state)
        update = optimizer(network, c)
        order = torch.randperm(task.num_samples["train"], device=device)
        key = torch.zeros(1, 2, dtype=torch.int32, device=device)
        for step in range(-3, steps):
            if step == 0:
                synchronize(device)
                start = time.perf_counter()
            at = (step + 3) * BATCH % (len(order) - BATCH)
            batch = task.batch("train", order[None, at : at + BATCH], key + step)
            update.zero_grad()
            logits = network(task.module_inputs(batch.inputs[0]))
            F.cross_entropy(logits, batch.labels[0]).backward()
            update.step()
        synchronize(device)
        seconds += time.perf_counter() - start
    return seconds / (steps * len(configs))


def many_at_once(
    task: Task,
    configs: list[Config],
    steps: int,
    device: str,
    precision: str,
    path: str,
    epochs: int = 1,
) -> tuple[float, float]:
    """Seconds a step of all ``configs`` in this process, and of evaluating the held-out part.

    The first epoch warms up; of the others the median counts.
    """
    count = min(steps * BATCH, task.num_samples["train"])
    recipe = Recipe(100, BATCH, precision)
    data = task.to(device)
    training = Training(data, configs, [count] * len(configs), recipe, device, path, torch.float32)
    times = []
    for epoch in range(1 + epochs):
        start = time.perf_counter()
        training.train_epoch(epoch)
        synchronize(device)
        times.append(time.perf_counter() - start)
    step = statistics.median(times[1:]) / (count // BATCH)
    if "cuda" not in device:
        return step, 0.0
    for _ in range(2):
        synchronize(device)
        start = time.perf_counter()
        training.evaluate(training.runner.weights, "held")
        synchronize(device)
    return step, time.perf_counter() - start


def synchronize(device: str) -> None:
    """Waits for the GPU."""
    if "cuda" in device:
        torch.cuda.synchronize()


def worker(order: dict[str, object]) -> None:
    """One process of the many-at-once side on the CPU."""
    torch.set_num_threads(1)
    task = the_task(str(order["task"]), order["data"])  # type: ignore[arg-type]
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    seconds, _ = many_at_once(
        task, the_runs(int(order["networks"])), int(order["steps"]), "cpu", "float32",  # type: ignore[call-overload]
        str(order["path"]),
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    sys.stdout.write(json.dumps({"seconds": seconds, "peak": peak}) + "\n")


def on_cpu(name: str, data: str | None, networks: int, steps: int, path: str) -> tuple[float, int]:
    """Network-steps a second of one process a core, and their peak memory together."""
    order = {"task": name, "data": data, "networks": networks, "steps": steps, "path": path}
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--worker", json.dumps(order)]
    workers = [
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        for _ in range(len(os.sched_getaffinity(0)))
    ]
    for process in workers:
        assert process.stdout is not None
        process.stdout.readline()
    for process in workers:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [json.loads(process.communicate()[0]) for process in workers]
    rate = sum(networks / answer["seconds"] for answer in answers)
    return rate, sum(answer["peak"] for answer in answers)


def compare(name: str, arguments: argparse.Namespace, device: str) -> None:
    """Times both sides on one task and prints a row for each way."""
    task = the_task(name, arguments.data)
    per_epoch = task.num_samples["train"] // BATCH
    cuda = "cuda" in device
    alone_steps = arguments.steps or (50 if cuda else {"digits": 30}.get(name, 12))
    path = describe_path(arguments.path, "cpu", task.sizes)[0]
    networks = arguments.networks or (256 if cuda else 8)
    steps = arguments.steps or (per_epoch if cuda else {"digits": 10}.get(name, 5))
    print(f"\n{name}: {per_epoch} steps of {BATCH} an epoch, {device}")
    ones, rates, peak = [], [], 0
    # In turns, so that whatever else the machine does meets both sides alike.
    for _ in range(1 if cuda else arguments.rounds):
        alone = one_at_a_time(task.to(device), the_runs(4), alone_steps, device)
        ones.append(1 / (alone * per_epoch))
        if not cuda:
            rate, peak = on_cpu(name, arguments.data, networks, steps, path)
            rates.append(rate / per_epoch)
    one = statistics.median(ones)
    threads = torch.get_num_threads()
    print(f"  one at a time ({threads} threads): {one:8.3f} network-epochs/s")
    if not cuda:
        rate = statistics.median(rates)
        report(f"{networks} at once, {path}, a process a core", rate, one, peak)
        return
    for way in filter(None, arguments.ways.split(",")):
        path, precision = way.split(":")
        torch.cuda.reset_peak_memory_stats()
        step, evaluation = many_at_once(
            task, the_runs(networks), steps, device, precision, path, arguments.rounds
        )
        epoch = step * per_epoch
        peak = torch.cuda.max_memory_allocated()
        report(f"{networks} at once, {path} {precision}", networks / epoch, one, peak)
        whole = networks / (epoch + evaluation)
        print(f"      with held-out evaluation every epoch: {whole:.1f} = {whole / one:.0f}x")
        if way == "fused:bf16" and name != "ag_news":
            roofline(task, networks / step)
        torch.cuda.empty_cache()
    if arguments.agreement:
        paths = dict.fromkeys(way.split(":")[0] for way in arguments.ways.split(","))
        agreement(task, arguments.agreement, [path for path in paths if path != "compiled"])
    if arguments.builds:
        epochs = [int(word) for word in arguments.builds.split(",")]
        with tempfile.TemporaryDirectory() as folder:
            zoo = whole_builds(name, arguments.data, networks, epochs, Path(folder))
            both_tests(zoo, task)


def mixed(name: str, arguments: argparse.Namespace, device: str) -> None:
    """Times every way on networks of several widths."""
    widths = [int(word) for word in arguments.widths.split(",")]
    networks = arguments.networks or 256
    totals: dict[str, list[float]] = {}
    print(f"\n{name}: {networks} networks of each of the widths {arguments.widths}, {device}")
    for width in widths:
        task = the_task(name, arguments.data, width)
        per_epoch = task.num_samples["train"] // BATCH
        for way in arguments.ways.split(","):
            path, precision = way.split(":")
            _, note = describe_path(path, device, task.sizes, precision)
            step, evaluation = many_at_once(
                task, the_runs(networks), arguments.steps or per_epoch, device, precision, path,
                arguments.rounds,
            )  # fmt: skip
            times = [step * per_epoch, step * per_epoch + evaluation]
            totals[way] = [a + b for a, b in zip(totals.get(way, [0.0, 0.0]), times, strict=True)]
            rates = [networks / seconds for seconds in times]
            print(
                f"  width {width}, {way}, {note}: {rates[0]:.3f} network-epochs/s"
                + (f", with held-out evaluation {rates[1]:.3f}" if evaluation else "")
            )
            if "cuda" in device:
                torch.cuda.empty_cache()
    first = next(iter(totals.values()))
    for way, seconds in totals.items():
        rates = [len(widths) * networks / each for each in seconds]
        ratios = [a / b for a, b in zip(first, seconds, strict=True)]
        evaluated = f", with held-out evaluation {rates[1]:.3f} = {ratios[1]:.2f}x"
        print(
            f"  all widths, {way}: {rates[0]:.3f} network-epochs/s = {ratios[0]:.2f}x"
            + (evaluated if "cuda" in device else "")
        )


def whole_builds(
    name: str, data: str | None, networks: int, epochs: list[int], folder: Path
) -> Zoo:
    """Times builds of ``epochs`` epochs each after one of one epoch; the last of them."""
    passes = sum(config.train_fraction for config in sample(networks))
    for i, count in enumerate([1, *epochs]):
        options = BuildOptions(
            name, runs=networks, epochs=count, precision="bf16", data=data, device="cuda",
            vectors=asset_folder("ag-news-sample", "zoo") if name == "ag_news" else None,
        )  # fmt: skip
        start = time.perf_counter()
        zoo = build(folder / str(i), options)
        seconds = time.perf_counter() - start
        print(
            f"  zoo build, {networks} runs of {count} epochs: {seconds:.1f} s = "
            f"{networks * count / seconds:.1f} network-epochs/s, "
            f"{passes * count / seconds:.1f} passes over the training set/s"
            + ("  (kernels compiled on the way)" if i == 0 else "")
        )
    return zoo


def both_tests(zoo: Zoo, task: Task) -> None:
    """The test of a zoo's trained networks by the kernels and by plain PyTorch in float32."""
    rows = zoo.select(percent=100)
    weights = zoo.sizes.from_named(zoo.weights(rows)).float().to("cuda")
    data, threshold = task.to("cuda"), torch.zeros(len(rows), dtype=torch.int32, device="cuda")
    plain = TorchRunner(data, weights, threshold, BATCH)
    fused = choose_runner("fused", data, weights, threshold, "bf16", BATCH)
    hits, seconds = [], []
    for runner in (plain, fused):
        times = []
        for _ in range(3):
            synchronize("cuda")
            start = time.perf_counter()
            _, found = runner.evaluate(weights, "test")
            synchronize("cuda")
            times.append(time.perf_counter() - start)
        hits.append(found)
        seconds.append(statistics.median(times))
    apart = (hits[0] - hits[1]).abs()
    print(
        f"  test of {len(rows)} trained networks in float32: plain PyTorch {seconds[0]:.3f} s, "
        f"kernels {seconds[1]:.3f} s = {seconds[0] / seconds[1]:.1f}x; "
        f"at most {int(apart.max())} of {task.num_samples['test']:,} samples apart, "
        f"{int((apart > 0).sum())} networks differ"
    )


def ceilings() -> tuple[float, float]:
    """Bytes a second of a copy (read and written) and FLOP/s of a bf16 product."""
    big = torch.empty(2**30, dtype=torch.float32, device="cuda")
    other = torch.empty_like(big)
    square = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    out = []
    for work, amount in (
        (lambda: other.copy_(big), 2 * big.nbytes),
        (lambda: square @ square, 2 * 8192**3),
    ):
        work()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(10):
            work()
        torch.cuda.synchronize()
        out.append(10 * amount / (time.perf_counter() - start))
    return out[0], out[1]


def roofline(task: Task, networks_per_second: float) -> None:
    """What the fused kernels move and compute a second, against what the GPU can."""
    sizes = task.sizes
    D, T = sizes.d_model, sizes.tokens
    rows = networks_per_second * BATCH * T
    token = 2 * D * 3 * D + 2 * D * D + 4 * D * sizes.d_ff + 4 * T * D
    flops = 3 * rows * (sizes.blocks * token + 2 * sizes.patch * D)
    # Rows of 2·D bytes that kernels read and write, counted kernel by kernel. Forward: what the
    # embedding gives (4.5), then a block's q, k and v (3), what is kept (2), the next's input
    # (4, after the last 1). Backward: the mean (2), then rows (4), attention (8), projections
    # (5, in the first block 4.5).
    moved = 2 * D * rows * (26 * sizes.blocks + 3)
    moved += networks_per_second * sizes.num_weights * 4 * (2 * 4 + 6)
    bandwidth, rate = ceilings()
    print(
        f"      {moved / 1e12:.2f} TB/s of {bandwidth / 1e12:.2f} copied, "
        f"{flops / 1e12:.0f} TFLOP/s of {rate / 1e12:.0f} multiplied (bf16)"
    )


def agreement(task: Task, epochs: int, paths: Sequence[str]) -> None:
    """Accuracies of 256 runs trained by the plain path and by each of ``paths``, same seeds."""
    from scipy import stats

    runs = sample(256)
    recipe = Recipe(epochs, BATCH, "bf16", percents=(25, 50, 75, 100))
    plain: dict[tuple[str, int], float] = {}
    for path in ("compiled", *paths):
        start = time.perf_counter()
        rows = train(task, runs, recipe, device="cuda", path=path).rows
        kept = [r for r in rows if not (r["best"] or r["crashed"])]
        found = {(r["run"], r["percent"]): r["test_accuracy"] for r in kept}
        print(f"  {path}: 256 runs of {epochs} epochs in {time.perf_counter() - start:.0f} s")
        plain = plain or found
        for epoch, percent in recipe.checkpoint_epochs().items() if path != "compiled" else ():
            both = [[way.get((c.run, percent), 0.0) for c in runs] for way in (plain, found)]
            ks, tau = stats.ks_2samp(*both), stats.kendalltau(*both)
            print(
                f"  after {epoch} epochs: Kolmogorov-Smirnov p = {ks.pvalue:.3f}, "
                f"Kendall's tau = {tau.statistic:.3f}"
            )


def report(what: str, rate: float, one: float, peak: int) -> None:
    """One line of the result."""
    memory = f"peak memory {peak / 2**20:,.0f} MiB"
    print(f"  {what}: {rate:8.3f} network-epochs/s = {rate / one:.1f}x, {memory}")


def main() -> None:
    """Parses the command line and times each task."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", help="folder of the files of MNIST or AG News; without it digits")
    parser.add_argument("--tasks", default=None, help="digits, mnist, ag_news; by comma")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--networks", type=int, help="networks at once")
    parser.add_argument("--steps", type=int, help="steps timed a side")
    parser.add_argument("--rounds", type=int, default=3, help="repeated; the median counts")
    parser.add_argument(
        "--ways",
        default="compiled:tf32,compiled:bf16,fused:tf32,fused:bf16",
        help="on CUDA and with --widths, path:precision by comma",
    )
    parser.add_argument("--widths", help="time a mixed zoo of these widths, by comma")
    parser.add_argument("--path", default="auto", help="on the CPU: auto, native or torch")
    parser.add_argument("--agreement", type=int, metavar="EPOCHS", help="on CUDA, compare paths")
    parser.add_argument("--builds", metavar="EPOCHS,…", help="on CUDA, time whole builds")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(json.loads(arguments.worker))
        return
    tasks = arguments.tasks or ("digits,mnist" if arguments.data else "digits")
    for name in tasks.split(","):
        (mixed if arguments.widths else compare)(name, arguments, arguments.device)


if __name__ == "__main__":
    main()
