#!/bin/sh
# The first process of a program that can outlive the worker (see shelter.py):
#     sh leader.sh PROGRAM [ARGUMENT...] 3>REPORT 4>CGROUP.PROCS 5<GATE
# It enters the cgroup, waits for the end of GATE, starts the program as its child,
# and writes down how that ended; what the shell itself has to say of that ("Killed")
# goes into the report too.  Signals that end the program let this one live for that
# long.
echo 0 >&4 || exit 125
exec 4>&- 6>&2 2>&3 3>&-
echo "pid $$" >&2
trap : HUP INT QUIT USR1 USR2 ALRM TERM
read -r _ <&5
exec 5<&-
(exec "$@" 2>&6 6>&-)
code=$?
echo "exit $code" >&2
exit "$code"
