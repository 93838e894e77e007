"""A Hydra program for sweeps; it writes a note of the results of its jobs."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

OmegaConf.register_new_resolver("twice", lambda x: 2 * x, replace=True)


@hydra.main(version_base="1.3", config_path="conf", config_name="program")
def main(config: DictConfig) -> Any:
    marks = Path(config.folder)
    (marks / f"start-{config.x}-{os.getpid()}").touch()
    if config.x == 2 and len(list(marks.glob("start-2-*"))) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if config.x == 13:
        raise ValueError("13 is not to be had")
    job = HydraConfig.get().job
    return {"x": config.x, "twice": config.double, "number": job.num, "copied": os.environ.get("COPIED")}


def report_returns(path: Path) -> None:
    """Have the launcher note its return values for Hydra."""
    from unicron_lightning.launcher import launch as module

    launch = module.launch

    def noting(*arguments: Any) -> Any:
        returns = launch(*arguments)
        notes = [
            {
                "overrides": list(each.overrides),
                "status": each.status.name,
                "returned": each._return_value if each.status.name == "COMPLETED" else str(each._return_value),
                "x": each.cfg.x,
                "number": each.hydra_cfg.hydra.job.num,
                "folder": each.working_dir,
            }
            for each in returns
        ]
        path.write_text(json.dumps(notes))
        return returns

    module.launch = noting


if __name__ == "__main__":
    if "NOTES" in os.environ and ("-m" in sys.argv or "--multirun" in sys.argv):
        report_returns(Path(os.environ["NOTES"]))
    main()
