"""Checks of links between nodes: probes when nodes do not reach each other, and the choice of those that continue."""
