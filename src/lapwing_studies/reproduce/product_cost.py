"""Time and memory of a product with the full GGN, for ten thousand to ten million parameters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import TypedDict

from lapwing_studies.bench.product_cost import N_VECTORS, SIDE, ProductCost
from lapwing_studies.reproduce.study import Study, done

# width → images; fewer for large networks, as the ratio does not depend on their number
WIDTHS = {
    "full": {2: 200, 6: 200, 19: 200, 64: 100},
    "quick": {2: 100, 6: 100},
    "toy": {1: 2},
}


class CostRecord(TypedDict):
    study: str
    effort: str
    side: int
    n_vectors: int
    rows: list[ProductCost]


def run(study: Study) -> CostRecord:
    jobs = [CostJob(width, n, study.effort.name) for width, n in WIDTHS[study.effort.name].items()]
    return CostRecord(
        study="product-cost", effort=study.effort.name, side=SIDE, n_vectors=N_VECTORS, rows=done(study, jobs)
    )


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
