#!/bin/bash
# Drains in Unicron the nodes that Slurm drains, and undrains those that Slurm resumes. Run one beside the coordinator:
#
#   UNICRON_ENDPOINT=HOST:29461 UNICRON_TOKEN=... drain-poller.sh [SECONDS [STATE_FILE]]
#
# It needs `sinfo` and `unicron`, and daemons or agents that are labelled by Slurm's names of the nodes (SLURMD_NODENAME).
# Nodes that were drained by an operator in Unicron are not undrained: STATE_FILE keeps the names of those drained here.
# SECONDS=0: once.
set -uo pipefail
interval="${1:-10}"
state="${2:-${XDG_STATE_HOME:-$HOME/.local/state}/unicron-drained}"
mkdir -p "$(dirname "$state")"
touch "$state"

poll() {
    local nodes leaving kept=() name
    # One line per node and partition, compact states with flags such as * (does not answer) or ~ (powered down).
    nodes=$(sinfo --noheader --Node --format='%N %t') || return
    leaving=$(awk '{ sub(/[^a-z].*$/, "", $2) } $2 ~ /^(drain|drng|fail|failg|maint)$/ { print $1 }' <<< "$nodes" | sort -u)
    while read -r name; do
        [ -n "$name" ] || continue
        if grep -qxF -- "$name" "$state" || unicron drain "$name"; then
            kept+=("$name")
        fi
    done <<< "$leaving"
    while read -r name; do
        [ -n "$name" ] || continue
        if ! grep -qxF -- "$name" <<< "$leaving" && ! unicron undrain "$name"; then
            kept+=("$name") # again at the next poll
        fi
    done < "$state"
    printf '%s\n' "${kept[@]}" > "$state.new" && mv "$state.new" "$state"
}

while true; do
    poll
    [ "$interval" = 0 ] && break
    sleep "$interval"
done
