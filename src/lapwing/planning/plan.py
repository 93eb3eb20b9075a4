"""The result of `lw.plan`: a table of all structures, and what `auto` takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lapwing.curvature import STRUCTURES, Full, Kron, Structure
from lapwing.errors import InputError
from lapwing.planning.budget import in_words
from lapwing.planning.choice import choose, name_of
from lapwing.planning.costs import CostQuery, Line
from lapwing.planning.kind import resolved
from lapwing.planning.tuning import Tuning, tuning_of

LAST_LAYER: tuple[Structure, ...] = (Full(), Kron())
_HEADINGS = ("structure", "on", "how", "exact", "stored", "to fit", "to predict", "epochs", "")


@dataclass(frozen=True, repr=False)
class Plan:
    """One row per structure, the row that `auto` takes (None if nothing fits), and the reason."""

    rows: tuple[Line, ...]
    chosen: Line | None
    why: str
    memory: int
    n_batch: int
    n_inputs: int
    tuning: Tuning | None = None  # for the structure that `auto` takes

    def __repr__(self) -> str:
        lines = [_cells(row, row is self.chosen) for row in self.rows]
        taken = f"auto takes {self.chosen.structure}: {self.why}." if self.chosen else f"Nothing fits. {self.why}"
        sizes = (
            f"Bytes above the model and the data, of {in_words(self.memory)} allowed: fitting in batches of "
            f"{self.n_batch}, predicting {self.n_inputs} inputs at a time.\n"
            "An epoch is one forward and backward pass over the data."
        )
        tuning = [] if self.tuning is None else [str(self.tuning)]
        return "\n".join([*_aligned([_HEADINGS, *lines]), "", taken, *tuning, sizes])

    def record(self) -> dict[str, Any]:
        """Plain Python values, for JSON."""
        return asdict(self)


def make_plan(questions: Sequence[CostQuery]) -> Plan:
    """Rows for all parameters asked about, then for the last layer if that is a different question."""
    whole, *last = questions
    offered = [s for s in STRUCTURES.values() if not (whole.needs.selected and s.whole_tensors)]
    rows = [whole.line(structure) for structure in offered]
    rows += [question.line(structure) for question in last for structure in LAST_LAYER]
    chosen, why, tuning = None, "", None
    try:
        choice = choose(None, whole.needs)
        fisher, kind_why = resolved(whole.kind, choice.structure, whole.needs)
        tuning = tuning_of(choice.structure, fisher, whole.trial_run.likelihood, whole.needs, 3 * choice.chunk_floats)
        chosen, why = rows[_position(choice.structure, offered)], "; ".join(filter(None, (choice.why, kind_why)))
    except InputError as refusal:  # nothing fits; the message says what to do
        why = str(refusal)
    return Plan(tuple(rows), chosen, why, whole.needs.budget, whole.trial_run.x.n, whole.n_inputs, tuning)


def _position(structure: Structure, offered: Sequence[Structure]) -> int:
    return [name_of(s) for s in offered].index(name_of(structure))


def _cells(row: Line, taken: bool) -> tuple[str, ...]:
    sizes = (in_words(n) for n in (row.stored_bytes, row.fit_bytes, row.predict_bytes))
    on = f"{row.p:,} parameters" + (f", {row.params}" if row.params != "all" else "")
    mark = ("← auto" if taken else "") + ("" if row.fits else " over budget")
    return (
        row.structure,
        on,
        row.how,
        "yes" if row.exact else "no",
        *sizes,
        f"{row.gradient_epochs:.3g}",
        mark.strip(),
    )


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Columns of equal width; numbers are right-aligned."""
    widths = [max(len(row[k]) for row in table) for k in range(len(table[0]))]
    right = range(4, 8)
    return [
        "  ".join(
            cell.rjust(w) if k in right else cell.ljust(w) for k, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]
