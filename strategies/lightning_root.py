"""The two roots of Lightning: ``lightning.pytorch`` and the package ``pytorch_lightning``.

Their classes are different ones with the same names, so objects of one do not work in the other. The strategy belongs
to ``lightning.pytorch``; a script with the other root gets one error that names the cause, wherever the roots meet.
"""

from __future__ import annotations

import sys
from typing import Any, Final, NoReturn

from unicron_lightning.autoload import OTHER_REGISTRY_MODULE
from unicron_lightning.errors import ConfigError

OTHER: Final = OTHER_REGISTRY_MODULE.split(".")[0]
"""The root whose classes cannot be used here."""


def is_other(value: object) -> bool:
    """Tell whether an object's class derives from one of the other root; its plain `Callback` only names hooks."""
    return any(each.__module__.split(".")[0] == OTHER and each.__name__ != "Callback" for each in type(value).__mro__)


def refuse(found: str) -> ConfigError:
    """Return the error for something of the other root; ``found`` names it."""
    return ConfigError(
        f"{found} comes from the package {OTHER}, whose classes are not those of lightning.pytorch, which the unicron "
        'strategy extends: write "import lightning.pytorch as pl" instead of "import pytorch_lightning as pl", in all '
        "files of the script (both packages have the same functions)"
    )


def meet(strategy: type) -> None:
    """Have trainers of the other root, if it is imported, take instances of the strategy, which then refuse them."""
    if (other := sys.modules.get(OTHER_REGISTRY_MODULE)) is not None:
        other.Strategy.register(strategy)


def check_accelerator(accelerator: Any, strategy: type) -> None:
    """Refuse a trainer of the other root, which is known by the accelerator that it gives its strategy.

    Raises:
        ConfigError: naming the cause.
    """
    if is_other(accelerator):
        raise refuse(f"the Trainer that was given a {strategy.__qualname__}")


def refuse_strategy(name: str) -> NoReturn:
    """Stand for the strategy of a name in the other root's registry.

    Raises:
        ConfigError: naming the cause.
    """
    raise refuse(f'the Trainer that was given strategy="{name}"')
