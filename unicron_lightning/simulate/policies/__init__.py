"""Systems that are compared: each says how errors are noticed, what stops, what is lost, and who gets which nodes."""
