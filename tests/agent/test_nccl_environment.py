"""The agent sets the variables that NCCL needs, whatever the user has set, and names replaced values."""

from __future__ import annotations

import pytest

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


def test_values_that_hinder_an_abort_are_removed_and_named() -> None:
    refused = {name: value for name, (value, other, _) in REFUSED.items() if other is None}
    environment = {**refused, "NCCL_CUMEM_ENABLE": "1"}
    replaced = settle(environment)
    assert [line.partition(": ")[0] for line in replaced] == [
        "NCCL_COMM_BLOCKING=1",
        "CUDA_LAUNCH_BLOCKING=1",
        "TORCH_DIST_USE_NCCL2=1",
    ]
    assert not {"NCCL_COMM_BLOCKING", "CUDA_LAUNCH_BLOCKING", "TORCH_DIST_USE_NCCL2"} & environment.keys()
    assert environment["NCCL_CUMEM_ENABLE"] == "1"
    assert settle({"NCCL_CUMEM_ENABLE": "0"})[0].startswith("NCCL_CUMEM_ENABLE=0: removed, since ")


@pytest.mark.parametrize(("given", "kept"), [("900", True), ("20", False), ("soon", False)])
def test_a_users_longer_limit_is_kept(given: str, kept: bool) -> None:
    environment = {"TORCH_NCCL_NONBLOCKING_TIMEOUT": given}
    assert bool(settle(environment)) != kept
    assert environment["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == (given if kept else "60")


def test_each_variable_has_a_reason() -> None:
    assert all(len(reason) > 20 for _, reason in REQUIRED.values())
    assert all(len(reason) > 20 for _, _, reason in REFUSED.values())
