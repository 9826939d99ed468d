#!/bin/sh
# What agent.service has done around the worker, beside it:
#     sh hooks make_tmp|prepare|stop|note|ended|thaw UNIT
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
# would empty it at every restart.  A state folder that is empty yet is the agent's, and says so to `make purge`.
# What the last worker has left beside its steps goes: a step that had not come to its cgroup yet, a copy.  The next
# worker may not see them, since each life of the service has a user namespace of its own (PrivateUsers=).
prepare() {
    own_cgroup
    kill_procs
    [ -n "$(ls -A "${STATE_DIRECTORY%%:*}")" ] || : >"${STATE_DIRECTORY%%:*}/.agent-worker"
    cache=${CACHE_DIRECTORY%%:*}
    if [ ! -e "${RUNTIME_DIRECTORY%%:*}/seen" ]; then
        chmod -R u+rwX "$cache/tmp" 2>/dev/null
        find "$cache/tmp" -xdev -mindepth 1 -delete
    fi
}

# ExecStartPre, as root in a folder of the steps' user, which that one may not write to from inside: a /tmp as
# everywhere, since programs give up their rights (apt); who is outside sees none of it.  Not mkdir -p, which takes a link.
make_tmp() {
    [ -d "${CACHE_DIRECTORY%%:*}/tmp" ] || mkdir -m 1777 "${CACHE_DIRECTORY%%:*}/tmp"
}

# ExecStop: SIGTERM comes next.  Before that, tell the worker if another one takes over.
stop() {
    [ "$(job)" != restart ] || kill -USR1 "${MAINPID:?it has just died}"
}

# ExecStopPost: the worker has gone, whichever way.  That somebody asked for it, and need not be told, is written down
# where no step could say so.
ended() {
    job=$(job)
    [ "$job" != stop ] || (umask 022; mkdir -p "$STOPPED" && echo "$INVOCATION_ID" >"$STOPPED/$NAME")
    case "$job" in
        restart) # an admin may restart as often as he likes
            systemctl reset-failed "$UNIT"
            return 0 ;;
        stop) ;;
        *) ! comes_back || return 0 ;;
    esac
    end_all
    [ "$SERVICE_RESULT $EXIT_STATUS" = "success 0" ] || return 0
    # A good end does not count against the start limit, since work may be dropped in
    # as often as one likes; and what was dropped in while the worker was ending,
    # which agent.path does not see, starts it again.
    systemctl reset-failed "$UNIT"
    new=$(find "/etc/agent/${INSTANCE:-config}.d" -name '*.y*ml' -cnewer "/var/lib/$NAME/checkpoint.json" 2>/dev/null)
    [ -z "$new" ] || systemctl --no-block start "$UNIT"
}

# Kill what is left in the unit's cgroup, of which this process may be a member itself.
end_all() {
    own_cgroup
    if [ -n "$group" ]; then
        for child in "$CGROUPS$group"/*/; do
            echo 1 2>/dev/null >"${child}cgroup.kill"
        done
    fi
    kill_procs
}

# own_cgroup -- set `group` to the unit's cgroup, empty where steps have none of their own (cgroup v1), and `procs` to
# the file that names those who are in no other.  Where that is, is asked of nobody who might not answer: at the root
# it would be the machine.
own_cgroup() {
    procs=''
    group=$(sed -n 's/^0:://p' /proc/self/cgroup)
    group=${group%/.control}
    case "$group" in */"$UNIT") procs=$CGROUPS$group/cgroup.procs; return 0 ;; esac
    group=''
    v1=$(sed -n 's/^[0-9]*:name=systemd://p' /proc/self/cgroup)
    case "$v1" in */"$UNIT") procs=$CGROUPS/systemd$v1/cgroup.procs ;; esac
}

kill_procs() {
    [ -n "$procs" ] || return 0
    while read -r pid; do
        [ "$pid" = $$ ] || kill -9 "$pid" 2>/dev/null
    done <"$procs"
}

# Whether systemd starts another worker by itself, which goes on with the steps of this one.
comes_back() {
    case "$SERVICE_RESULT/$EXIT_STATUS" in
        # As RestartPreventExitStatus= has it.
        success/0 | */69 | */70 | */73 | */77 | */78) return 1 ;;
    esac
    return 0
}

# How systemd saw it end, for the note that the next attempt gets.  What keeps the machine awake stays for the
# next worker; it is removed with the worker's rights, who could have named any path.  A FIFO that a step has put
# there is not waited for: the hook that ends what the worker has left comes next.
note() {
    state=${STATE_DIRECTORY%%:*}
    job=$(job)
    {
        echo "$SERVICE_RESULT $EXIT_CODE $EXIT_STATUS${INVOCATION_ID:+ $INVOCATION_ID}"
        [ "$job" != stop ] || echo stop   # then it is no fault of the worker's
    } | dd of="$state/ended" oflag=append,nofollow,nonblock conv=notrunc 2>/dev/null
    [ -f "$state/keep-awake" ] || return 0
    case "$job/$EXIT_STATUS" in
        restart/* | */77) return 0 ;;   # 77: it is another worker's
        stop/*) ;;
        *) ! comes_back || return 0 ;;
    esac
    path=$(dd if="$state/keep-awake" iflag=nofollow,nonblock bs=4096 count=1 2>/dev/null | head -n 1)
    [ -z "$path" ] || rm -f -- "$path" "$state/keep-awake"
}

# ExecStop of agent-thaw@, as soon as the unit ends: a frozen cgroup (`systemctl freeze`) is let go on, so that its end
# can come.  Steps that are held still (`agentctl pause`) have cgroups of their own below it.
thaw() {
    group=$(systemctl show -P ControlGroup "$UNIT")
    case "$group" in */"$UNIT") file=$CGROUPS$group/cgroup.freeze ;; *) return 0 ;; esac
    [ "$(cat "$file" 2>/dev/null)" = 1 ] || return 0
    case "$(systemctl show -P ActiveState "$UNIT")" in deactivating | failed) echo 0 >"$file" ;; esac
}

UNIT=$2
CGROUPS=${CGROUPS-/sys/fs/cgroup}
STOPPED=${STOPPED-/run/agent-stopped}
NAME=${UNIT%.service}
case "$NAME" in *@*) INSTANCE=${NAME#*@} ;; *) INSTANCE='' ;; esac
"$1"
