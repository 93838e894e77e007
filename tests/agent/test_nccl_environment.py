"""The agent sets the variables that NCCL needs, whatever the user has set, and names replaced values."""

from __future__ import annotations

from unicron_lightning.agent.handler import REFUSED, REQUIRED, settle


def test_all_is_set_in_an_empty_environment() -> None:
    environment: dict[str, str] = {}
    assert settle(environment) == []
    assert environment == {name: value for name, (value, _) in REQUIRED.items()}


def test_a_contrary_value_is_replaced_and_named() -> None:
    environment = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "TORCH_DISTRIBUTED_DEBUG": "detail", "OTHER": "x"}
    first, second = settle(environment)
    assert first.startswith("TORCH_NCCL_ASYNC_ERROR_HANDLING=1: set to 0, since ")
    assert second.startswith("TORCH_DISTRIBUTED_DEBUG=detail: set to INFO, since ")
    assert environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0" and environment["OTHER"] == "x"
    assert settle(environment) == [], "said once"


def test_each_variable_has_a_reason() -> None:
    assert all(len(reason) > 20 for _, reason in REQUIRED.values())
    assert all(len(reason) > 20 for _, _, reason in REFUSED.values())
