"""A Hydra program: fits a polynomial to noisy points, and returns the validation loss.

    python examples/sweep.py degree=3                                           # one run, without torchrun
    python examples/sweep.py --multirun degree=1,3,9 lr=0.1,0.01 hydra/launcher=unicron hydra.launcher.slots=2

The second command runs six jobs, two at a time, on a cluster of its own: see docs/cluster.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import hydra
import torch
from hydra.core.config_store import ConfigStore


@dataclass
class Config:
    degree: int = 3
    lr: float = 0.1
    steps: int = 300
    seed: int = 1


ConfigStore.instance().store("sweep", Config)


@hydra.main(version_base="1.3", config_path=None, config_name="sweep")
def main(config: Config) -> float:
    torch.manual_seed(config.seed)
    x = torch.linspace(-1, 1, 64)
    y = torch.sin(3 * x) + 0.1 * torch.randn(64)
    features = torch.stack([x**power for power in range(config.degree + 1)], 1)
    weights = torch.zeros(config.degree + 1, requires_grad=True)
    optimizer = torch.optim.Adam([weights], lr=config.lr)
    for _ in range(config.steps):
        optimizer.zero_grad()
        ((features[::2] @ weights - y[::2]) ** 2).mean().backward()
        optimizer.step()
    with torch.no_grad():
        loss = float(((features[1::2] @ weights - y[1::2]) ** 2).mean())
    print(f"degree={config.degree} lr={config.lr}: validation loss {loss:.4f}")
    return loss


if __name__ == "__main__":
    main()
