"""Records of whole jobs → cells and Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from lapwing_studies.bench.jobs.records import JobRecord, Judged

COST = ("job", "training s", "epoch s", "fit", "tune", "predict", "peak MiB", "curvature", "goals")
QUALITY = ("job", "Lapwing", "MAP", "temperature", "ensemble of 5", "MC dropout")


def cost_row(record: JobRecord) -> list[str]:
    """Fit and tune in gradient epochs and seconds, prediction in forward passes per input."""
    phases = record["phases"]
    fit, tune = (
        _spent(record[key], phases[name]["seconds"] if name in phases else None)  # type: ignore[literal-required]
        for key, name in (("fit_epochs", "fit"), ("tune_epochs", "tune"))
    )
    taken = " ".join(part for part in (record["structure"], record["fisher"]) if part)
    met = "; ".join(judgement(goal) for goal in record["goals"])
    return [
        record["job"],
        _number(record["train_seconds"]),
        _number(record["gradient_epoch_seconds"]),
        fit,
        tune,
        _number(record["predict_forwards"]),
        _number(record["peak_mib"], ".0f"),
        taken or "–",
        "; ".join(part for part in (record["note"], met if phases else "") if part),
    ]


def quality_row(record: JobRecord) -> list[str]:
    """NLL of the test rows, and CPU seconds in addition to training one network."""
    methods = {method["method"]: method for method in record["methods"]}
    cells = []
    for name in QUALITY[1:]:
        method = methods.get(name)
        if method is None:
            cells.append("–")
        elif method["nll"] is None:
            cells.append(method["note"])
        else:
            cells.append(f"{method['nll']:.3f} ({_number(method['seconds'])} s)")
    return [record["job"], *cells]


def judgement(goal: Judged) -> str:
    measured = goal["measured"]
    value = "–" if measured is None else f"{measured:.3g}" if measured < 1000 else f"{measured:.0f}"
    verdict = "open" if measured is None else "met" if measured <= goal["goal"] else "missed"
    return f"{goal['what']} {value} of {goal['goal']:g} {goal['unit']}: {verdict}"


def markdown(records: Sequence[JobRecord]) -> str:
    """Two tables: cost, and quality."""
    cost = _table(COST, [cost_row(record) for record in records])
    worth = _table(QUALITY, [quality_row(record) for record in records if record["methods"]])
    return f"{cost}\n\n{worth}"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def _spent(epochs: float | None, seconds: float | None) -> str:
    return "–" if epochs is None or seconds is None else f"{epochs:.3g} ({seconds:.3g} s)"


def _number(value: float | None, form: str = ".3g") -> str:
    return "–" if value is None else f"{value:{form}}"
