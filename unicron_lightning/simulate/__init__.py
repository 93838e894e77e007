"""What failures would cost a cluster: traces replayed by policies on a virtual clock. Pure: no processes, no torch."""
