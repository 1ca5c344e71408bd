"""The numbers of the paper's tables, as data, and the layout of two tables that it lacks.

Tables have the paper's numbers: 1 to 3 are in the experiment section, 5 to 7 in the appendix; 4 is
the grid of its networks and has no results. Records of runs hold the *topic* of a table, never its
number. A cell is text exactly as printed (``0.86 ± 0.001`` where the paper dropped a zero), parsed
by `PaperTable.cell`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from transformer_nfn.errors import TransformerNFNError
from transformer_nfn.known_tasks import PAPER_TASKS, task_title


@dataclass(frozen=True)
class Number:
    """A printed number: value, standard error if printed, and text."""

    value: float
    error: float | None
    text: str


NOTHING = "–"
"""What stands where there is no number."""


def mean_text(value: float | None, error: float | None = None) -> str:
    """``0.905 ± 0.002``, without the error where there is one seed only."""
    if value is None or value != value:
        return NOTHING
    text = f"{value:.3f}".replace("-", "−")
    return text if error is None or error != error else f"{text} ± {error:.3f}"


def examples_text(count: int | None) -> str:
    """How many labelled examples a prediction is worth, to two digits: ``980``, ``> 131,072``."""
    return "> 131,072" if count is None else f"{float(f'{count:.2g}'):,.0f}"


NFN = "transformer_nfn"
GAP, CHANGE = "gap", "change"
"""Row of table 7, and a column of it that the paper lacks, see `largest_change`."""
CHANGES = {CHANGE: "Largest change"}


def largest_change(values: Sequence[float | None]) -> Number | None:
    """Largest difference of an augmented value from the value of as many unaugmented steps."""
    if len(values) < 2:
        return None
    original, twice, *others = values
    base = original if twice is None else twice
    changes = [value - base for value in others if value is not None and base is not None]
    if not changes:
        return None
    change = max(changes, key=abs)
    return Number(change, None, f"{change:+.3f}".replace("-", "−"))


@dataclass(frozen=True)
class PaperTable:
    """One table of the paper, or like the paper's.

    Attributes:
        name: ``table1`` to ``table7``, ``learning-curve`` and others, as in ``tnfn reproduce``.
        topic: what records of its cells are filed under.
        title: caption of the table.
        columns: key and label of each column, in order.
        printed: for each row its cells as printed, ``-`` where the paper has none; empty where
            the paper has no such table.
        corner: heading of the rows.
        quantity: ``tau``, of which the highest of a column is the best; ``parameters``; or another,
            which is not compared within a column.
        by_task: the columns are tasks, so runs of several zoos share the table.
        together: whether a line under each of ours gives τ of the mean over seeds.
        zoo: networks of the paper's measurement.
        note: a remark for the comparison.
    """

    name: str
    topic: str
    title: str
    columns: Mapping[str, str] = field(default_factory=dict)
    printed: Mapping[str, tuple[str, ...]] = field(default_factory=dict, repr=False)
    corner: str = "Model"
    quantity: str = "tau"
    by_task: bool = False
    together: bool = False
    zoo: str = ""
    note: str = ""

    @property
    def rows(self) -> dict[str, str]:
        """Key and label of each row, in order."""
        from transformer_nfn.models.predictor import model_name  # imports PyTorch

        labels = {row: row.replace("+", " + ").replace(",", ", ").title() for row in self.printed}
        return {row: model_name(row, label) for row, label in labels.items()}

    @property
    def heading(self) -> str:
        """``Table 1``, ``Learning curve``."""
        return self.name.replace("table", "table ").replace("-", " ").capitalize()

    def cell(self, row: str, column: str) -> Number | None:
        """The paper's number, or None where it printed none."""
        if column == CHANGE:
            cells = [self.cell(row, other) for other in self.columns]
            return largest_change([cell.value if cell else None for cell in cells])
        if row not in self.printed or column not in self.columns:
            return None
        text = self.printed[row][list(self.columns).index(column)]
        if text == "-":
            return None
        mean, _, error = text.partition(" ± ")
        scale = 1e6 if mean.endswith("M") else 1.0
        return Number(float(mean.rstrip("M")) * scale, float(error) if error else None, text)


def _cells(text: str) -> dict[str, tuple[str, ...]]:
    """Reads ``row | cell | cell`` lines."""
    lines = [[part.strip() for part in line.split("|")] for line in text.strip().splitlines()]
    return {row: tuple(cells) for row, *cells in lines}


_THRESHOLDS = {"all": "No threshold", "0.2": "20 %", "0.4": "40 %", "0.6": "60 %", "0.8": "80 %"}
_UNSTATED = "of four checkpoints each; which of them it reads is not stated"
_TASKS = {name: task_title(name) for name in PAPER_TASKS}

TABLE_1 = PaperTable(
    name="table1",
    topic="thresholds",
    title="Kendall’s τ by accuracy threshold, MNIST",
    columns=_THRESHOLDS,
    printed=_cells("""
mlp             | 0.866 ± 0.002 | 0.873 ± 0.001 | 0.874 ± 0.003 | 0.874 ± 0.006 | 0.873 ± 0.007
statnn          | 0.881 ± 0.001 | 0.872 ± 0.001 | 0.868 ± 0.001 | 0.86 ± 0.001  | 0.856 ± 0.001
xgboost         | 0.860 ± 0.002 | 0.839 ± 0.004 | 0.869 ± 0.003 | 0.846 ± 0.001 | 0.884 ± 0.001
lightgbm        | 0.858 ± 0.002 | 0.835 ± 0.001 | 0.847 ± 0.001 | 0.822 ± 0.001 | 0.830 ± 0.001
random_forest   | 0.772 ± 0.002 | 0.758 ± 0.004 | 0.769 ± 0.001 | 0.752 ± 0.001 | 0.759 ± 0.001
transformer_nfn | 0.905 ± 0.002 | 0.899 ± 0.001 | 0.895 ± 0.001 | 0.895 ± 0.002 | 0.888 ± 0.002
"""),
    together=True,
    zoo=f"15,689 networks trained on MNIST, {_UNSTATED}",
)
TABLE_2 = PaperTable(
    name="table2",
    topic="thresholds",
    title="Kendall’s τ by accuracy threshold, AG News",
    columns=_THRESHOLDS,
    printed=_cells("""
mlp             | 0.879 ± 0.006 | 0.875 ± 0.001 | 0.841 ± 0.012 | 0.842 ± 0.001 | 0.862 ± 0.006
statnn          | 0.841 ± 0.002 | 0.839 ± 0.003 | 0.812 ± 0.003 | 0.813 ± 0.001 | 0.812 ± 0.001
xgboost         | 0.859 ± 0.001 | 0.852 ± 0.002 | 0.872 ± 0.002 | 0.874 ± 0.001 | 0.872 ± 0.001
lightgbm        | 0.835 ± 0.001 | 0.845 ± 0.001 | 0.837 ± 0.001 | 0.835 ± 0.001 | 0.820 ± 0.001
random_forest   | 0.774 ± 0.003 | 0.801 ± 0.001 | 0.797 ± 0.001 | 0.798 ± 0.002 | 0.773 ± 0.001
transformer_nfn | 0.910 ± 0.001 | 0.908 ± 0.001 | 0.897 ± 0.001 | 0.896 ± 0.001 | 0.890 ± 0.001
"""),
    together=True,
    zoo=f"15,949 networks trained on AG News, {_UNSTATED}",
)
TABLE_3 = PaperTable(
    name="table3",
    topic="components",
    title="Kendall’s τ by the components that Transformer-NFN sees",
    columns=_TASKS,
    printed=_cells("""
encoder                      | 0.902 ± 0.001 | 0.909 ± 0.001
embedding                    | 0.424 ± 0.002 | -
classifier                   | 0.847 ± 0.001 | 0.795 ± 0.008
embedding+classifier         | 0.857 ± 0.003 | -
encoder+classifier           | 0.904 ± 0.001 | 0.910 ± 0.001
encoder+embedding            | 0.903 ± 0.001 | -
encoder+embedding+classifier | 0.905 ± 0.002 | -
"""),
    corner="Components",
    by_task=True,
    zoo=f"15,689 networks (MNIST) and 15,949 (AG News), {_UNSTATED}",
)
TABLE_5 = PaperTable(
    name="table5",
    topic="channels",
    title="Kendall’s τ by the channels of each equivariant layer of Transformer-NFN",
    columns={"tau": "Kendall’s τ", "parameters": "Parameters"},
    printed=_cells("""
[3]     | 0.907 ± 0.002 | 0.491M
[5]     | 0.909 ± 0.002 | 0.840M
[10]    | 0.909 ± 0.001 | 1.793M
[15]    | 0.913 ± 0.001 | 2.857M
[3,3]   | 0.905 ± 0.003 | 1.901M
[5,5]   | 0.911 ± 0.002 | 4.757M
[10,10] | 0.913 ± 0.001 | 17.457M
[15,15] | 0.913 ± 0.002 | 38.101M
"""),
    corner="Channels",
    zoo=f"15,949 networks trained on AG News, {_UNSTATED}",
    note="The paper counts the parameters of the encoder alone in this table.",
)
TABLE_6 = PaperTable(
    name="table6",
    topic="parameters",
    title="Number of parameters",
    columns=_TASKS,
    printed=_cells("""
transformer_nfn | 1.812M | 1.804M
mlp             | 0.933M | 0.896M
statnn          | 0.203M | 0.168M
"""),
    quantity="parameters",
    by_task=True,
    zoo="networks of two blocks of width 32",
)
TABLE_7 = PaperTable(
    name="table7",
    topic="augmentation",
    title="Kendall’s τ where networks are augmented by the group action",
    columns={
        "original": "Original",
        "twice": "Twice, unchanged",
        "[-1,1]": "[−1, 1]",
        "[-10,10]": "[−10, 10]",
        "[-100,100]": "[−100, 100]",
    },
    printed=_cells("""
xgboost         | 0.859 ± 0.001 | - | 0.799 ± 0.003 | 0.800 ± 0.001 | 0.802 ± 0.003
lightgbm        | 0.835 ± 0.001 | - | 0.785 ± 0.003 | 0.784 ± 0.003 | 0.786 ± 0.004
random_forest   | 0.774 ± 0.003 | - | 0.714 ± 0.001 | 0.715 ± 0.002 | 0.716 ± 0.002
mlp             | 0.879 ± 0.006 | - | 0.830 ± 0.002 | 0.833 ± 0.002 | 0.833 ± 0.005
statnn          | 0.841 ± 0.002 | - | 0.793 ± 0.003 | 0.791 ± 0.003 | 0.771 ± 0.013
transformer_nfn | 0.910 ± 0.001 | - | 0.912 ± 0.001 | 0.912 ± 0.002 | 0.913 ± 0.001
gap             | 0.031 | - | 0.082 | 0.079 | 0.080
"""),
    zoo=f"15,949 networks trained on AG News, {_UNSTATED}",
    note="Augmented parts hold every network twice, so training takes twice the steps; the second "
    "column gives each network twice as it is, and changes are counted from there. Gap: the lead "
    "of Transformer-NFN over the best other row of the paper.",
)
PAPER_TABLES: Mapping[str, PaperTable] = {
    table.name: table for table in (TABLE_1, TABLE_2, TABLE_3, TABLE_5, TABLE_6, TABLE_7)
}
STATED: Mapping[str, str] = {
    # Section 6 and appendix "Additional Dataset Details".
    "mnist/networks": "15,689",
    "ag_news/networks": "15,949",
    "mnist/checkpoints": "62,756",
    "ag_news/checkpoints": "63,796",
    "grid/configurations": "16,000",
    "grid/each-category": "8,000",
    "zoo/epochs": "100",
    "zoo/recorded": "50, 75, 100",
    # What is missing to 16,000: "we eliminate any runs that crash".
    "mnist/crashed": "311",
    "ag_news/crashed": "51",
    # Lead over the best baseline, in the experiments and with augmented networks (appendix).
    "lead/mnist": "0.004 to 0.026",
    "lead/ag_news": "0.018 to 0.033",
    "lead/augmented": "0.031 to 0.082",
    # Appendix "Additional Dataset Details", in percent of accuracy.
    "mnist/accuracies": "80 to 100",
    "ag_news/accuracies": "50 to 90",
    "ag_news/peak": "80",
    "ag_news/cluster": "25",
    # Appendix "Additional Experimental Details".
    "predictor/seeds": "5",
    "predictor/epochs": "50",
    "predictor/batch": "16",
    "predictor/rate": "1e-3",
    "predictor/warm-up": "10",
    "nfn/channels": "10",
    "nfn/output": "10",
    "mlp/neurons": "50",
    "statnn/neurons": "256",
    "statnn/embedding": "64",
    "trees/depth": "10",
    "trees/child": "50",
    "trees/leaves": "256",
    "augmentation/folds": "2",
    "augmentation/ranges": "[−1, 1], [−10, 10] and [−100, 100]",
    "blocks/number": "two",
    "blocks/heads": "two",
}
"""What the text of the paper states in numbers."""
# Rows and columns are those of the zoo: its models, and as many numbers of networks as it has.
LEARNING_CURVE = PaperTable(
    name="learning-curve",
    topic="learning-curve",
    title="Kendall’s τ by number of networks to train on",
    together=True,
    note="Fewer networks are a random subset, each within the next larger one; validation and test "
    "networks are the same throughout. Errors are over seeds of the training, or over splits.",
)
ALL_KINDS, WITHIN = "all kinds", "within kinds"
WHOLE, INVARIANTS, LEFT_OUT = "whole_network", "invariants", "left_out"
TESTED, TESTED_LEFT_OUT, HELD = "networks", "left_out_networks", "coverage"

MIXED = PaperTable(
    name="mixed",
    topic="mixed",
    title="Kendall’s τ on each kind of a mixed zoo, of one predictor over all of them",
    columns={
        TESTED: "Test networks",
        WHOLE: "Whole network",
        INVARIANTS: "Its invariants alone",
        TESTED_LEFT_OUT: "Networks left out",
        LEFT_OUT: "Whole network, kind left out",
        HELD: "Its intervals hold",
    },
    corner="Kind",
    quantity="tau of a kind",
    note="A kind left out of training is tested on with all its networks, and its intervals are "
    "the widened ones that tnfn predict gives for sizes never seen.",
)
TARGETS = PaperTable(
    name="targets",
    topic="targets",
    title="What weights say of a network: Kendall’s τ, of classes AUROC",
    corner="Target",
    quantity="tau of a target",
)
HOME = "home"
TRANSFER = PaperTable(
    name="transfer",
    topic="transfer",
    title="Kendall’s τ of predictors on the networks of other zoos",
    columns={HOME: "at home"},
    together=True,
    note="Only the order counts; accuracies of different tasks are not comparable.",
)
ALL_TABLES: Mapping[str, PaperTable] = {
    **PAPER_TABLES, LEARNING_CURVE.name: LEARNING_CURVE, MIXED.name: MIXED,
    TARGETS.name: TARGETS, TRANSFER.name: TRANSFER,
}  # fmt: skip
TOPICS = tuple(dict.fromkeys(table.topic for table in ALL_TABLES.values()))


def table_named(name: str) -> PaperTable:
    """The table that ``tnfn reproduce`` calls by this name."""
    if name not in ALL_TABLES:
        raise no_table(name, ALL_TABLES)
    return ALL_TABLES[name]


def no_table(name: str, known: Iterable[str]) -> TransformerNFNError:
    """The error about a name that is not among the known ones."""
    if name == "table4":
        return TransformerNFNError(
            "table 4 of the paper is the grid of its networks and has no results to reproduce; "
            f"the channels of Transformer-NFN are {TABLE_5.name}"
        )
    return TransformerNFNError(f"there is no '{name}' to reproduce; there are {', '.join(known)}")


def table_of(topic: str, task: str | None) -> PaperTable | None:
    """The table in which a record stands; thresholds are table 2 for networks on AG News.

    >>> table_of("thresholds", "ag_news").heading, table_of("channels", "mnist").heading
    ('Table 2', 'Table 5')
    """
    if topic == TABLE_2.topic:
        return TABLE_2 if task == "ag_news" else TABLE_1
    return next((table for table in ALL_TABLES.values() if table.topic == topic), None)


def quoted(key: str) -> str:
    """The number of the paper under a key: of `STATED`, or ``table1/mlp/all`` without its error.

    >>> quoted("table1/mlp/all"), quoted("mnist/networks")
    ('0.866', '15,689')
    """
    if key in STATED:
        return STATED[key]
    name, _, place = key.partition("/")
    row, _, column = place.rpartition("/")
    number = PAPER_TABLES[name].cell(row, column) if name in PAPER_TABLES else None
    if number is None:
        raise TransformerNFNError(f"the paper has no number '{key}'")
    return number.text.partition(" ± ")[0]
