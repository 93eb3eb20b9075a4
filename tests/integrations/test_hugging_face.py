"""The callback of the Hugging Face Trainer and `fit(trainer)`, with the real library, LoRA, and chosen logits."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
)

import lapwing as lw
from lapwing.transformers import ChosenLogits, Lapwing, fit, load

pytestmark = [pytest.mark.adapters, pytest.mark.filterwarnings("ignore")]

SMALL = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
YES, NO = 5, 7


class Rows(torch.utils.data.Dataset):
    """Token rows of two kinds; one column that the model does not take."""

    def __init__(self, n: int, seed: int, **labels) -> None:
        g = torch.Generator().manual_seed(seed)
        self.rows = []
        for i in range(n):
            y = i % 2
            tokens = torch.randint(8, 20, (6,), generator=g) + 20 * y
            row = {"input_ids": tokens, "attention_mask": torch.ones(6).long(), "labels": y, "source": "here"}
            self.rows.append(row if not labels else labels["make"](row, y))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int):
        return self.rows[i]


def bert(**options) -> BertForSequenceClassification:
    torch.manual_seed(0)
    size = {"intermediate_size": 16, "max_position_embeddings": 16}
    return BertForSequenceClassification(BertConfig(**SMALL, **size, **{"num_labels": 2, **options}))


def trainer(model, tmp_path, *, callbacks=(), train=None, evaluated=None, **options) -> Trainer:
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "use_cpu": True}
    arguments = TrainingArguments(
        str(tmp_path), num_train_epochs=2, per_device_train_batch_size=8, learning_rate=1e-2, seed=0, **quiet, **options
    )
    return Trainer(
        model, arguments, train_dataset=train or Rows(40, 0), eval_dataset=evaluated, callbacks=list(callbacks)
    )


def test_callback_with_lora_and_gradient_accumulation(tmp_path):
    config = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"])
    callback = Lapwing(structure="kron")
    model = get_peft_model(bert(), config)
    it = trainer(
        model, tmp_path, callbacks=[callback], evaluated=Rows(20, 1), eval_strategy="epoch",
        gradient_accumulation_steps=2,
    )  # fmt: skip
    it.train()
    posterior = callback.posterior
    assert posterior.n_data == 40
    assert all("lora_" in name or "classifier" in name for name in posterior.layout.names)
    assert it.state.log_history[-1]["lapwing_nll"] == callback.scores["nll"] < 0.8
    assert {"nll", "ece", "epistemic"} == callback.scores.keys()
    x = {key: torch.stack([row[key] for row in Rows(4, 2).rows]) for key in ("input_ids", "attention_mask")}
    torch.testing.assert_close(load(tmp_path, model).predict(x).probs, posterior.predict(x).probs)


def test_fit_of_a_trainer_is_that_of_its_loaders(tmp_path):
    it = trainer(bert(), tmp_path, evaluated=Rows(20, 1))
    it.train()
    posterior = fit(it, structure="diag", params="last_layer", tune=False, prior=2.0)
    rows = Rows(40, 0).rows
    x = {key: torch.stack([row[key] for row in rows]) for key in ("input_ids", "attention_mask")}
    y = torch.tensor([row["labels"] for row in rows])
    by_hand = lw.fit(it.model, [{**x, "labels": y}], "classification", structure="diag", params="last_layer", prior=2.0)
    torch.testing.assert_close(posterior.marginal_variance(), by_hand.marginal_variance(), rtol=1e-4, atol=0)
    assert fit(it, structure="diag", params="last_layer").history


@pytest.mark.parametrize(
    ("kind", "likelihood"), [("regression", lw.Gaussian), ("multi_label_classification", lw.Bernoulli)]
)
def test_the_likelihood_is_that_of_the_models_loss(tmp_path, kind, likelihood):
    labels = 1 if kind == "regression" else 3

    def make(row, y):
        return {**row, "labels": float(y) if labels == 1 else [float(y), 0.0, 1.0]}

    it = trainer(bert(num_labels=labels, problem_type=kind), tmp_path, train=Rows(16, 0, make=make))
    posterior = fit(it, structure="diag", params="last_layer", tune=False)
    assert isinstance(posterior.likelihood, likelihood)


def test_a_language_model_answers_with_chosen_tokens(tmp_path):
    def make(row, y):
        tokens = torch.cat([row["input_ids"], torch.tensor([YES if y else NO])])
        labels = torch.full((7,), -100)
        labels[-1] = tokens[-1]
        return {"input_ids": tokens, "attention_mask": torch.ones(7).long(), "labels": labels}

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=60, n_embd=16, n_layer=1, n_head=2, n_positions=16))
    it = trainer(model, tmp_path, train=Rows(24, 0, make=make), evaluated=Rows(12, 1, make=make))
    it.train()
    posterior = fit(it, "classification", logits=[NO, YES], structure="kron", tuning={"mean": "network"})
    model.eval()
    assert posterior.linearised.k == 2
    row = make(Rows(2, 3).rows[1], 1)
    prompt = {"input_ids": row["input_ids"][None, :-1], "attention_mask": row["attention_mask"][None, :-1]}
    wanted = model(**prompt).logits[:, -1, [NO, YES]]
    torch.testing.assert_close(posterior.outputs(prompt).mean, wanted.detach(), rtol=1e-4, atol=1e-5)
    padded = {key: torch.nn.functional.pad(v, (0, 2)) for key, v in prompt.items()}
    torch.testing.assert_close(ChosenLogits(model, [NO, YES])(**padded), wanted, rtol=1e-4, atol=1e-5)
    with pytest.raises(lw.InputError, match="last label is token"):
        fit(it, "classification", logits=[1, 2])
    with pytest.raises(lw.InputError, match="two or more different"):
        fit(it, "classification", logits=[NO, NO])


def test_bad_input(tmp_path):
    with pytest.raises(lw.InputTypeError, match=r"expected a transformers\.Trainer"):
        fit(bert())
    with pytest.raises(lw.InputError, match="no training loader"):
        Lapwing("classification").on_train_end(
            TrainingArguments(str(tmp_path), report_to=[], use_cpu=True), None, None, model=bert()
        )
