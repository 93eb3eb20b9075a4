"""Time and memory of a product with the full GGN, for ten thousand to ten million parameters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass

from lapwing_studies.bench.product_cost import N_VECTORS, SIDE, ProductCost
from lapwing_studies.reproduce.claims import Claim, listed
from lapwing_studies.reproduce.study import Record, Study

# width → images; fewer for large networks, as the ratio does not depend on their number
WIDTHS = {
    "full": {2: 200, 6: 200, 19: 200, 64: 100},
    "quick": {2: 100, 6: 100},
    "toy": {1: 2},
}


def run(study: Study) -> Record:
    jobs = [CostJob(width, n, study.effort.name) for width, n in WIDTHS[study.effort.name].items()]
    record = study.record("product-cost", jobs, side=SIDE, n_vectors=N_VECTORS)
    record["rows"] = record.pop("runs")
    return record


@dataclass(frozen=True)
class CostJob:
    width: int
    n_images: int
    effort: str

    @property
    def name(self) -> str:
        return f"product-cost-{self.effort}-{self.width}"

    @property
    def made_with(self) -> str:
        return f"width {self.width} | {self.n_images} images | side {SIDE} | {N_VECTORS} vectors"

    def run(self) -> ProductCost:
        """Run in a separate process, whose memory is that of the product alone."""
        words = [sys.executable, "-m", "lapwing_studies.bench.product_cost", str(self.width), str(self.n_images)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        told = subprocess.run(words, env=environment, check=True, capture_output=True, text=True).stdout
        return json.loads(told)


def claims(record: Record) -> list[Claim]:
    last = record["rows"][-1]
    one, eight = ([row[key] for row in record["rows"]] for key in ("one_vector", "per_vector_of_eight"))
    peak, says = last["eight_vectors_mib"], f"memory grows with P, not with P² (at {last['p']:,} parameters)"
    found = "unknown" if peak is None else f"{peak / last['vector_mib']:.0f} at the peak of eight products"
    large = peak is not None and last["p"] > 1e6
    return [
        Claim("a product takes as long as a few gradient passes, at every size", "≤ 2.5", listed(one, "{:.1f}"),
              max(one) <= 2.5),
        Claim("and less for each of eight vectors", "less", listed(eight, "{:.1f}"),
              all(a < b for a, b in zip(eight, one, strict=True))),
        Claim(says, "≤ 50 vectors of P numbers", found, peak <= 50 * last["vector_mib"] if large else None),
    ]  # fmt: skip
