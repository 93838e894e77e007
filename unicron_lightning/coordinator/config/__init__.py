"""Configuration of the coordinator; every key with unit, default and reason: docs/configuration.md."""

from unicron_lightning.coordinator.config.schema import (
    ClusterConfig,
    CoordinatorConfig,
    DetectionConfig,
    HealthConfig,
    PlannerConfig,
    ProcessConfig,
    SeverityConfig,
    StoreConfig,
    TaskConfig,
)

__all__ = [
    "ClusterConfig",
    "CoordinatorConfig",
    "DetectionConfig",
    "HealthConfig",
    "PlannerConfig",
    "ProcessConfig",
    "SeverityConfig",
    "StoreConfig",
    "TaskConfig",
]
