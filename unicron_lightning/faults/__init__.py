"""Injected faults: one small language for tests, chaos runs, the simulator and `unicron inject` (docs/faults.md)."""
