#!/bin/sh
# What agent.service has done around the worker, beside it: prepare, stop, ended.
#
# The worker's steps outlive it (KillMode=process), so somebody has to tell when
# they shall not.  None of this needs Python: a stop works whatever is broken.
set -u

# The job that systemd has for this unit now: start, restart, stop or nothing.
# `systemctl stop` and `systemctl restart` are told apart by it alone.
job() {
    systemctl list-jobs --no-legend 2>/dev/null | while read -r _ name type _; do
        [ "$name" != "$UNIT" ] || echo "$type"
    done
}

# ExecStartPre: an empty /tmp, unless steps live that have files in it.  PrivateTmp=
# would empty it at every restart.
prepare() {
    [ ! -e "$RUNTIME_DIRECTORY/seen" ] || return 0
    chmod -R u+rwX "$CACHE_DIRECTORY" 2>/dev/null
    find "$CACHE_DIRECTORY" -xdev -mindepth 1 -delete
}

# ExecStop: SIGTERM comes next.  Before that, tell the worker if another one takes over.
stop() {
    [ "$(job)" != restart ] || kill -USR1 "$MAINPID"
}

# ExecStopPost: the worker has gone, whichever way.
ended() {
    if goes_on; then
        return 0
    fi
    group=/sys/fs/cgroup$(systemctl show --property=ControlGroup --value "$UNIT")
    for child in "$group"/*/; do
        [ "$child" = "$group/.control/" ] || echo 1 >"$child/cgroup.kill" 2>/dev/null
    done
    [ "$SERVICE_RESULT $EXIT_STATUS" = "success 0" ] || return 0
    # A good end does not count against the start limit, since work may be dropped in
    # as often as one likes; and what was dropped in while the worker was ending,
    # which agent.path does not see, starts it again.
    systemctl reset-failed "$UNIT"
    new=$(find "/etc/agent/${INSTANCE:-config}.d" -name '*.y*ml' -cnewer "/var/lib/$NAME/checkpoint.json" 2>/dev/null)
    [ -z "$new" ] || systemctl --no-block start "$UNIT"
}

# Whether another worker will go on with the steps of this one.
goes_on() {
    case "$(job)" in
        restart) return 0 ;;
        stop) return 1 ;;
    esac
    case "$SERVICE_RESULT/$EXIT_STATUS" in
        # As RestartPreventExitStatus= has it.
        success/0 | */69 | */70 | */73 | */77 | */78) return 1 ;;
    esac
}

# How systemd saw it end, for the note that the next attempt gets.
note() {
    echo "$SERVICE_RESULT $EXIT_CODE $EXIT_STATUS" >"$STATE_DIRECTORY/ended"
}

UNIT=$2
NAME=${UNIT%.service}
case "$NAME" in *@*) INSTANCE=${NAME#*@} ;; *) INSTANCE='' ;; esac
"$1"
