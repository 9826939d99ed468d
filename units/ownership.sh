# shellcheck shell=sh
# Read by install.sh: what on this machine is the agent's own, and what is another program's of the same name.
#
# A folder that bears the mark is the agent's, whole.  install.sh marks the folders it makes, the service the
# state folders that it finds empty.  Folders without a mark (older installations, files that people put there) are
# judged by what is in them; of those `purge` removes the agent's files alone.

MARK=.agent-worker
FOUND=
UNIT_FOLDERS='/etc/systemd/system /run/systemd/system /usr/local/lib/systemd/system /usr/lib/systemd/system'

# check_foreign USER GIVEN -- stop, with everything named, where another program's files or user are in the way.
# GIVEN is not empty if the user was named on the command line or by an earlier installation.
check_foreign() {
    installed='' known=''
    if program_is_ours && file_is_ours "$BIN"; then installed=1; fi
    case "$(folder_state etc "$ETC")" in ours | mixed) known=1 ;; esac
    foreign_user "$1" "$2"
    wrong_kind "$ETC"
    [ -n "$installed" ] || foreign_folder etc "$ETC" "if its files are meant for this agent:  sudo touch $ETC/$MARK   (purge removes them then)
    or move it:  sudo mv $ETC $ETC.other"
    for name in config.d supervisor; do
        wrong_kind "$ETC/$name"
    done
    foreign_program
    foreign_units
    if [ -z "$installed" ]; then
        foreign_states
        [ -n "$known" ] || foreign_dropins
    fi
    [ -n "$FOUND" ] || return 0
    die "nothing was changed: what is not the agent's own is in the way
$FOUND  Where another program needs these, install the agent on another machine or in a container."
}

foreign_user() { # USER GIVEN
    [ "$1" = agent ] && [ -z "$2" ] && [ -z "$installed" ] || return 0
    entry=$(entry_of passwd)
    case "$entry" in
        *:"$GECOS":*) return 0 ;;
        '') # its user will be of this group
            members=$(entry_of group | cut -d: -f4)
            [ -z "$members" ] || found "group agent: its members ($members) could read the list and the state" \
                "if they may:  sudo make install USER=agent
    or let the steps have the rights of another user:  sudo make install USER=name"
            return 0 ;;
    esac
    found "user agent: was not made by this installer (home $(echo "$entry" | cut -d: -f6), shell $(echo "$entry" | cut -d: -f7))" \
        "to give the steps its rights:  sudo make install USER=agent
    or those of another user:  sudo make install USER=name"
}

entry_of() { # DATABASE
    if [ -z "$DESTDIR" ]; then getent "$1" agent || :; else sed -n '/^agent:/p' "$DESTDIR/etc/$1" 2>/dev/null || :; fi
}

foreign_folder() { # KIND PATH HINT
    case "$(folder_state "$1" "$2")" in
        foreign) found "$2: $(others "$1" "$2")" "$3" ;;
        kind) [ "$1" = etc ] || wrong_kind "$2" ;;
    esac
}

# wrong_kind PATH -- something that is no folder, and leads to none, where a folder belongs.
wrong_kind() {
    there "$1" && [ ! -d "$DESTDIR$1" ] || return 0
    what='a file'
    [ ! -L "$DESTDIR$1" ] || what="a link to $(readlink "$DESTDIR$1"), which is no folder,"
    found "$1: $what where a folder belongs" "move it:  sudo mv $1 $1.other"
}

foreign_program() {
    if there "$BIN" && ! file_is_ours "$BIN"; then
        found "$BIN: is another program" "move it:  sudo mv $BIN $BIN.other"
    fi
    foreign_folder lib "$LIB" "move it:  sudo mv $LIB $LIB.other"
}

# A unit in /etc may be somebody's copy of ours (systemctl edit --full), or a mask.
foreign_units() {
    for unit in $UNIT_FILES; do
        for folder in $UNIT_FOLDERS; do
            path=$folder/$unit
            if ! there "$path" || file_is_ours "$path"; then continue; fi
            [ "$(readlink "$DESTDIR$path")" != /dev/null ] || [ "$folder" = "$UNITS" ] || continue
            found "$path: is another program's unit" "move it:  sudo mv $path $path.other   (stop it first)"
        done
    done
}

foreign_dropins() {
    for unit in $UNIT_FILES; do
        for folder in $UNIT_FOLDERS; do
            for path in "$DESTDIR$folder/$unit.d"/*; do
                path=${path#"$DESTDIR"}
                if ! there "$path" || file_is_ours "$path"; then continue; fi
                found "$path: would change the agent's unit" \
                    "if it is meant for this agent:  sudo mkdir -p $ETC && sudo touch $ETC/$MARK
    or move it:  sudo mv $path $path.other"
            done
        done
    done
}

# Where the service would write: systemd gives these to the agent's user with all that is in them, and empties two.
foreign_states() {
    for path in "$STATE" $(instances "$STATE"); do
        foreign_folder state "$path" "if it is this agent's state:  sudo touch $path/$MARK   (purge removes it then)
    or move it:  sudo mv $path $path.other"
    done
    foreign_folder alert "$ALERTS" "move it:  sudo mv $ALERTS $ALERTS.other"
    foreign_folder supervisor "$SUPERVISOR" "move it:  sudo mv $SUPERVISOR $SUPERVISOR.other"
    for path in "$CACHE" $(instances "$CACHE"); do
        cache_is_ours "$path" ||
            foreign_folder cache "$path" "the agent would empty it; move it:  sudo mv $path $path.other"
    done
    foreign_folder cache /run/agent "stop what uses it, then:  sudo rm -r /run/agent"
}

# --- what is there ----------------------------------------------------------

# folder_state KIND PATH -- say what is there: absent, empty, ours, mixed (ours, with others' files), foreign, or
# kind (no folder).
folder_state() {
    if ! there "$2"; then echo absent; return 0; fi
    if [ ! -d "$DESTDIR$2" ]; then echo kind; return 0; fi
    if [ -z "$(ls -A "$DESTDIR$2")" ]; then echo empty; return 0; fi
    if [ -e "$DESTDIR$2/$MARK" ]; then echo ours; return 0; fi
    if [ -z "$(others "$1" "$2")" ]; then echo ours; return 0; fi
    if bears_traces "$1" "$DESTDIR$2"; then echo mixed; else echo foreign; fi
}

# others KIND PATH -- name what is in a folder and not known to be the agent's.
others() {
    list=''
    for other in "$DESTDIR$2"/* "$DESTDIR$2"/.[!.]* "$DESTDIR$2"/..?*; do
        [ -e "$other" ] || [ -L "$other" ] || continue
        entry_is_ours "$1" "$other" || list="$list${list:+, }${other##*/}"
    done
    printf '%.300s' "$list" | LC_ALL=C tr -c '[:print:]' '?'   # a step may have named it, and a terminal obeys
}

# bears_traces KIND FOLDER -- whether a folder without a mark is the agent's for all that.
bears_traces() {
    case "$1" in
        etc) [ -d "$2/config.d" ] && [ -d "$2/supervisor" ] ;;   # the list may be anything, while it is being edited
        lib) entry_is_ours lib "$2/current" && entry_is_ours lib "$2/releases" ;;
        state) is_state "$2" ;;
        alert) ls "$2"/*/alert.json >/dev/null 2>&1 ;;
        supervisor) ls "$2"/*/machines.json >/dev/null 2>&1 ;;
        *) return 1 ;;
    esac
}

is_state() { # FOLDER
    [ "$(start_of 15 "$1/ledger.db")" = 'SQLite format 3' ] ||
        start_of 400 "$1/checkpoint.json" | grep -q '"format":.*"revision":' ||
        { [ -f "$1/lock" ] && [ -d "$1/out" ] && [ -d "$1/steps" ] && [ -d "$1/work" ]; }
}

# start_of BYTES FILE -- of a plain file in a folder of the steps: no link of theirs is followed, no FIFO waited for.
start_of() {
    dd if="$2" bs="$1" count=1 iflag=nofollow,nonblock 2>/dev/null || :
}

is_list() { # FILE
    [ -f "$1" ] && grep -q '\(^\|^{\|[{,] *\)["'\'']\{0,1\}\(tasks\|run\|defaults\|budget\)["'\'']\{0,1\} *:' "$1"
}

entry_is_ours() { # KIND PATH
    [ "${2##*/}" != "$MARK" ] || return 0
    case "$1/${2##*/}" in
        etc/supervisor) all_yaml "$2" any ;;
        etc/*.d) all_yaml "$2" lists ;;
        etc/*.yaml | etc/*.yml) is_list "$2" ;;
        lib/current | lib/current.new) case "$(readlink "$2")" in releases/*) ;; *) return 1 ;; esac ;;
        lib/releases) all_environments "$2" ;;
        lib/drop-ins) [ -f "$2/no-sandboxes.conf" ] ;;
        lib/hooks | lib/hooks.new) grep -qs '^# What agent.service has done around the worker' "$2" ;;
        state/ledger.db* | state/checkpoint.json* | state/worker.json | state/alert.json | state/lock) is_state "${2%/*}" ;;
        state/out | state/steps | state/log | state/work | state/runs | state/run | state/copy) is_state "${2%/*}" ;;
        state/ended | state/last-words | state/alerted | state/paused | state/pinged | state/keep-awake) is_state "${2%/*}" ;;
        state/before-restore-* | state/restoring-* | state/.restore | state/.*.new | state/.empty) is_state "${2%/*}" ;;
        alert/*) [ -f "$2/alerted" ] || [ -f "$2/alert.json" ] || [ -z "$(ls -A "$2" 2>/dev/null)" ] ;;
        supervisor/*) [ -f "$2/machines.json" ] || [ -z "$(ls -A "$2" 2>/dev/null)" ] ;;
        *) return 1 ;;
    esac
}

all_yaml() { # FOLDER any|lists
    [ -d "$1" ] || return 1
    for file in "$1"/* "$1"/.[!.]* "$1"/..?*; do
        [ -e "$file" ] || [ -L "$file" ] || continue
        case "$file" in *.yaml | *.yml) ;; *) return 1 ;; esac
        [ "$2" = any ] || is_list "$file" || return 1
    done
}

all_environments() { # FOLDER
    [ -d "$1" ] || return 1
    for file in "$1"/*; do
        [ ! -e "$file" ] || [ -f "$file/pyvenv.cfg" ] || return 1
    done
}

# program_is_ours -- whether this program is installed, by this installer or an earlier one.
program_is_ours() {
    [ -L "$DESTDIR$LIB/current" ] && bears_traces lib "$DESTDIR$LIB"
}

# file_is_ours PATH -- whether it is the command, a unit or a drop-in that this installer, or an earlier one, wrote.
file_is_ours() {
    case "$1" in
        "$BIN") [ -f "$DESTDIR$1" ] && [ ! -L "$DESTDIR$1" ] && grep -q '^# Written by install\.sh\.' "$DESTDIR$1" ;;
        */systemd/system/*.d/*) is_our_link "$1" || { [ -f "$DESTDIR$1" ] && grep -q '^# Written by install\.sh from ' "$DESTDIR$1"; } ;;
        *) [ -f "$DESTDIR$1" ] && grep -q -e "$BIN" -e "$HOOKS thaw" -e "^PathChanged=$ETC/config.d" "$DESTDIR$1" ;;
    esac 2>/dev/null
}

is_our_link() { # PATH -- of a drop-in that comes with the agent
    case "$(readlink "$DESTDIR$1")" in "$DROPINS"/*) ;; *) return 1 ;; esac
}

# unit_is_ours UNIT -- whether it is installed, and what systemd runs under that name is the agent's.
unit_is_ours() {
    file_is_ours "$UNITS/$1" || return 1
    for folder in /etc/systemd/system /run/systemd/system; do
        path=$folder/$1
        if there "$path" && [ "$(readlink "$DESTDIR$path")" != /dev/null ] && ! file_is_ours "$path"; then return 1; fi
    done
}

# cache_is_ours PATH -- whether it is the /tmp of an agent whose state is there: systemd made it for the same user.
cache_is_ours() {
    mate=$STATE${1#"$CACHE"}
    case "$(folder_state state "$mate")" in ours | mixed) ;; *) return 1 ;; esac
    [ -d "$DESTDIR$1" ] && [ "$(stat -Lc %u "$DESTDIR$1")" = "$(stat -Lc %u "$DESTDIR$mate")" ]
}

# instances PATH -- the folders PATH@NAME of agent@NAME.service; systemd's names have no blanks.
instances() {
    for path in "$DESTDIR$1"@*; do
        [ ! -e "$path" ] || printf '%s\n' "${path#"$DESTDIR"}"
    done
}

there() { # PATH
    [ -e "$DESTDIR$1" ] || [ -L "$DESTDIR$1" ]
}

found() { # WHAT HINT
    FOUND="$FOUND  $1
    $2
"
}

# --- removing ---------------------------------------------------------------

# remove_ours KIND PATH -- remove what is the agent's own of a folder, all of it if it bears the mark; name the rest.
remove_ours() {
    there "$2" || return 0
    whose=$(folder_state "$1" "$2")
    if [ -L "$DESTDIR$2" ]; then
        case "$whose" in
            empty | ours) rm -f "$DESTDIR$2"; changed "removed the link $2; kept what it led to" ;;
            *) say "kept $2: a link, which the agent did not make" ;;
        esac
        return 0
    fi
    case "$whose" in
        empty | ours)
            # A mount point can be emptied, and not removed; what is mounted below it is somebody's.
            if rm -rf --one-file-system "$DESTDIR${2:?}" 2>/dev/null; then changed "removed $2"; else say "kept $2: it could be emptied at most"; fi
            return 0 ;;
        mixed)
            # Judged before any of it has gone; not by way of lines, since a step may put a newline into a name.
            for path in "$DESTDIR$2"/* "$DESTDIR$2"/.[!.]*; do
                if { [ -e "$path" ] || [ -L "$path" ]; } && entry_is_ours "$1" "$path"; then
                    set -- "$@" "${path#"$DESTDIR"}"
                fi
            done
            kind=$1 whole=$2
            shift 2
            for path; do
                remove "$path"
            done
            set -- "$kind" "$whole" ;;
    esac
    case "$whose" in
        kind) say "kept $2: it is no folder, so it is not the agent's" ;;
        *) say "kept $2, in which these are not known to be the agent's: $(others "$1" "$2")" ;;
    esac
}

# remove_file PATH -- remove the command, a unit or a drop-in if it is the agent's.
remove_file() {
    there "$1" || return 0
    if file_is_ours "$1"; then remove "$1"; else say "kept $1: it is not the agent's"; fi
}
