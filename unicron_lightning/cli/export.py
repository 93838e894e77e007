"""``unicron export``: one file from a checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of ``unicron``."""
    export = commands.add_parser("export", help="write a checkpoint to one file")
    export.add_argument("checkpoint", metavar="CHECKPOINT", help="file or folder, or its URL, e.g. s3://bucket/x.ckpt")
    export.add_argument("output", type=Path, metavar="OUTPUT", help="new file: *.safetensors (the model), or *.ckpt")
    export.add_argument(
        "--accumulate-grad-batches",
        type=int,
        default=1,
        metavar="N",
        help="of the Trainer that is to resume OUTPUT under a strategy of Lightning's own (default: %(default)s)",
    )
    export.set_defaults(run=_export)


def _export(options: argparse.Namespace) -> int:
    from unicron_lightning.fsdp.export import export_checkpoint  # imports torch

    count = export_checkpoint(options.checkpoint, options.output, batches=options.accumulate_grad_batches)
    print(f"{options.output}: {count} tensors of the model")
    return 0
