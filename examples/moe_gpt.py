"""A small GPT with a mixture of experts, by megatron-core under Unicron: two workers of a replica divide the experts,
and one of four workers is killed while they train.

    python examples/moe_gpt.py --demo            # four workers and a spare node, as `make demo-moe`

or on every node, for a training without that failure:

    torchrun --nnodes 2:4 --nproc-per-node 1 --rdzv-backend unicron --rdzv-id moe --max-restarts 99 examples/moe_gpt.py

The demonstration trains twice, with and without the failure, and compares the losses of all steps and all parameters,
in float64. Without CUDA the script runs on the CPU, by the patches of `unicron_lightning.megatron.shim`, which are for
demonstrations only.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

warnings.filterwarnings("ignore", module="megatron")

from unicron_lightning.megatron import shim  # noqa: E402

if not torch.cuda.is_available():
    shim.install()
    torch.compiler.set_stance("force_eager")  # each process would compile the routers with a C++ compiler

import lightning.pytorch as pl  # noqa: E402
from demonstration import command_line, compare  # noqa: E402
from megatron.core.optimizer import OptimizerConfig  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from unicron_lightning import UnicronMegatronStrategy  # noqa: E402
from unicron_lightning.megatron import toy  # noqa: E402

LANES = 2
"""Workers of a replica: each has half of the experts, and micro-batches of its own."""
OPTIONS = toy.Toy(
    layers=2,
    experts=4,
    router={"moe_token_dispatcher_type": "alltoall", "moe_aux_loss_coeff": 1e-2, "moe_z_loss_coeff": 1e-3},
    double=True,
)


class MoeGpt(pl.LightningModule):
    def configure_model(self) -> None:
        strategy: Any = self.trainer.strategy
        config = toy.config(OPTIONS, expert_model_parallel_size=strategy.expert_model_parallel_size)
        self.model = toy.model(OPTIONS, config)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return toy.forward(self.model, batch)

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        loss = output.mean()
        self.log("loss", loss)
        self.log("balance", toy.balance())  # of the tokens among the experts
        return loss

    def configure_optimizers(self) -> Any:
        # in float64 Megatron does not clip
        return OptimizerConfig(optimizer="adam", lr=1e-3, clip_grad=0.0, params_dtype=torch.float64)


class Losses(pl.Callback):
    """Keeps the loss of each step that this worker has seen."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(outputs["loss"]))


def train(steps: int, replicas: int, folder: Path) -> None:
    """Train on this worker; keep losses and parameters in the folder."""
    torch.set_num_threads(1)
    pl.seed_everything(1)
    losses, module = Losses(), MoeGpt()
    trainer = pl.Trainer(
        strategy=UnicronMegatronStrategy(expert_model_parallel_size=LANES),
        devices=1,
        num_nodes=LANES * replicas,
        accumulate_grad_batches=2,
        max_steps=steps,
        enable_checkpointing=False,
        enable_progress_bar=False,
        logger=False,
        callbacks=[losses],
    )
    trainer.fit(module, DataLoader(toy.Text(OPTIONS.length), batch_size=4, shuffle=True, drop_last=True))
    fabric: Any = trainer.strategy.fabric  # type: ignore[attr-defined]
    state = {"losses": torch.tensor(losses.seen, dtype=torch.float64)}  # of a joiner, fewer
    if fabric.place.replica is not None:  # a spare's parameters may be older
        state |= {name: value for name, value in module.model.state_dict().items() if value is not None}
    torch.save(state, folder / f"worker-{fabric.shard}-{trainer.global_rank}.pt")
    if trainer.global_rank == 0:
        print(f"finished {trainer.global_step} steps: loss {float(trainer.callback_metrics['loss']):.3f}", flush=True)


def results(folder: Path) -> dict[str, Tensor]:
    """Return the losses of all steps, and the parameters of a replica, which must be the same in each."""
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("worker-*.pt")):
        shard = path.stem.split("-")[1]
        for name, value in torch.load(path, weights_only=True).items():
            if name == "losses":
                found[name] = max(found.get(name, value), value, key=len)
            elif not torch.equal(found.setdefault(f"{shard}.{name}", value), value):
                raise ValueError(f"{name} differs between replicas")
    return found


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--replicas", type=int, default=2, help="replicas of two workers")
    options = parser.parse_args()
    if options.demo:
        command: list[str | Path] = [Path(__file__), "--replicas", str(options.replicas)]
        workers = LANES * options.replicas
        compare(command, options.steps, workers=workers, least=LANES, spare=1, results=results)
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    train(options.steps, options.replicas, options.folder)


if __name__ == "__main__":
    main()
