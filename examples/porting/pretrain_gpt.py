"""Megatron-LM's pretrain_gpt.py, ported: GPTModel, GPTDataset with mock data, and Megatron's scheduler, under Unicron.

    unicron run examples/porting/pretrain_gpt.py --workers 2 -- --devices 2 --steps 20

docs/megatron.md explains each part beside the part of pretrain_gpt.py that it replaces. Without CUDA the
script runs on the CPU, by the patches of `unicron_lightning.megatron.shim`, which are for demonstrations only.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from typing import Any

import torch

warnings.filterwarnings("ignore", module="megatron")

from unicron_lightning.megatron import shim  # noqa: E402

if not torch.cuda.is_available():
    shim.install()

import lightning.pytorch as pl  # noqa: E402
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset, MockGPTLowLevelDataset  # noqa: E402
from megatron.core.datasets.utils import Split  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig  # noqa: E402
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # noqa: E402
from megatron.core.parallel_state import is_pipeline_first_stage, is_pipeline_last_stage  # noqa: E402
from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from unicron_lightning import UnicronMegatronStrategy  # noqa: E402
from unicron_lightning.megatron.toy import SequenceParallelNorm  # noqa: E402


class Pretraining(pl.LightningModule):
    """pretrain_gpt.py's model_provider, forward_step and loss_func.

    Args:
        options: of the command line.
        samples: of a global batch.
    """

    def __init__(self, options: argparse.Namespace, samples: int) -> None:
        super().__init__()
        self.options, self.samples = options, samples

    def configure_model(self) -> None:
        strategy: Any = self.trainer.strategy
        config = TransformerConfig(
            num_layers=2,
            hidden_size=64,
            num_attention_heads=4,
            use_cpu_initialization=not torch.cuda.is_available(),
            pipeline_dtype=torch.float32,
            tensor_model_parallel_size=strategy.tensor_model_parallel_size,
            pipeline_model_parallel_size=strategy.pipeline_model_parallel_size,
            sequence_parallel=self.options.sequence_parallel,
        )
        self.model = GPTModel(
            config,
            self.layers(config),
            vocab_size=self.options.vocabulary,
            max_sequence_length=self.options.length,
            pre_process=is_pipeline_first_stage(),
            post_process=is_pipeline_last_stage(),
        )

    def layers(self, config: TransformerConfig) -> Any:
        """Layers of megatron-core's own modules; with Apex or Transformer Engine the first specification is enough."""
        layer = get_gpt_layer_local_spec()
        if not config.sequence_parallel:
            return layer
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = SequenceParallelNorm
        stages = config.pipeline_model_parallel_size
        return TransformerBlockSubmodules([layer] * (config.num_layers // stages), layer_norm=SequenceParallelNorm)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        output: Tensor = self.model(
            batch["tokens"], batch["position_ids"], batch.get("attention_mask"), labels=batch["labels"]
        )
        return output

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        mask = batch["loss_mask"].float()
        loss = (output.float() * mask).sum() / mask.sum()
        self.log("lm loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        config = OptimizerConfig(optimizer="adam", lr=1e-3, min_lr=1e-5, weight_decay=0.01, clip_grad=1.0)

        def scheduler(optimizer: Any) -> OptimizerParamScheduler:  # in samples, as Megatron counts
            return OptimizerParamScheduler(
                optimizer,
                init_lr=0.0,
                max_lr=1e-3,
                min_lr=1e-5,
                lr_warmup_steps=min(2, self.options.steps - 1) * self.samples,  # fewer than all steps
                lr_decay_steps=self.options.steps * self.samples,
                lr_decay_style="cosine",
                start_wd=0.01,
                end_wd=0.01,
                wd_incr_steps=self.options.steps * self.samples,
                wd_incr_style="constant",
            )

        return {"optimizer": config, "lr_scheduler": scheduler}


def dataset(options: argparse.Namespace, samples: int) -> MockGPTDataset:
    """pretrain_gpt.py's train_valid_test_datasets_provider with --mock-data, for training only."""
    tokenizer = NullTokenizer(options.vocabulary - 1)
    config = GPTDatasetConfig(
        random_seed=1234,
        sequence_length=options.length,
        split="100,0,0",
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=True,
        mid_level_dataset_surplus=0.005,
    )
    documents = MockGPTLowLevelDataset(tokenizer)
    return MockGPTDataset(documents, None, torch.arange(200).numpy().astype("int32"), samples, Split.train, config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensor", type=int, default=1, help="tensor-parallel size")
    parser.add_argument("--pipeline", type=int, default=1, help="pipeline stages")
    parser.add_argument("--sequence-parallel", action="store_true", help="with --tensor 2 or more")
    parser.add_argument("--devices", type=int, default=1, help="declared workers")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=128)
    parser.add_argument("--seed", type=int, default=1234)
    options = parser.parse_args()
    pl.seed_everything(options.seed)
    micro_batch, accumulation = 2, 4
    global_batch = micro_batch * accumulation * options.devices // (options.tensor * options.pipeline)
    strategy = UnicronMegatronStrategy(
        tensor_model_parallel_size=options.tensor, pipeline_model_parallel_size=options.pipeline
    )
    trainer = pl.Trainer(
        strategy=strategy,
        devices=1,
        num_nodes=options.devices,
        accumulate_grad_batches=accumulation,
        max_steps=options.steps,
        enable_checkpointing=False,
        logger=False,
        default_root_dir=tempfile.gettempdir(),
    )
    data = DataLoader(dataset(options, options.steps * global_batch), batch_size=micro_batch, drop_last=True)
    trainer.fit(Pretraining(options, global_batch), data)
    if trainer.is_global_zero:
        print(f"lm loss {float(trainer.callback_metrics['lm loss']):.3f} after {trainer.global_step} steps")


if __name__ == "__main__":
    main()
