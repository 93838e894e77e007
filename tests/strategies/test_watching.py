"""Tests of methods that a mock in Lightning's class watches."""

from __future__ import annotations

from types import MethodType
from typing import Any
from unittest.mock import Mock, create_autospec, patch

import pytest
from lightning.pytorch.strategies import Strategy

from unicron_lightning.strategies.unicron import UnicronStrategy


def test_a_mock_gets_the_calls_and_reaches_the_strategys_own_method() -> None:
    strategy = UnicronStrategy()
    own: Any = strategy.backward
    with patch.object(Strategy, "backward", new=Mock(wraps=own)) as mock:
        assert strategy.backward is mock
        assert UnicronStrategy.backward is own.__func__
    assert strategy.backward == own


@pytest.mark.parametrize("replacement", [lambda *args: None, create_autospec(Strategy.backward), staticmethod(Mock())])
def test_a_function_is_not_called(replacement: Any) -> None:
    strategy = UnicronStrategy()
    with patch.object(Strategy, "backward", new=replacement):
        assert strategy.backward == MethodType(UnicronStrategy.backward, strategy)
