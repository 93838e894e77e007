"""``python -m unicron_lightning.coordinator [key=value ...]``: run a coordinator, configured by Hydra.

``--cfg job`` shows the configuration, ``--help`` what can be set.
"""

from __future__ import annotations

import logging
import sys
from typing import cast

import hydra
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from unicron_lightning.coordinator.config import CoordinatorConfig, register_schema
from unicron_lightning.errors import UnicronError

logger = logging.getLogger(__name__)


def main(arguments: list[str] | None = None) -> None:
    """Run with the given command line (default: the process's); ends the process with the coordinator's status."""
    if arguments is not None:
        sys.argv = [sys.argv[0], *arguments]
    register_schema()
    hydra.main(version_base="1.3", config_path="pkg://unicron_lightning.conf", config_name="coordinator")(_run)()


def _run(composed: DictConfig) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr)
    from unicron_lightning.coordinator.server import serve  # Not needed to show the configuration.

    try:
        status = serve(cast(CoordinatorConfig, OmegaConf.to_object(composed)))
    except (UnicronError, OmegaConfBaseException) as error:
        logger.error("%s", error)
        status = 2
    sys.exit(status)


if __name__ == "__main__":
    main()
