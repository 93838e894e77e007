"""``unicron metrics``: the coordinator's figures as Prometheus reads them, and the credential that Prometheus needs."""

from __future__ import annotations

import argparse
import sys
from http import HTTPStatus

from unicron_lightning.cli.client import access_of, connecting, request
from unicron_lightning.errors import CoordinatorUnavailable
from unicron_lightning.proof import scrape_credential


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of ``unicron``."""
    parser = commands.add_parser("metrics", parents=[connecting()], help="show the figures for Prometheus")
    words = "print the credential for Prometheus instead: it permits to read /metrics, and nothing else"
    parser.add_argument("--credential", action="store_true", help=words)
    parser.set_defaults(run=_metrics)


def _metrics(options: argparse.Namespace) -> int:
    access = access_of(options)
    if options.credential:
        print(scrape_credential(access.token.secret))
        return 0
    status, answer = request(options.endpoint, "GET", "/metrics", access)
    if status != HTTPStatus.OK:
        raise CoordinatorUnavailable(f"{options.endpoint} answers HTTP {status}")
    sys.stdout.write(answer.decode())
    return 0
