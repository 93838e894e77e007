"""Lightning callbacks; imported as unicron_lightning.callbacks."""

from unicron_lightning.callbacks.checkpoint import MemoryCheckpoint, UnicronCheckpoint
from unicron_lightning.callbacks.fault_injection import FaultInjection
from unicron_lightning.callbacks.monitor import UnicronMonitor
from unicron_lightning.callbacks.throughput import ThroughputMonitor

__all__ = ["FaultInjection", "MemoryCheckpoint", "ThroughputMonitor", "UnicronCheckpoint", "UnicronMonitor"]
