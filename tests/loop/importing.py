"""A small loop that notes the modules of its process after twelve steps: ``importing.py FOLDER``.

It ends when FOLDER/stop exists.
"""

import os
import sys
import time
from pathlib import Path

HAD_LOOP = "unicron_lightning.loop.run" in sys.modules

import torch  # noqa: E402
from torch.utils.data import TensorDataset  # noqa: E402

import unicron_lightning as unicron  # noqa: E402

folder = Path(sys.argv[1])
torch.manual_seed(1)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = TensorDataset(torch.ones(4000, 1))
run = unicron.Run(data, micro_batch_size=1, global_batch_size=4, seed=1, checkpoints=folder / "checkpoints")
run.register(model=model, optimizer=optimizer)
for count, step in enumerate(run.steps(1_000_000), 1):
    step.log(loss=step.run(lambda batch: model(batch[0]).square().mean()))
    optimizer.step()
    if step.number % 10 == 0:
        run.evaluate(data, lambda batch: model(batch[0]).mean(), batch_size=1000)
    if count == 12:
        names = [f"forked {HAD_LOOP}", *sorted(sys.modules)]
        (folder / f"modules-{os.getpid()}").write_text("\n".join(names))
    time.sleep(0.01)
    run.should_stop = (folder / "stop").exists()
