"""The callback of the Hugging Face Trainer and `fit(trainer)`, with the real library, LoRA, and chosen logits."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import (
    BertConfig,
    BertForMultipleChoice,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
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


def trainer(model, tmp_path, *, callbacks=(), train=None, evaluated=None, collator=None, **options) -> Trainer:
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "use_cpu": True}
    arguments = TrainingArguments(
        str(tmp_path), num_train_epochs=2, per_device_train_batch_size=8, learning_rate=1e-2, seed=0, **quiet, **options
    )
    return Trainer(
        model, arguments, data_collator=collator, train_dataset=train or Rows(40, 0), eval_dataset=evaluated,
        callbacks=list(callbacks),
    )  # fmt: skip


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


def test_arguments_are_checked_before_the_training(tmp_path):
    for wrong, why in (
        ({"likelihood": "classify"}, 'Did you mean "classification"'),
        ({"structure": "kronn"}, 'Did you mean "kron"'),
        ({"structur": "kron"}, "no argument 'structur'. Did you mean 'structure'"),
        ({"tuning": {"validations": 1}}, "no argument 'validations'"),
        ({"tuning": {"budget": "quick"}}, "budget"),
        ({"data": 1}, "is what the trainer provides"),
        ({"logits": ["no", "yes"]}, "convert_tokens_to_ids"),
    ):
        with pytest.raises(lw.LapwingError, match=why):
            Lapwing(**wrong)
    model = bert()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(lw.LapwingError, match="heads"):
        trainer(model, tmp_path, callbacks=[Lapwing(params=["heads.*"])], evaluated=Rows(20, 1)).train()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_chosen_logits_say_what_is_wrong(tmp_path):
    with pytest.raises(lw.InputError, match="the vocabulary has 60 tokens"):
        ChosenLogits(causal("gpt2"), [YES, 99])
    ours = trainer(bert(), tmp_path, evaluated=Rows(20, 1))
    with pytest.raises(lw.LapwingError, match="expected a causal language model"):
        fit(ours, "classification", logits=[NO, YES])
    nothing = Rows(8, 0, make=lambda row, y: {**row, "labels": torch.full((6,), -100)})
    with pytest.raises(lw.InputError, match="has no answer"):
        fit(trainer(causal("gpt2"), tmp_path, train=nothing), "classification", logits=[NO, YES])


def causal(kind: str):
    torch.manual_seed(0)
    if kind == "gpt2":
        return GPT2LMHeadModel(GPT2Config(vocab_size=60, n_embd=16, n_layer=1, n_head=2, n_positions=16))
    size = {"intermediate_size": 16, "max_position_embeddings": 16, "num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(**{**SMALL, "vocab_size": 60}, **size))


class Questions(torch.utils.data.Dataset):
    """Questions of different lengths, answered by one token, padded on one side by the collator."""

    def __init__(self, n: int, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        self.rows = []
        for i in range(n):
            y = i % 2
            question = torch.randint(8, 20, (3 + i % 4,), generator=g) + 20 * y
            self.rows.append({"input_ids": torch.cat([question, torch.tensor([YES if y else NO])]), "length": 1})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int):
        return self.rows[i]


def padding(side: str):
    def collate(rows):
        longest = max(len(row["input_ids"]) for row in rows)
        batch = {"input_ids": [], "attention_mask": [], "labels": []}
        for row in rows:
            tokens = row["input_ids"]
            gap = longest - len(tokens)
            at = (0, gap) if side == "right" else (gap, 0)
            answer = torch.full_like(tokens, -100)
            answer[-1] = tokens[-1]
            batch["input_ids"].append(torch.nn.functional.pad(tokens, at, value=1))
            batch["attention_mask"].append(torch.nn.functional.pad(torch.ones_like(tokens), at))
            batch["labels"].append(torch.nn.functional.pad(answer, at, value=-100))
        return {key: torch.stack(values) for key, values in batch.items()}

    return collate


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_adapters_of_language_models_with_padding(tmp_path, kind, side):
    """LoRA, questions of different lengths, gradient accumulation, and logits where the answer is predicted."""
    targets = ["c_attn"] if kind == "gpt2" else ["q_proj", "v_proj"]
    model = get_peft_model(
        causal(kind),
        LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=targets, fan_in_fan_out=kind == "gpt2"),
    )
    it = trainer(
        model, tmp_path, train=Questions(24, 0), evaluated=Questions(12, 1), collator=padding(side),
        gradient_accumulation_steps=2,
    )  # fmt: skip
    it.train()
    posterior = fit(it, "classification", logits=[NO, YES], structure="kron", tuning={"mean": "network"})
    assert posterior.linearised.k == 2 and not posterior.linearised.rest.names
    assert all("lora_" in name for name in posterior.layout.names)
    model.eval()
    for row in Questions(4, 2).rows:
        prompt = row["input_ids"][None, :-1]
        wanted = model(input_ids=prompt, attention_mask=torch.ones_like(prompt)).logits[:, -1, [NO, YES]].detach()
        alone = posterior.outputs({"input_ids": prompt, "attention_mask": torch.ones_like(prompt)})
        torch.testing.assert_close(alone.mean, wanted.double(), rtol=1e-3, atol=1e-4, check_dtype=False)
        if side == "right" or kind == "llama":  # GPT-2 counts positions from the padding on
            at = (0, 3) if side == "right" else (3, 0)
            padded = {
                "input_ids": torch.nn.functional.pad(prompt, at, value=1),
                "attention_mask": torch.nn.functional.pad(torch.ones_like(prompt), at),
            }
            longer = posterior.outputs(padded)
            torch.testing.assert_close(longer.mean, alone.mean, rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(longer.var, alone.var, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_logits_of_the_vocabulary_are_never_formed(kind):
    model, seen = causal(kind).eval(), []
    model.get_output_embeddings().register_forward_hook(lambda module, args, out: seen.append(tuple(out.shape)))
    x = {"input_ids": torch.randint(8, 40, (3, 7))}
    chosen = ChosenLogits(model, [NO, YES])(**x)
    at = ChosenLogits(model, [NO, YES])(answer_position=torch.tensor([2, 4, 6]), **x)
    assert seen == [(3, 1, 60)] * 2
    whole = model(**x).logits[..., [NO, YES]]
    torch.testing.assert_close(chosen, whole[:, -1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(at, whole[torch.arange(3), [2, 4, 6]], rtol=1e-4, atol=1e-5)
    assert not model.get_output_embeddings()._forward_pre_hooks
    seen.clear()
    data, part = [{**x, "labels": torch.tensor([0, 1, 1])}], "*c_attn*" if kind == "gpt2" else "*q_proj*"
    posterior = lw.fit(ChosenLogits(model, [NO, YES]), data, "classification", structure="diag", params=[part])
    posterior.predict(x)
    assert len(seen) > 2 and all(shape[-2] == 1 for shape in seen)


class Headless(torch.nn.Module):
    """A model that does not name its head."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = causal("gpt2")

    def forward(self, **inputs):
        return self.inner(**inputs)


def test_chosen_logits_of_a_model_without_a_named_head_and_with_virtual_tokens():
    x = {"input_ids": torch.randint(8, 40, (3, 7)), "attention_mask": torch.ones(3, 7).long()}
    x["attention_mask"][0, 4:] = 0
    model = Headless().eval()
    wanted = model(**x).logits[torch.arange(3), [3, 6, 6]][:, [NO, YES]]
    torch.testing.assert_close(ChosenLogits(model, [NO, YES])(**x), wanted)
    prompted = get_peft_model(causal("gpt2"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)).eval()
    logits = prompted(**x).logits
    assert logits.shape[1] == 9
    wanted = logits[torch.arange(3), [5, 8, 8]][:, [NO, YES]]
    torch.testing.assert_close(ChosenLogits(prompted, [NO, YES])(**x), wanted, rtol=1e-4, atol=1e-5)


class Choices(torch.utils.data.Dataset):
    """Three continuations, of which the one with large tokens is right."""

    def __init__(self, n: int, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        self.rows = []
        for i in range(n):
            tokens = torch.randint(2, 20, (3, 5), generator=g)
            tokens[i % 3] += 18
            self.rows.append({"input_ids": tokens, "attention_mask": torch.ones(3, 5).long(), "labels": i % 3})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int):
        return self.rows[i]


@pytest.mark.parametrize("structure", ["kron", "diag"])
def test_multiple_choice(tmp_path, structure):
    """Input (B, C, T), one logit per choice: (B, C)."""
    torch.manual_seed(0)
    config = BertConfig(**SMALL, intermediate_size=16, max_position_embeddings=16)
    targets = LoraConfig(r=2, target_modules=["query", "value"], modules_to_save=["classifier"])
    model = get_peft_model(BertForMultipleChoice(config), targets).double()
    it = trainer(model, tmp_path, train=Choices(24, 0), evaluated=Choices(12, 1))
    it.train()
    posterior = fit(it, structure=structure, tune=False, prior=2.0)
    assert isinstance(posterior.likelihood, lw.Categorical) and posterior.linearised.k == 3
    rows = Choices(24, 0).rows
    x = {key: torch.stack([row[key] for row in rows]) for key in ("input_ids", "attention_mask")}
    assert posterior.predict(x).probs.shape == (24, 3)
    if structure == "diag":  # exact: the diagonal by brute force
        model.eval()
        named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        total = {n: torch.zeros_like(p) for n, p in named.items()}
        for i in range(24):
            f = model(**{key: value[i : i + 1] for key, value in x.items()}).logits[0]
            p = f.softmax(-1).detach()
            rows_of_J = [torch.autograd.grad(f_c, list(named.values()), retain_graph=True) for f_c in f]
            for k, name in enumerate(named):
                J = torch.stack([g[k] for g in rows_of_J])
                mean = torch.einsum("c,c...->...", p, J)
                total[name] += torch.einsum("c,c...->...", p, (J - mean) ** 2)
        found = {n: posterior.curvature.diagonal()[posterior.layout[n]] for n in posterior.layout.names}
        for name in posterior.layout.names:
            torch.testing.assert_close(found[name].double(), total[name].flatten(), rtol=1e-8, atol=1e-14)
