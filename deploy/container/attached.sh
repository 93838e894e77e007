#!/bin/bash
# Runs torchrun with the given arguments as the main process of a container.
#
# Statuses: that of torchrun, but 143 if it was asked to end (SIGTERM) and has left its task in order, for which torchrun has
# status 0. Without this difference Kubernetes would count the Pod of an evicted node as a success, and start no other.
asked=
trap 'asked=1; kill -TERM "$child" 2> /dev/null' TERM
torchrun "$@" &
child=$!
wait "$child"
status=$?
while kill -0 "$child" 2> /dev/null; do # a signal interrupts wait
    wait "$child"
    status=$?
done
if [ -n "$asked" ] && [ "$status" -eq 0 ]; then
    exit 143
fi
exit "$status"
