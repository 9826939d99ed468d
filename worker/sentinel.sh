#!/bin/sh
# Ends the steps once nobody is going to look after them (see sentinel.py):
#     sh sentinel.sh CGROUP <PIPE
# It waits, in a cgroup of its own, for the end of the pipe.
echo 0 >"$1/cgroup.procs"
trap '' HUP INT QUIT
read -r _
for group in "${1%/*}"/*/; do
    [ "$group" = "$1/" ] || echo 1 >"${group}cgroup.kill"
done
