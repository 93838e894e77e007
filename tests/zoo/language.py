"""Language models of Hugging Face from a configuration, also with LoRA and compiled."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset
from zoo.packages import use_packages

WORDS = 64


def loader() -> DataLoader[Any]:
    tokens = torch.randint(WORDS, (32, 16), generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(tokens), batch_size=4)


class Language(pl.LightningModule):
    """A causal language model with Hugging Face's own loss."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.logs = True

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (tokens,) = batch
        loss: torch.Tensor = self.model(input_ids=tokens, labels=tokens).loss
        if self.logs:
            self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-3, eps=1e-4)


def gpt2() -> Language:
    use_packages()
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    shape = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": WORDS, "n_positions": 16}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # ddp draws other numbers
    return Language(GPT2LMHeadModel(GPT2Config(**shape, **dropout)))


def llama() -> Language:
    use_packages()
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return Language(LlamaForCausalLM(LlamaConfig(**shape, num_key_value_heads=2, vocab_size=WORDS)))


def lora() -> Language:
    module = llama()
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, task_type="CAUSAL_LM")
    module.model = get_peft_model(module.model, config)
    return module


def compiled() -> Any:
    """The whole module, compiled; torch 2.13 cannot compile Lightning's `log`, under any strategy."""
    module = llama()
    module.logs = False
    return torch.compile(module, backend="aot_eager")
