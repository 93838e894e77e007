"""The public names are these, they load lazily, and no other names are promised."""

from __future__ import annotations

import importlib
from importlib.metadata import version

import pytest

import unicron_lightning


def test_the_public_names() -> None:
    assert unicron_lightning.__all__ == ["UnicronMegatronStrategy", "UnicronStrategy", "__version__"]


def test_the_version_is_the_installed_one() -> None:
    assert unicron_lightning.__version__ == version("unicron-lightning")


def test_dir_shows_the_lazy_names() -> None:
    assert set(unicron_lightning.__all__) <= set(dir(unicron_lightning))


def test_the_strategy_is_the_one_of_the_strategies_package() -> None:
    module = importlib.import_module("unicron_lightning.strategies.unicron")
    assert unicron_lightning.UnicronStrategy is module.UnicronStrategy


def test_an_unknown_name_says_so() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = unicron_lightning.nothing
