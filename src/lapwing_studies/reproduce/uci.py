"""The eight UCI classification datasets of Immer, Korzepa and Bauer (2021), in their ten splits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lapwing.errors import InputError
from lapwing_studies.reproduce.folder import DataFolder
from lapwing_studies.reproduce.parts import Scaling, Split

FILE = "uci_classification"
NAMES = ("australian", "breast_cancer", "ionosphere", "glass", "vehicle", "waveform", "digits", "satellite")
LARGE = ("digits", "satellite")  # more outputs than weights: every full posterior costs N C P²
SEEDS = (711, 1, 75, 359, 17, 420, 129, 666, 69, 36)


@dataclass(frozen=True)
class UciSplit:
    """70% training, 15% validation (for the prior), 15% test; features standardised with the training rows."""

    train: Split
    validation: Split
    test: Split
    n_classes: int

    @property
    def n_outputs(self) -> int:
        return 1 if self.n_classes == 2 else self.n_classes

    @property
    def widths(self) -> tuple[int, ...]:
        return (self.train.x.shape[1], 50, 50, self.n_outputs)

    @property
    def likelihood(self) -> str:
        return "binary" if self.n_outputs == 1 else "classification"

    @property
    def held_out(self) -> Tensor:
        """Inputs of validation and test rows, concatenated."""
        return torch.cat([self.validation.x, self.test.x])

    def summed_loss(self, f: Tensor, y: Tensor) -> Tensor:
        """For networks (g, n, c) in parallel, all with the same targets."""
        if self.n_outputs == 1:
            targets = y.to(f.dtype).expand(len(f), -1)
            return nn.functional.binary_cross_entropy_with_logits(f[..., 0], targets, reduction="sum")
        return nn.functional.cross_entropy(f.flatten(0, 1), y.repeat(len(f)), reduction="sum")


def split(folder: DataFolder, name: str, number: int) -> UciSplit:
    """One of the ten splits; raises if the archive has other contents."""
    keys = [f"{name}_{what}" for what in ("x", "y", "train_idx", "valid_idx", "test_idx")]
    x, y, *rows = folder.arrays(FILE, keys)
    if len(x) != len(y) or any(len(r) <= number for r in rows):
        found = f"{len(x)} rows, {len(y)} labels and {len(rows[0])} splits"
        raise InputError(f"{FILE}: {name} has {found}; split {number} was asked for.")
    inputs, labels = torch.from_numpy(x).float(), torch.from_numpy(y).long()
    train, validation, test = (torch.from_numpy(r[number]).long() for r in rows)
    scale = Scaling.of(inputs[train])
    learnt, held_out, tested = (Split(scale(inputs[some]), labels[some]) for some in (train, validation, test))
    return UciSplit(learnt, held_out, tested, int(labels.max()) + 1)
