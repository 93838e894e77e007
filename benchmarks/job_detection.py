"""The workload under ``Trainer(strategy="unicron")``; a worker fails when it finds a file that orders it.

``$BENCH_LOG/fault_<slot>`` contains ``raise``, ``hang`` or ``lock``. Beside the workload's events the worker logs
``fault`` (just before it fails) and ``told`` (its control thread has received the notice of a new incident, which
follows the epoch).
"""

from __future__ import annotations

import workload

log = workload.EventLog()
log("started")

import ctypes  # noqa: E402
import os  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402

import lightning.pytorch as pl  # noqa: E402
from job_unicron import Job, Telling  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from unicron_lightning import wire  # noqa: E402

ORDER = Path(os.environ["BENCH_LOG"]) / f"fault_{workload.SLOT}"


class Failing(Job):
    def training_step(self, batch: tuple[int, Tensor, Tensor], index: int) -> Tensor:
        if ORDER.exists():
            kind = ORDER.read_text()
            ORDER.unlink()
            log("fault", kind=kind, step=self.trainer.global_step)
            if kind == "raise":
                raise RuntimeError("a fault of the benchmark")
            if kind == "lock":
                ctypes.PyDLL(None).sleep(1_000_000)  # PyDLL keeps the interpreter's lock during the call
            time.sleep(1e6)
        return super().training_step(batch, index)


class Hearing(Telling):
    """Logs the first notice of each incident that reaches this worker."""

    def on_fit_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        super().on_fit_start(trainer, module)
        seen: set[str] = set()

        def heard(notice: wire.Notice) -> None:
            if notice.incident is not None and notice.incident not in seen:
                seen.add(notice.incident)
                log("told", incident=notice.incident, name=notice.name)

        control = trainer.strategy.engine.control  # type: ignore[attr-defined]
        control.listeners.append(heard)


def main() -> None:
    trainer = pl.Trainer(
        strategy="unicron",
        accelerator="cpu",
        devices=1,
        num_nodes=workload.WORKERS,
        accumulate_grad_batches=workload.MICRO_BATCHES,
        max_steps=workload.STEPS,
        callbacks=[Hearing()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Failing(), DataLoader(workload.Samples(), batch_size=None))


if __name__ == "__main__":
    main()
