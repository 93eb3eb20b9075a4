"""What Lapwing and other libraries do when asked: `python bench_peers/tried.py LIBRARY` tries every wish, once.

A wish is tried with the library's own function for it, at its defaults but for what the wish itself says. Where it has
no such function the record has a dash. Nothing is trained well: what counts is whether an answer comes within the
limits of time and memory, and whether it is one (finite, of the right shape). Results are kept in tried.json.

lightning-uq-box and torch-uncertainty hand a Laplace approximation to laplace-torch; it is tried through their classes.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

RECORD = Path(__file__).parent / "tried.json"
LIBRARIES = ("lapwing", "laplace-torch", "lightning-uq-box", "torch-uncertainty")
LIMIT = 120  # seconds for one wish, each of which takes Lapwing one or two
MEMORY = 8 << 30
Predict = Callable[[Any], Tensor]


def without_compiled_torchvision() -> None:
    """Two libraries import torchvision, of which they need here only what is written in Python."""
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor a, Tensor b, float c) -> Tensor")


# Networks and data ----------------------------------------------------------------------------------------------------


def mlp(n_out: int, n_in: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(n_in, 20), nn.Tanh(), nn.Dropout(0.1), nn.Linear(20, n_out)).eval()


def cnn(*, per_pixel: bool = False) -> nn.Module:
    torch.manual_seed(0)
    body = [nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()]
    head = [nn.Conv2d(4, 3, 1)] if per_pixel else [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)]
    return nn.Sequential(*body, *head).eval()


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 3)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(tokens)).mean(1))


def rows(x: Tensor, y: Tensor) -> DataLoader[Any]:
    return DataLoader(TensorDataset(x, y), batch_size=16)


def points() -> DataLoader[Any]:
    x = torch.randn(64, 2, generator=torch.Generator().manual_seed(1))
    return rows(x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long())


def images(*, per_pixel: bool = False) -> DataLoader[Any]:
    some = torch.Generator().manual_seed(1)
    x = torch.randn(32, 1, 8, 8, generator=some)
    return rows(x, torch.randint(3, (32, 8, 8) if per_pixel else (32,), generator=some))


def numbers() -> DataLoader[Any]:
    x = torch.linspace(-1, 1, 40)[:, None]
    return rows(x, torch.sin(3 * x) + 0.1 * torch.randn(40, 1, generator=torch.Generator().manual_seed(1)))


def inputs(loader: DataLoader[Any]) -> Tensor:
    return torch.cat([x for x, _ in loader])


# What every library is: a way to fit classes, a way to fit numbers, and its own functions -----------------------------


class Lapwing:
    def classes(self, model: nn.Module, loader: Any, structure: str = "kron", part: str = "all") -> Predict:
        import lapwing as lw

        maps = next(iter(loader))[1].dim() == 3
        likelihood = lw.Categorical(class_axis=1) if maps else "classification"
        posterior = lw.tune(lw.fit(model, loader, likelihood, structure=structure, params=part))
        return lambda x: posterior.predict(x).probs

    def spread(self, model: nn.Module, loader: Any) -> Predict:
        import lapwing as lw

        posterior = lw.tune(lw.fit(model, loader, "regression"))
        return lambda x: posterior.predict(x).variance

    def split(self) -> None:
        import lapwing as lw

        p = lw.fit(mlp(3), points(), "classification").predict(inputs(points()))
        finite(p.epistemic, (64,)), finite(p.aleatoric, (64,))

    def layers(self) -> None:
        import lapwing as lw

        posterior = lw.fit(mlp(3), points(), "classification", prior=lw.prior(mlp(3), groups="layer"))
        assert len(set(lw.tune(posterior).prior.precisions.tolist())) == 2

    def guarantee(self) -> None:
        import lapwing as lw

        sets = lw.conformal(lw.fit(mlp(3), points(), "classification"), points(), level=0.9)
        assert sets.predict(inputs(points())).labels.shape == (64, 3)

    def file(self) -> None:
        import lapwing as lw

        posterior = lw.fit(mlp(3), points(), "classification")
        with tempfile.TemporaryDirectory() as folder:
            lw.save(posterior, Path(folder) / "net.lapwing")
            again = lw.load(Path(folder) / "net.lapwing", mlp(3))
        same(posterior.predict(inputs(points())).probs, again.predict(inputs(points())).probs)

    def exported(self) -> None:
        import lapwing as lw

        with tempfile.TemporaryDirectory() as folder:
            lw.export(lw.fit(mlp(3), points(), "classification"), Path(folder) / "net.pt2", inputs(points()))

    def marglik(self) -> None:
        import lapwing as lw

        lw.train.marglik(mlp(3), points(), "classification", epochs=2, progress=False)

    def variational(self) -> None:
        import lapwing as lw

        lw.train.mean_field(mlp(3), points(), "classification", epochs=2, progress=False)

    def image(self) -> None:
        import lapwing as lw

        a = lw.imaging.radon(8, angles=6)
        r = lw.imaging.reconstruct(a, a(torch.rand(8, 8)), network=cnn_to_image(), steps=20, progress=False)
        finite(lw.imaging.posterior(r, prior="one", tv_prior=False).std, (8, 8))


def cnn_to_image() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 1, 3, padding=1))


class LaplaceTorch:
    def classes(self, model: nn.Module, loader: Any, structure: str = "kron", part: str = "all") -> Predict:
        from laplace import Laplace
        from laplace.curvature.asdl import AsdlGGN

        la = Laplace(model, "classification", subset_of_weights=part, hessian_structure=structure)
        try:
            la.fit(loader)
        except NotImplementedError:  # its default backend; the other one has rules for more layers
            la = Laplace(model, "classification", subset_of_weights=part, hessian_structure=structure, backend=AsdlGGN)
            la.fit(loader)
        la.optimize_prior_precision(method="marglik")
        return la

    def spread(self, model: nn.Module, loader: Any) -> Predict:
        from laplace import Laplace

        la = Laplace(model, "regression", subset_of_weights="all", hessian_structure="full")
        la.fit(loader)
        la.optimize_prior_precision(method="marglik")
        return lambda x: la(x)[1]

    def layers(self) -> None:
        from laplace import Laplace

        la = Laplace(mlp(3), "classification", subset_of_weights="all", hessian_structure="kron")
        la.fit(points())
        la.optimize_prior_precision("glm", init_prior_prec=torch.ones(la.n_layers), prior_structure="layerwise")
        assert len(set(la.prior_precision.tolist())) > 1

    def file(self) -> None:
        from laplace import Laplace

        la = Laplace(mlp(3), "classification", subset_of_weights="all", hessian_structure="kron")
        la.fit(points())
        with tempfile.TemporaryDirectory() as folder:
            torch.save(la.state_dict(), Path(folder) / "la.pt")
            again = Laplace(mlp(3), "classification", subset_of_weights="all", hessian_structure="kron")
            again.load_state_dict(torch.load(Path(folder) / "la.pt"))
        same(la(inputs(points())), again(inputs(points())))

    def marglik(self) -> None:
        from laplace import marglik_training

        marglik_training(mlp(3), points(), "classification", hessian_structure="kron", n_epochs=2, progress_bar=False)


class LightningUQBox:
    def _wrapped(self, kind: Any, model: nn.Module, loader: Any, likelihood: str, structure: str, part: str) -> Any:
        from laplace import Laplace

        la = Laplace(model, likelihood, subset_of_weights=part, hessian_structure=structure)
        wrapped = kind(la)
        wrapped.laplace_model.fit(loader)  # what its on_test_start does, given a trainer with a data module
        wrapped.laplace_fitted = True
        return wrapped

    def classes(self, model: nn.Module, loader: Any, structure: str = "kron", part: str = "all") -> Predict:
        from lightning_uq_box.uq_methods import LaplaceClassification

        wrapped = self._wrapped(LaplaceClassification, model, loader, "classification", structure, part)
        return lambda x: wrapped.predict_step(x)["pred"]

    def spread(self, model: nn.Module, loader: Any) -> Predict:
        from lightning_uq_box.uq_methods import LaplaceRegression

        wrapped = self._wrapped(LaplaceRegression, model, loader, "regression", "full", "last_layer")
        return lambda x: wrapped.predict_step(x)["pred_uct"] ** 2

    def guarantee(self) -> None:
        from lightning import Trainer
        from lightning_uq_box.uq_methods import RAPS

        def collate(batch: Any) -> dict[str, Tensor]:
            return {"input": torch.stack([x for x, _ in batch]), "target": torch.stack([y for _, y in batch])}

        raps = RAPS(mlp(3))
        held_out = DataLoader(points().dataset, batch_size=16, collate_fn=collate)
        trainer = Trainer(max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
        trainer.fit(raps, train_dataloaders=held_out)
        assert len(raps.predict_step(inputs(points()))["pred_set"]) == 64

    def ensembles(self) -> None:
        from lightning_uq_box.uq_methods import MCDropoutClassification

        dropout = MCDropoutClassification(mlp(3), num_mc_samples=5, loss_fn=nn.CrossEntropyLoss())
        dropout.eval()
        finite(dropout.predict_step(inputs(points()))["pred"], (64, 3))

    def variational(self) -> None:
        from lightning_uq_box.uq_methods import BNN_VI_ELBO_Classification

        network = BNN_VI_ELBO_Classification(mlp(3), nn.CrossEntropyLoss(), num_mc_samples_train=2)
        batch = {"input": inputs(points()), "target": torch.cat([y for _, y in points()])}
        network.num_training_points = 64
        network.trainer = type("Trainer", (), {"datamodule": None})
        network.log = lambda *a, **k: None
        network.training_step(batch, 0).backward()


class TorchUncertainty:
    def _fitted(self, task: str, model: nn.Module, loader: Any, structure: str, part: str) -> Any:
        from torch_uncertainty.post_processing import LaplaceApprox

        laplace = LaplaceApprox(task, model, weight_subset=part, hessian_struct=structure)
        laplace.fit(loader)
        return laplace

    def classes(self, model: nn.Module, loader: Any, structure: str = "kron", part: str = "all") -> Predict:
        return self._fitted("classification", model, loader, structure, part)

    def spread(self, model: nn.Module, loader: Any) -> Predict:
        laplace = self._fitted("regression", model, loader, "full", "all")
        answer = laplace(inputs(loader))  # of the mean and the variance, it returns the mean
        assert isinstance(answer, tuple), "the call returns the mean alone"
        return lambda x: laplace(x)[1]

    def split(self) -> None:
        from torch_uncertainty.methods import mc_dropout
        from torch_uncertainty.ood_criteria import MutualInformationCriterion

        many = mc_dropout(mlp(3), num_estimators=5, on_batch=False).eval()
        probs = many(inputs(points())).unflatten(0, (5, 64)).softmax(-1)
        finite(MutualInformationCriterion()(probs.transpose(0, 1)), (64,))

    def guarantee(self) -> None:
        from torch_uncertainty.post_processing import ConformalClsTHR

        sets = ConformalClsTHR(alpha=0.1, model=mlp(3))
        sets.fit(points())
        assert sets.conformal(inputs(points())).shape == (64, 3)

    def ensembles(self) -> None:
        from torch_uncertainty.methods import deep_ensembles, mc_dropout

        five = deep_ensembles([mlp(3) for _ in range(5)], task="classification").eval()
        assert five(inputs(points())).shape == (320, 3)
        assert mc_dropout(mlp(3), num_estimators=5, on_batch=False).eval()(inputs(points())).shape == (320, 3)

    def variational(self) -> None:
        from torch_uncertainty.layers.bayesian import BayesLinear
        from torch_uncertainty.losses import ELBOLoss

        network = nn.Sequential(BayesLinear(2, 20), nn.Tanh(), BayesLinear(20, 3))
        loss = ELBOLoss(network, nn.CrossEntropyLoss(), kl_weight=1 / 64, num_samples=2)
        loss(inputs(points()), torch.cat([y for _, y in points()])).backward()


# Wishes ---------------------------------------------------------------------------------------------------------------


def finite(found: Tensor, shape: tuple[int, ...]) -> None:
    assert found.shape == shape, f"shape {tuple(found.shape)} instead of {shape}"
    assert torch.isfinite(found).all(), "not finite"


def same(a: Tensor, b: Tensor) -> None:
    assert torch.allclose(a, b, atol=1e-5), "not the same after loading"


def regression(library: Any) -> None:
    spread = library.spread(mlp(1, n_in=1), numbers())
    found = spread(torch.tensor([[0.0], [20.0]])).flatten()
    finite(found, (2,))
    assert found[1] > found[0], "not wider away from the data"


def untouched(library: Any) -> None:
    model, loader = cnn(), images()
    x = inputs(loader)
    loader.generator = torch.Generator().manual_seed(2)  # or the loader itself draws from the global state
    with torch.random.fork_rng():
        torch.manual_seed(3)
        before, drawn = {k: v.clone() for k, v in model.state_dict().items()}, torch.random.get_rng_state()
        grads = [p.requires_grad for p in model.parameters()]
        library.classes(model, loader, part="last_layer")(x)
        assert all(torch.equal(before[k], v) for k, v in model.state_dict().items()), "weights or buffers changed"
        assert [p.requires_grad for p in model.parameters()] == grads, "requires_grad changed"
        assert all(p.grad is None for p in model.parameters()), "gradients were left"
        assert torch.equal(torch.random.get_rng_state(), drawn), "the global random state moved"


def batch_norm(library: Any) -> None:
    finite(library.classes(cnn(), images())(inputs(images())), (32, 3))


def transformer(library: Any) -> None:
    tokens = torch.randint(11, (32, 6), generator=torch.Generator().manual_seed(1))
    loader = rows(tokens, torch.arange(32) % 3)
    finite(library.classes(Transformer().eval(), loader)(tokens), (32, 3))


def per_pixel(library: Any) -> None:
    finite(library.classes(cnn(per_pixel=True), images(per_pixel=True))(inputs(images())), (32, 3, 8, 8))


def many_classes(library: Any) -> None:
    x = torch.randn(64, 2, generator=torch.Generator().manual_seed(1))
    finite(library.classes(mlp(1000), rows(x, torch.arange(64)))(x), (64, 1000))


def own(name: str) -> Callable[[Any], None]:
    def tried(library: Any) -> None:
        getattr(library, name)()

    tried.__name__ = name
    return tried


WISHES: dict[str, Callable[[Any], None]] = {
    "error bars of a trained regression network, wider away from the data": regression,
    "all weights of a CNN with BatchNorm, Kronecker factors": batch_norm,
    "all weights of a transformer encoder, Kronecker factors": transformer,
    "one label per pixel": per_pixel,
    "1,000 classes, all weights": many_classes,
    "weights, gradients and the random state left as they were": untouched,
    "one prior per layer, by the evidence": own("layers"),
    "epistemic and aleatoric uncertainty of classes": own("split"),
    "sets or intervals with guaranteed coverage": own("guarantee"),
    "a file, and back": own("file"),
    "export with error bars (torch.export)": own("exported"),
    "training by the marginal likelihood": own("marglik"),
    "variational training": own("variational"),
    "error bars of a reconstructed image": own("image"),
    "ensembles, MC dropout": own("ensembles"),
}


def tried(library: Any, wish: Callable[[Any], None]) -> str:
    if not hasattr(library, wish.__name__) and wish.__name__ not in globals():
        return "–"
    signal.signal(signal.SIGALRM, too_long)
    signal.alarm(LIMIT)
    try:
        wish(library)
    except Exception as error:
        print(f"    {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        return "no"
    finally:
        signal.alarm(0)
    return "yes"


def too_long(*_: Any) -> None:
    raise TimeoutError(f"not done after {LIMIT} seconds")


def main(name: str) -> None:
    if name not in LIBRARIES:
        raise SystemExit(f"the library must be one of {', '.join(LIBRARIES)}; got {name!r}")
    if name != "lapwing":
        without_compiled_torchvision()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    library = {"lapwing": Lapwing, "laplace-torch": LaplaceTorch, "lightning-uq-box": LightningUQBox,
               "torch-uncertainty": TorchUncertainty}[name]()  # fmt: skip
    found = {}
    for words, wish in WISHES.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found[words] = tried(library, wish)
        print(f"{found[words]:4} {words}")
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    record[name] = {"version": version(name), "tried": found}
    RECORD.write_text(json.dumps({k: record[k] for k in LIBRARIES if k in record}, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["lapwing"]))
