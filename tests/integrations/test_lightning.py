"""The Lightning callback, run by the real Trainer."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing as lw
from lapwing.lightning import Lapwing, load

pytestmark = [pytest.mark.adapters, pytest.mark.filterwarnings("ignore")]

X = torch.randn(120, 2, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0).long()


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 3))
        self.register_buffer("unused", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, index):
        self.log("val", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-2)


def loader(first: int, last: int) -> DataLoader:
    return DataLoader(TensorDataset(X[first:last], Y[first:last]), 32, shuffle=first == 0)


def trained(tmp_path, callback, *, validation: bool = True, **options) -> tuple[pl.Trainer, Classifier]:
    torch.manual_seed(0)
    model = Classifier()
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = pl.Trainer(max_epochs=2, callbacks=[callback], default_root_dir=tmp_path, **quiet, **options)
    trainer.fit(model, loader(0, 90), loader(90, 120) if validation else None)
    return trainer, model


def test_fit_tune_score_write_and_load(tmp_path):
    callback = Lapwing("classification", structure="kron", ood=(10 * X[:20], Y[:20]))
    trainer, model = trained(tmp_path, callback)
    posterior = callback.posterior
    assert posterior.n_data == 90 and not posterior.untuned
    held_out = posterior.predict(X[90:])
    assert trainer.callback_metrics["lapwing/nll"] == pytest.approx(float(-held_out.log_prob(Y[90:]).mean()), rel=1e-5)
    assert {"nll", "ece", "epistemic", "ood_auroc"} == callback.scores.keys()
    assert callback.path.parent.name == "checkpoints"
    again = load(callback.path.parent, model)
    assert torch.equal(again.predict(X).probs, posterior.predict(X).probs)


def test_the_same_as_by_hand(tmp_path):
    callback = Lapwing("classification", structure="diag", tune=False, prior=3.0)
    _, model = trained(tmp_path, callback)
    by_hand = lw.fit(model, (X[:90], Y[:90]), "classification", structure="diag", prior=3.0)
    torch.testing.assert_close(callback.posterior.marginal_variance(), by_hand.marginal_variance())
    assert callback.posterior.untuned or by_hand.untuned == callback.posterior.untuned


def test_without_validation_it_is_tuned_by_the_evidence(tmp_path):
    callback = Lapwing("classification", structure="diag")
    trained(tmp_path, callback, validation=False, enable_checkpointing=False)
    assert callback.scores == {} and callback.path.parent == tmp_path


def test_part_of_the_module(tmp_path):
    callback = Lapwing("classification", module="net", structure="diag", dirpath=tmp_path / "here")
    _, model = trained(tmp_path, callback)
    assert callback.posterior.layout.names[0] == "0.weight"
    assert load(tmp_path / "here", model.net).layout.p == callback.posterior.layout.p


def test_training_goes_on_as_without_it(tmp_path):
    _, with_it = trained(tmp_path, Lapwing("classification", structure="diag"))
    _, without = trained(tmp_path, ModelCheckpoint())
    for a, b in zip(with_it.parameters(), without.parameters(), strict=True):
        assert torch.equal(a, b)


def test_bad_input(tmp_path):
    with pytest.raises(lw.InputError, match="has no such module; it has net"):
        trained(tmp_path, Lapwing("classification", module="body"))
    with pytest.raises(lw.InputError, match="Did you mean 'structure'"):
        Lapwing("classification", structur="kron")
    with pytest.raises(lw.InputError, match='Did you mean "classification"'):
        Lapwing("classify")
    with pytest.raises(lw.LapwingError, match="heads"):
        trained(tmp_path, Lapwing("classification", params="heads.*"))
    with pytest.raises(lw.InputError, match="The posterior is beside it"):
        load(tmp_path / "epoch=2.ckpt", Classifier())
    with pytest.raises(lw.InputError, match="no posterior at"):
        load(tmp_path / "nowhere", Classifier())
