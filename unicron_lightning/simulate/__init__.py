"""Costs of failures in a cluster: traces replayed by policies on a virtual clock. Pure: no processes, no torch."""
