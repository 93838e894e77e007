"""Parser of the command line, and the end of a command."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from unicron_lightning.cli import calibrate, certs, inspection, node, orders, report, run, transfer
from unicron_lightning.cli.output import visible
from unicron_lightning.cli.plan.command import add_parser as add_plan_parser
from unicron_lightning.errors import ConfigError, UnicronError

_EPILOG = """\
exit status:
  0    done; for run and submit --wait: the task succeeded
  1    the task of run or submit --wait failed, or the coordinator could not run
  2    wrong usage or configuration, a refused order, or no coordinator answers
  130  run was interrupted by Ctrl-C

Commands find the coordinator by --endpoint, else the variable UNICRON_ENDPOINT,
else at 127.0.0.1:29461. `unicron COMMAND --help` describes a command."""
_PATHS = ("DIR", "FILE", "PATH", "SCRIPT")
"""Placeholders of arguments that shells complete with names of files."""


def main(arguments: list[str] | None = None) -> None:
    """Run the console script, then end the process.

    Args:
        arguments: the command line without the program's name; default: the process's.
    """
    try:
        status = _run(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader, e.g. `head`, has closed the pipe; keep Python from complaining at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    sys.exit(status)


def _run(given: list[str]) -> int | str | None:
    """Run a command; return the status with which it ends, or would end the process itself."""
    try:
        if given[:1] == ["coordinator"]:
            # All further arguments are Hydra's, --help and --cfg included.
            from unicron_lightning.coordinator.__main__ import main as run_coordinator

            run_coordinator(given[1:])
            return 0
        own, arguments = run.divided(given)
        options = _parser().parse_args(own, argparse.Namespace(arguments=arguments))
        status: int = options.run(options)
    except UnicronError as error:
        print(f"unicron: {visible(str(error), lines=True)}", file=sys.stderr)
        return 2
    except SystemExit as ended:  # argparse's and Hydra's, after --help, too
        return ended.code
    return status


class _PrintVersion(argparse.Action):
    """Prints the version, which is looked up only here, since importlib.metadata is slow to import."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from unicron_lightning import __version__

        print(f"unicron-lightning {__version__}")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="unicron",
        description="Fault-tolerant training.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_PrintVersion, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    commands.add_parser("coordinator", help="run a coordinator, configured by key=value (see --help behind it)")
    run.add_parsers(commands)
    inspection.add_parsers(commands)
    inspection.add_incidents(commands)
    report.add_parsers(commands)
    inspection.add_top(commands)
    orders.add_parsers(commands)
    calibrate.add_parser(commands)
    orders.add_jobs(commands)
    node.add_parsers(commands)
    certs.add_parsers(commands)
    _add_export(commands)
    transfer.add_parser(commands)
    add_plan_parser(commands)
    shell = commands.add_parser("completion", help="print the completion of this command for a shell")
    shell.add_argument("shell", choices=("bash", "zsh", "tcsh"), help='for bash: eval "$(unicron completion bash)"')
    shell.set_defaults(run=_completion)
    for listed in commands._choices_actions:  # a command's own help begins with its sentence in the list
        command = commands.choices[listed.dest]
        if command.description is None and listed.help:
            command.description = f"{listed.help[0].upper()}{listed.help[1:]}."
    return parser


def _completion(options: argparse.Namespace) -> int:
    import shtab

    parser = _parser()
    commands = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    for command in commands.choices.values():
        for action in command._actions:
            if action.metavar in _PATHS:
                action.complete = shtab.DIRECTORY if action.metavar == "DIR" else shtab.FILE
    print(shtab.complete(parser, shell=options.shell))
    return 0


def _add_export(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    export = commands.add_parser("export", help="write a checkpoint to one file")
    export.add_argument("checkpoint", metavar="CHECKPOINT", help="file or folder, or its URL, e.g. s3://bucket/x.ckpt")
    export.add_argument(
        "output", type=Path, nargs="?", metavar="OUTPUT", help="new file: *.safetensors (the model), or *.ckpt"
    )
    export.add_argument("--digest", action="store_true", help="print digests of the checkpoint instead")
    export.add_argument(
        "--accumulate-grad-batches",
        type=int,
        default=1,
        metavar="N",
        help="of the Trainer that is to resume OUTPUT under a strategy of Lightning's own (default: %(default)s)",
    )
    export.set_defaults(run=_export)


def _export(options: argparse.Namespace) -> int:
    from unicron_lightning.fsdp.export import checkpoint_digests, export_checkpoint  # imports torch

    if options.digest == (options.output is not None):
        raise ConfigError("unicron export: expected either OUTPUT or --digest")
    if options.digest:
        parameters, optimizers = checkpoint_digests(options.checkpoint)
        print(f"digest {parameters} of the parameters, {optimizers} of the optimizers")
        return 0
    count = export_checkpoint(options.checkpoint, options.output, batches=options.accumulate_grad_batches)
    print(f"{options.output}: {count} tensors of the model")
    return 0
