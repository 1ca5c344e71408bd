"""Words of commands that cannot be meant: sizes, places and numbers out of this world."""

from expected import Right

Words = tuple[str, ...]
LONG = "x" * 300
DIGITS = "9" * 20
NOWHERE = ("/proc/x", "/proc/x/y.safetensors", f"{LONG}.safetensors", "net.safetensors/x.st",
           "/dev/null/x", "zoo", f"{LONG}/x/{LONG}")  # fmt: skip
PREDICT = ("predict", "statnn")


HUB_IDS = (
    "org/nowhere", "hf:org/nowhere", "hf:", "hf:../zoo", "hf:a/../b", "hf:a b/c", "hf:-x/--y",
    "hf:org/model@../x", "hf:org/model@--x y", "hf:org/model:../../etc/passwd", "hf://org/model",
    "hf:/etc/passwd", "https://huggingface.co/org/model", "http://127.0.0.1:1/a/b", f"hf:{LONG}/x",
)  # fmt: skip
"""Models of a hub that are not there or cannot be."""


def _places() -> list[Words]:
    found: list[Words] = []
    for place in NOWHERE:
        found += [
            ("disguise", "ours.safetensors", "--out", place),
            ("align", "ours.safetensors", "other.safetensors", "--out", f"{place}/n.safetensors"),
            ("disguise", "hub", "--out", place),
            ("inspect", "hub", "--figure", f"{place}/x.png"),
            ("report", "statnn", "--out", f"{place}/page.html"),
            ("zoo", "plot", "zoo", "--out", f"{place}/z.png"),
            ("zoo", "export", "zoo", "--out", place),
            ("zoo", "import", "authors", "--out", f"{place}/z"),
            ("zoo", "build", "--runs", "8", "--epochs", "2", "--out", f"{place}/z"),
            ("train", "zoo", "--model", "statnn", "--epochs", "1", "--out", f"{place}/r"),
            ("fingerprint", "hub", "--out", f"{place}/x.parquet"),
            ("fingerprint", "hub", "--add", f"{place}/x.parquet"),
            ("diff", "hub", "hub", "--page", f"{place}/x.html"),
            ("diff", "hub", "bert", "--figure", "x.svg", "--page", f"{place}/x.html"),
            ("reproduce", "figures", "zoo", "--out", f"{place}/d"),
        ]
    # Into a folder that is there files may be put.
    return [words for words in found if "zoo/" not in " ".join(words)]


def _names() -> list[Words]:
    found: list[Words] = []
    for name in (LONG, f"{LONG}/{LONG}", "", ".", "/", "/proc/self/mem", "/dev/null",
                 "nowhere", f"{LONG}#1", "zoo#" + DIGITS, "zoo#-1", "zoo#1.5", "zoo#", "#1",
                 "zoo#٣", "zoo##1", "\udcff", "~", "file:///etc/passwd", "-", *HUB_IDS):
        found += [
            (*PREDICT, name), ("predict", name, "ours.safetensors"), ("evaluate", name),
            ("evaluate", "statnn", name), ("compare", "ours.safetensors", name),
            ("compare", name, name), ("inspect", name), ("fingerprint", name), ("report", name),
            ("zoo", "info", name), ("zoo", "export", name, "--out", "e"),
            ("zoo", "import", name, "--out", "i"), ("train", name, "--out", "r"),
            ("align", "ours.safetensors", name, "--out", "n"),
            ("disguise", name, "--out", "n"), ("compare", "--matrix", name),
            ("architectures", "--architecture", name),
            ("inspect", "hub", "--architecture", name),
            ("fingerprint", "hub", "--search", name),
            ("diff", "hub", name), ("diff", name, name), ("diff", "hub", "hub", "--with", name),
        ]  # fmt: skip
    # The folder of all inputs holds a model.gguf, so it is a network, too.
    same = {("report", "."), ("report", "/"), ("compare", "--matrix", "."),
            ("compare", "ours.safetensors", "."),
            ("compare", "--matrix", "/"), ("zoo", "import", "/", "--out", "i"),
            ("zoo", "import", ".", "--out", "i"), ("zoo", "import", "", "--out", "i"),
            ("report", ""), ("architectures", "--architecture", "/dev/null"),
            ("inspect", "hub", "--architecture", "/dev/null")}  # fmt: skip
    return [words for words in found if words not in same]


MOST = {"--bins", "--rounds", "--top", "--tolerance", "--samples", "--shard-runs"}
"""Options that take any number, because they mean so many at most."""


def _numbers() -> list[Words]:
    found: list[Words] = []
    for number in (DIGITS, f"-{DIGITS}", "-1", "nan", "1e400", "1.5", "x", "", "٣٣"):
        found += [
            ("align", "ours.safetensors", "other.safetensors", "--out", "n.st", "--rounds", number),
            ("zoo", "build", "--out", "z", "--runs", number),
            ("zoo", "build", "--out", "z", "--runs", "8", "--epochs", number),
            ("zoo", "build", "--out", "z", "--runs", "8", "--batch", number),
            ("zoo", "build", "--out", "z", "--runs", "8", "--samples", number),
            ("zoo", "build", "--out", "z", "--runs", "8", "--shard-runs", number),
            ("zoo", "build", "--out", "z", "--runs", "8", "--until", number),
            ("zoo", "build", "--out", "z", "--runs", "8", "--workers", number),
            ("zoo", "plot", "zoo", "--out", "z.png", "--bins", number),
            ("zoo", "verify", "zoo", "--tolerance", number),
            ("zoo", "verify", "zoo", "--sample", "0", "--tolerance", number),
            ("train", "zoo", "--model", "statnn", "--out", "r", "--epochs", number),
            ("train", "zoo", "--model", "statnn", "--out", "r", "--batch", number),
            ("train", "zoo", "--model", "statnn", "--out", "r", "--seeds", number),
            ("train", "zoo", "--model", "statnn", "--out", "r", "--percent", number),
            ("train", "zoo", "--model", "transformer_nfn", "--out", "r",
             "--option", f"channels={number}"),
            ("evaluate", "statnn", "zoo", "--percent", number),
            ("reproduce", "table1", "zoo", "--out", "r", "--seeds", number),
            ("reproduce", "table1", "zoo", "--out", "r", "--percent", number),
            ("reproduce", "learning-curve", "zoo", "--out", "r", "--sizes", number),
            ("compare", "--matrix", "hub", "--engine", number),
            ("disguise", "ours.safetensors", "--out", "n.safetensors", "--condition", number),
            ("disguise", "hub", "--out", "n", "--condition", number),
            ("fingerprint", "hub", "--search", "x.parquet", "--top", number),
        ]  # fmt: skip
        if number not in ("-1",):
            words = ("disguise", "ours.safetensors", "--out", "n.safetensors", "--seed", number)
            found.append(words)
    harmless = {"٣٣": ("--seed", "--bins", "--tolerance", "--rounds", "--epochs", "--batch",
                       "--top", "--workers", "--samples", "--shard-runs",
                       "--condition")}  # fmt: skip
    return [
        w for w in found
        if not any(o in w for o in harmless.get(w[-1], ()))
        and not (w[-1] == "1.5" and "--condition" in w)
        and not (w[-1] == DIGITS and MOST & set(w))
        and not (w[-1] == "" and w[0] == "reproduce" and "--sizes" in w)
    ]  # fmt: skip


def _sizes() -> list[Words]:
    return [
        ("zoo", "build", "--out", "z", "--runs", "16001"),
        ("zoo", "build", "--out", "z", "--runs", "0"),
        ("zoo", "build", "--out", "z", "--runs", "8", "--task", LONG),
        ("zoo", "build", "--out", "z", "--runs", "8", "--precision", "float128"),
        ("zoo", "build", "--out", "z", "--runs", "8", "--dtype", "int8"),
        ("zoo", "build", "--out", "z", "--runs", "8", "--select", "x"),
        ("zoo", "build", "--out", "z", "--runs", "8", "--device", "tpu"),
        ("zoo", "build", "--out", "z", "--runs", "8", "--engine", "x"),
        ("zoo", "build", "--out", "z", "--runs", "8", "--path", "x"),
        ("train", "zoo", "--model", "nothing", "--out", "r"),
        ("train", "zoo", "--out", "r", "--model", "transformer_nfn",
         "--option", f"channels=[{DIGITS}]"),
        ("train", "zoo", "--out", "r", "--model", "statnn", "--lr", "nan"),
        ("train", "zoo", "--out", "r", "--model", "statnn", "--lr", "-1"),
        ("train", "zoo", "--out", "r", "--model", "statnn", "--lr", "inf"),
        ("train", "zoo", "--out", "r", "--model", "statnn", "--min-accuracy", "nan"),
        ("train", "zoo", "--out", "r", "--model", "statnn", "--save-every", "nan"),
        ("train", "zoo", "--out", "statnn", "--model", "mlp"),
        ("evaluate", "statnn", "zoo", "--min-accuracy", "nan"),
        ("reproduce", "table9", "zoo", "--out", "r"),
        ("reproduce", "table1", "zoo", "--out", "r", "--models", "x,y"),
        ("compare", "net.safetensors", "hub"), ("compare", "net.safetensors", "ours.safetensors"),
        ("compare", "hub", "net.safetensors", "--prove"), ("compare", "net.safetensors"),
        ("predict", "statnn", "net.safetensors"), ("predict", "statnn", "hub"),
        ("predict", "statnn", "statnn"), ("predict", "zoo", "ours.safetensors"),
        ("align", "hub", "net.safetensors", "--out", "n"),
        ("fingerprint", "hub", "net.safetensors"), ("zoo", "info", "hub"),
        ("zoo", "info", "statnn"), ("zoo", "verify", "hub", "--sample", "0"),
        ("zoo", "import", "zoo", "--out", "i"), ("zoo", "import", "net.safetensors", "--out", "i"),
        ("zoo", "import", "authors", "--out", "zoo"), ("zoo", "export", "zoo", "--out", "hub"),
        ("evaluate", "statnn", "hub"), ("report", "hub"),
        # An adapter without its base, with one that does not fit, and with none where one is named.
        ("fingerprint", "adapter"), ("disguise", "adapter", "--out", "n"),
        ("compare", "bert", "adapter"), ("compare", "adapter", "hub", "--base", "bert"),
        ("compare", "hub", "adapter", "--base", "adapter"), ("compare", "adapter", "zoo#1"),
        ("compare", "hub", "hub", "--base", "hub"), ("inspect", "adapter", "--figure", "f.png"),
        ("inspect", "adapter/adapter_model.safetensors"), ("predict", "statnn", "model.gguf"),
        ("diff", "hub"), ("diff", "hub", "adapter"), ("diff", "adapter", "adapter"),
        ("diff", "hub", "hub", "--with", "adapter"), ("diff", "hub", "hub", "--with", "zoo"),
        ("diff", "hub", "net.safetensors"), ("diff", "hub", "zoo"),
        ("diff", "hub", "hub", "--figure", "f.png"), ("diff", "hub", "hub", "--figure", "f.x"),
    ]  # fmt: skip


def _outputs() -> list[Words]:
    """Places to write to that are there and no file, or in what is read; filters that fit none."""
    found: list[Words] = []
    for place in (".", "", "..", "/", "zoo", "hub", "/dev/fd", "/proc/self/cwd"):
        found += [
            ("disguise", "ours.safetensors", "--out", place), ("disguise", "hub", "--out", place),
            ("align", "ours.safetensors", "other.safetensors", "--out", place),
            ("inspect", "hub", "--figure", place), ("report", "statnn", "--out", place),
            ("zoo", "plot", "zoo", "--out", place), ("zoo", "export", "zoo", "--out", place),
            ("fingerprint", "hub", "--out", place), ("fingerprint", "hub", "--add", place),
            ("diff", "hub", "hub", "--page", place),
        ]  # fmt: skip
    for place in ("zoo", "zoo/run", "./zoo/../zoo/a/b"):
        found += [
            ("train", "zoo", "--model", "statnn", "--epochs", "1", "--out", place),
            ("zoo", "export", "zoo", "--out", place), ("zoo", "import", "authors", "--out", place),
            ("reproduce", "table1", "zoo", "--models", "statnn", "--epochs", "1", "--out", place),
        ]  # fmt: skip
    rows = ("zoo", "rows", "zoo")
    found += [
        (*rows, "--optimizer", "adm"), (*rows, "--optimizer", ""), (*rows, "--run", "run"),
        (*rows, "--run", "run1", "--run", "x"), (*rows, "--percent", "74"), (*rows, "--epoch", "4"),
        (*rows, "--percent", "0"), (*rows, "--epoch", "-1"), (*rows, "--min-accuracy", "nan"),
        (*rows, "--min-accuracy", "-0.1"), (*rows, "--max-accuracy", "inf"),
        (*rows, "--max-accuracy", "90"), ("disguise", "hub", "--out", "hub/inner"),
    ]  # fmt: skip
    return found


def _stated() -> list[Words]:
    """Facts of an encoder that are missing, malformed, unknown or impossible."""
    known = {"nhead": "4", "norm_first": "true", "activation": "gelu"}
    wrong = [("nhead", value) for value in ("0", "-1", "7", "1e9", DIGITS, "x", "[4]", "true", "")]
    wrong += [("activation", value) for value in ("foo", "3", LONG, "{}")]
    wrong += [("norm_first", value) for value in ("yes", "1", "null", "[]")]
    found: list[Words] = [("--set", text) for text in ("nhead", "=", "n head=4", "x=1", "D=16", "")]
    found += [("--family", name) for name in ("", LONG, "gpt5", "bert", "../data/bert")]
    found += [(), ("--set", "nhead=4"), ("--set", "nhead=4", "--set", "nhead=4")]
    for name, value in wrong:
        stated = {**known, name: value}
        found.append(tuple(w for pair in stated.items() for w in ("--set", "=".join(pair))))
    return [
        (*command, *words)
        for words in found
        for command in (
            ("inspect", "encoder.pt"), ("fingerprint", "encoder.pt"),
            ("disguise", "encoder.pt", "--out", "new.pt"),
            ("compare", "encoder.pt", "encoder.pt"),
        )
    ]  # fmt: skip


ALONE = {
    ("inspect", "."), ("fingerprint", "."), ("compare", ".", "."), ("diff", ".", "."),
    ("diff", "hub", "."), ("diff", "hub", "hub", "--with", "."),
}  # fmt: skip
"""Commands that read the one GGUF file of the folder, as they should."""
ARGUMENTS: tuple[tuple[Words, Right], ...] = tuple(
    (words, Right.ANSWERED if words in ALONE else Right.REFUSED)
    for words in (*_places(), *_names(), *_numbers(), *_sizes(), *_outputs(), *_stated())
)
