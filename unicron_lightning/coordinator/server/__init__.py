"""The shell around the machine: peers' connections, their messages, timers."""
