"""The ported pretrain_gpt.py, whose workers write their parameters at the end: ported.py FOLDER ARGUMENT ..."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch

SCRIPT = Path(__file__).parents[2] / "examples/porting/pretrain_gpt.py"


def main() -> None:
    folder, sys.argv = Path(sys.argv[1]), [str(SCRIPT), *sys.argv[2:]]
    spec = importlib.util.spec_from_file_location("pretrain_gpt", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    class Written(module.Pretraining):  # type: ignore[misc, name-defined]
        def on_train_end(self) -> None:
            from megatron.core.parallel_state import get_tensor_model_parallel_rank

            name = f"shard{get_tensor_model_parallel_rank()}-rank{self.trainer.global_rank}.pt"
            torch.save({name: value.detach() for name, value in self.model.named_parameters()}, folder / name)

    module.Pretraining = Written
    module.main()


if __name__ == "__main__":
    main()
