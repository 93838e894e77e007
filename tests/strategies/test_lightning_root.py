"""Scripts that import the package ``pytorch_lightning`` get one error that names the cause, wherever it meets us."""

from __future__ import annotations

import subprocess
import sys

import pytest

MODULE = """
class Small(pl.LightningModule):
    def training_step(self, batch, batch_idx): raise AssertionError
    def configure_optimizers(self): return None
"""
SETTINGS = 'accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False'
OURS = "from unicron_lightning.strategies.unicron import UnicronStrategy\n"
FSDP = "from unicron_lightning.strategies.fsdp.strategy import UnicronFSDPStrategy\n"
MEGATRON = "from unicron_lightning.strategies.megatron.strategy import UnicronMegatronStrategy\n"
THEIRS = "import pytorch_lightning as pl\n"
MONITOR = "from unicron_lightning.callbacks import UnicronMonitor\n"
EARLY = "from pytorch_lightning.callbacks import ModelCheckpoint\nimport lightning.pytorch as pl\n"
CASES = {
    "name": (f'{THEIRS}pl.Trainer(strategy="unicron", {SETTINGS})', 'strategy="unicron"'),
    "megatron": (f'{THEIRS}pl.Trainer(strategy="unicron_megatron", {SETTINGS})', 'strategy="unicron_megatron"'),
    "fsdp": (f'{THEIRS}pl.Trainer(strategy="unicron_fsdp", {SETTINGS})', 'strategy="unicron_fsdp"'),
    "instance": (f"{THEIRS}{OURS}pl.Trainer(strategy=UnicronStrategy(), {SETTINGS})", "given a UnicronStrategy"),
    "reversed": (f"{OURS}{THEIRS}pl.Trainer(strategy=UnicronStrategy(), {SETTINGS})", "given a UnicronStrategy"),
    "fsdp_instance": (f"{THEIRS}{FSDP}pl.Trainer(strategy=UnicronFSDPStrategy(), {SETTINGS})", "given a UnicronFSDP"),
    "fsdp_reversed": (f"{FSDP}{THEIRS}pl.Trainer(strategy=UnicronFSDPStrategy(), {SETTINGS})", "given a UnicronFSDP"),
    "megatron_instance": (
        f"{THEIRS}{MEGATRON}pl.Trainer(strategy=UnicronMegatronStrategy(), {SETTINGS})",
        "given a UnicronMegatronStrategy",
    ),
    "megatron_reversed": (
        f"{MEGATRON}{THEIRS}pl.Trainer(strategy=UnicronMegatronStrategy(), {SETTINGS})",
        "given a UnicronMegatronStrategy",
    ),
    "our_callback": (
        f"{THEIRS}{MONITOR}{MODULE}pl.Trainer(callbacks=[UnicronMonitor()], {SETTINGS}).fit(Small(), [0])",
        "the Trainer of the callback UnicronMonitor",
    ),
    "their_callback": (
        f'{EARLY}{MODULE}pl.Trainer(strategy="unicron", callbacks=[ModelCheckpoint()], {SETTINGS}).fit(Small(), [0])',
        "the callback ModelCheckpoint",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_one_error_names_the_cause(name: str) -> None:
    if name.startswith("megatron_"):
        pytest.importorskip("megatron.core.package_info")
    script, found = CASES[name]
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    error = done.stderr.strip().splitlines()[-1]
    assert error.startswith("unicron_lightning.errors.ConfigError: "), done.stderr
    assert found in error and "comes from the package pytorch_lightning" in error
    assert 'write "import lightning.pytorch as pl" instead' in error


def test_a_plain_callback_of_the_other_root_is_taken() -> None:
    """It only names hooks, as under ddp."""
    script = f"""
import lightning.pytorch as pl, pytorch_lightning, torch
class Counts(pytorch_lightning.Callback):
    def on_train_batch_end(self, *about): print("called")
class Small(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def training_step(self, batch, batch_idx): return self.layer(batch).mean()
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), lr=0.1)
data = torch.utils.data.DataLoader(torch.ones(1, 1))
pl.Trainer(strategy="unicron", max_epochs=1, callbacks=[Counts()], {SETTINGS}).fit(Small(), data)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "called" in done.stdout
