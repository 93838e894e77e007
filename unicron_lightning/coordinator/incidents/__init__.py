"""Records of running tasks: incidents with their costs, and measurements of speed, transitions and lifetimes."""
