from __future__ import annotations

import random

from unicron_lightning.local_cluster.processes import free_port


def test_processes_with_one_seed_choose_different_ports() -> None:
    found = []
    for _ in range(3):
        random.seed(1)
        found.append(free_port())
    assert len(set(found)) > 1, "seed_everything decides on the ports"
