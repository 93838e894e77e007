"""Unicron itself, simulated: the coordinator's real state machine and planner, with simulated nodes around them."""
