#!/bin/sh
# Installs the agent: its program, its user, its units.
#
# Says what it changes.  A second run changes no byte and restarts nothing.
# Configuration is written once and never overwritten; `uninstall` keeps it and
# the state, only `purge` deletes them.  Nothing is compiled, and no Python but
# the program's own is written to.  Until the new program is complete, nothing
# of the installed one is touched; what is another program's is never touched
# (units/ownership.sh).
set -eu
umask 022

usage() {
    cat <<'EOF'
install.sh install [--user NAME] [--workdir PATH]...
    Install, or upgrade.  --user: whose rights the steps have (default: a user
    of their own, 'agent').  --workdir: a folder of theirs the steps may write;
    those of earlier installations for the same user stay open.
install.sh uninstall    Remove program and units; keep configuration and state.
install.sh purge        Remove those too.
install.sh venv DIR [--dev]
    Make a Python environment with the packages the agent needs; no root needed.

DESTDIR=/path stages below that folder and leaves the system alone.
PYTHON=/path/to/python3 chooses the interpreter (3.11 or newer).
EOF
}

LIB=/usr/local/lib/agent
BIN=/usr/local/bin/agentctl
HOOKS=$LIB/hooks
DROPINS=$LIB/drop-ins   # to be linked into agent.service.d
UNITS=/usr/local/lib/systemd/system
ETC=/etc/agent
STATE=/var/lib/agent
CACHE=/var/cache/agent   # the service's /tmp
UNIT_FILES='agent.service agent@.service agent.path agent-alert@.service agent-thaw@.service agent-supervisor@.service'
SUPERVISOR=/var/lib/agent-supervisor
ALERTS=/var/lib/agent-alert   # what has been told, where no step can write
DROPIN=50-workdir.conf
NO_USERNS=10-no-user-namespaces.conf
GECOS='agent worker (made by its install.sh)'   # purge removes this user and no other
DESTDIR=${DESTDIR-}
CHANGED=0
UNITS_CHANGED=0
OFFLINE=
TMP=
NEW=

main() {
    case "$0" in */*) SOURCE=${0%/*} ;; *) SOURCE=. ;; esac
    SOURCE=$(cd "$SOURCE" && pwd -P)
    [ -f "$SOURCE/requirements.lock" ] || die "$SOURCE: not the agent's source folder (no requirements.lock)"
    # shellcheck source=units/ownership.sh
    . "$SOURCE/units/ownership.sh"
    if [ -n "$DESTDIR" ]; then
        mkdir -p "$DESTDIR"
        DESTDIR=$(cd "$DESTDIR" && pwd -P)
    fi
    trap cleanup EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM HUP
    command=${1-}
    [ $# -eq 0 ] || shift
    case "$command" in
        install) do_install "$@" ;;
        uninstall | purge)
            [ $# -eq 0 ] || die "$command takes no arguments"
            need_root "$command"
            mktmp
            do_uninstall
            if [ "$command" = purge ]; then do_purge; fi ;;
        venv) do_venv "$@" ;;
        -h | --help | help) usage ;;
        *) usage >&2; exit 2 ;;
    esac
}

# --- commands ---------------------------------------------------------------

do_install() {
    user='' workdirs=''
    while [ $# -gt 0 ]; do
        case "$1" in
            --user) [ -n "${2-}" ] || die "--user needs a name"; user=$2; shift 2 ;;
            --workdir) [ -n "${2-}" ] || die "--workdir needs a path"; add_workdir "$2"; shift 2 ;;
            *) die "install: '$1' is not understood (see install.sh --help)" ;;
        esac
    done
    need_root install
    dropin=$DESTDIR/etc/systemd/system/agent.service.d/$DROPIN
    rewrite=$user$workdirs   # without either, the drop-in stays as it is
    if [ -z "$user" ] && [ -f "$dropin" ]; then
        user=$(sed -n 's/^User=//p' "$dropin")
    fi
    given=$user
    user=${user:-agent}
    check_foreign "$user" "$given"
    mktmp
    keep_workdirs "$user"
    check_user "$user"
    check_workdirs "$user"
    drop_nested

    # Not whatever is first in PATH: a service must not depend on somebody's home.
    find_python /usr/bin/python3 /usr/bin/python3.14 /usr/bin/python3.13 /usr/bin/python3.12 /usr/bin/python3.11
    first=1
    [ ! -e "$DESTDIR$UNITS/agent.service" ] || first=0
    if has_systemd; then verify_units; fi
    install_program
    if [ "$user" = agent ]; then make_user; fi
    group=$(group_of "$user")
    install_config
    if [ -n "$rewrite" ]; then install_dropin "$user"; fi
    close_to_group "$user"
    share_dropin
    [ "$first" = 1 ] || keep_told "$user"
    put 644 "$SOURCE/units/hooks.sh" "$HOOKS"
    for path in "$SOURCE"/units/drop-ins/*.conf; do
        put 644 "$path" "$DROPINS/${path##*/}"
    done
    for unit in $UNIT_FILES; do
        put 644 "$(unit_source "$unit")" "$UNITS/$unit"
    done
    match_kernel "$user"
    [ "$CHANGED" = 0 ] || relabel
    activate "$user"
    name_groups "$user"
    [ "$CHANGED" = 1 ] || say "nothing changed"
}

do_uninstall() {
    own=''
    for unit in $UNIT_FILES; do
        if unit_is_ours "$unit"; then own="$own $unit"; fi
    done
    if has_systemd; then stop_units; fi
    for unit in $UNIT_FILES; do
        remove_file "$UNITS/$unit"
    done
    remove_file "$BIN"
    remove_ours lib "$LIB"
    rmdir "$DESTDIR$UNITS" "$DESTDIR${UNITS%/*}" 2>/dev/null || :
    [ -n "$DESTDIR" ] || rm -rf /run/agent-stopped
    if has_systemd; then
        systemctl daemon-reload
        for unit in $own; do
            systemctl reset-failed "$(of_template "$unit")" 2>/dev/null || :
        done
    fi
    [ "$command" = uninstall ] || return 0
    [ "$CHANGED" = 1 ] || say "nothing was installed"
    for path in "$ETC" "$STATE" $(instances "$STATE") "$CACHE" $(instances "$CACHE") "$ALERTS" "$SUPERVISOR" \
        /etc/systemd/system/agent.service.d /etc/systemd/system/agent@.service.d /etc/systemd/system/agent-alert@.service.d; do
        if there "$path"; then say "kept $path"; fi
    done
}

# Only the units that are the agent's: another program's of the same name runs on.
stop_units() {
    for unit in $own; do
        case "$unit" in
            agent.service | agent.path) systemctl disable --now "$unit" 2>/dev/null || : ;;
            *) systemctl stop "$(of_template "$unit")" 2>/dev/null || : ;;
        esac
    done
    for link in /etc/systemd/system/*.wants/agent@*.service /etc/systemd/system/*.wants/agent-supervisor@*.service; do
        [ -L "$link" ] || continue
        template=${link##*/}
        case " $own " in *" ${template%%@*}@.service "*) systemctl disable "${link##*/}" 2>/dev/null || : ;; esac
    done
}

of_template() { # UNIT
    case "$1" in *@.service) echo "${1%.service}*.service" ;; *) echo "$1" ;; esac
}

do_purge() {
    for link in "$DESTDIR"/etc/systemd/system/agent*.service.d/*.conf; do
        link=${link#"$DESTDIR"}
        if is_our_link "$link"; then remove "$link"; rmdir "$DESTDIR${link%/*}" 2>/dev/null || :; fi
    done
    for unit in agent.service agent@.service agent-alert@.service; do
        remove_file "/etc/systemd/system/$unit.d/$DROPIN"
        remove_file "/etc/systemd/system/$unit.d/$NO_USERNS"
        rmdir "$DESTDIR/etc/systemd/system/$unit.d" 2>/dev/null || :
        [ ! -e "$DESTDIR/etc/systemd/system/$unit.d" ] || say "kept /etc/systemd/system/$unit.d, with files of your own"
    done
    remove_ours etc "$ETC"
    for path in "$CACHE" $(instances "$CACHE"); do   # before the state, which tells whose they are
        if cache_is_ours "$path"; then remove "$path"; else remove_ours cache "$path"; fi
    done
    for path in "$STATE" $(instances "$STATE"); do
        remove_ours state "$path"
    done
    remove_ours alert "$ALERTS"
    remove_ours supervisor "$SUPERVISOR"
    if has_systemd; then systemctl daemon-reload; fi
    [ -z "$DESTDIR" ] || return 0
    case "$(getent passwd agent)" in
        *:"$GECOS":*) userdel agent && say "removed user agent" ;;
    esac
}

do_venv() {
    dir='' what=runtime
    for arg; do
        case "$arg" in
            --dev) what=dev ;;
            -*) die "venv: '$arg' is not understood (see install.sh --help)" ;;
            *) dir=$arg ;;
        esac
    done
    [ -n "$dir" ] || die "venv: which folder?"
    mktmp
    if [ -e "$dir" ] && ! "$dir/bin/python" -I -c '' 2>/dev/null; then
        # Made by an interpreter that has gone.  Clear only what is surely an environment.
        [ -f "$dir/pyvenv.cfg" ] || [ -z "$(ls -A "$dir")" ] || die "$dir exists and is no Python environment"
        rm -rf "$dir"
    fi
    if [ ! -e "$dir" ]; then
        find_python python3 python3.14 python3.13 python3.12 python3.11
        case "$dir" in /*) NEW=$dir ;; *) NEW=$PWD/$dir ;; esac   # removed again unless completed
        new_env "$dir"
    else
        PY=$dir/bin/python
    fi
    case "$dir" in /*) ;; *) dir=$PWD/$dir ;; esac
    add_packages "$dir" "$what"
    NEW=
}

# --- the program ------------------------------------------------------------

# Puts a complete release beside the running one, then flips `current`.
install_program() {
    [ -f "$SOURCE/worker/__main__.py" ] || die "$SOURCE/worker: the program is missing"
    version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$SOURCE/pyproject.toml")
    digest=$( (cd "$SOURCE" && find worker -type f ! -path '*/__pycache__/*' -exec sha256sum {} + | LC_ALL=C sort
        sha256sum <"$SOURCE/requirements.lock"
        "$PY" -I -c 'import sys; print(sys.executable, sys.version)') | sha256sum | cut -c1-10)
    release=$version-$digest
    dest=$DESTDIR$LIB/releases/$release
    if ! is_complete "$dest"; then
        mkdir -p "$DESTDIR$LIB/releases"
        NEW=$DESTDIR$LIB/releases/.new
        rm -rf "$NEW"
        build_release "$NEW" "$LIB/releases/$release"
        rm -rf "$dest"
        mv "$NEW" "$dest"
        NEW=
        changed "wrote $LIB/releases/$release"
    fi
    previous=$(readlink "$DESTDIR$LIB/current" || :)
    if [ "$previous" != "releases/$release" ]; then
        ln -sfn "releases/$release" "$DESTDIR$LIB/current.new"
        mv -fT "$DESTDIR$LIB/current.new" "$DESTDIR$LIB/current"
        changed "$LIB/current is now $release"
        # The previous one stays: a worker that still runs may import from it.
        for old in "$DESTDIR$LIB/releases"/*; do
            case "releases/${old##*/}" in "releases/$release" | "$previous") ;; *) rm -rf "$old" ;; esac
        done
    fi
    wrapper >"$TMP/agentctl"
    put 755 "$TMP/agentctl" "$BIN"
}

is_complete() { # DIR
    [ -x "$1/bin/python" ] && "$1/bin/python" -IB -c 'import worker, yaml, sdnotify' 2>/dev/null
}

build_release() { # DIR FINAL
    new_env "$1"
    add_packages "$1" runtime
    # They hold this folder's name, and it will have another.
    rm -f "$1"/bin/[aA]ctivate*
    sed -i '/^command = /d' "$1/pyvenv.cfg"
    site=$("$1/bin/python" -I -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    cp -R "$SOURCE/worker" "$site/worker"
    find "$site/worker" -name __pycache__ -prune -exec rm -rf {} +
    chmod -R u=rwX,go=rX "$1"
    "$1/bin/python" -I -m compileall -q -s "$1" -p "$2" "$site" || die "the program does not compile"
    is_complete "$1" || die "the new program does not start: $("$1/bin/python" -IB -c 'import worker, yaml, sdnotify' 2>&1 | tail -n 1)"
}

wrapper() {
    cat <<EOF
#!/bin/sh
# Written by install.sh.  The release is looked up once, so that an upgrade
# meanwhile never mixes two of them.
release=\$(cd -P $LIB/current 2>/dev/null && pwd) || release=/nonexistent
if [ ! -x "\$release/bin/python" ]; then
    echo "agentctl: the Python it was installed with is gone (upgraded?); run 'make install' again, state is kept" >&2
    exit 78
fi
# -I: neither the caller's environment nor a step's ~/.local may change what is imported.
# Not -m: that costs a step's beat 7 ms more.
exec "\$release/bin/python" -I -c "import sys; from worker.__main__ import main; sys.exit(main())" "\$@"
EOF
}

# --- Python packages --------------------------------------------------------

# find_python CANDIDATE... -- set PY to the first that is new enough, as a real
# path with its version: when an upgrade replaces it, that shows as a dangling
# link instead of as another version with none of our packages.
find_python() {
    [ -z "${PYTHON-}" ] || set -- "$PYTHON"
    for candidate; do
        PY=$("$candidate" -I -c 'import os, sys
if sys.version_info < (3, 11): sys.exit(1)
print(os.path.realpath(sys.executable))' 2>/dev/null) && return 0
    done
    die "needs Python 3.11 or newer; $1 is $("$1" --version 2>&1 | head -n 1).  PYTHON=/path/to/python3 names another"
}

new_env() { # DIR
    "$PY" -I -m venv --system-site-packages --without-pip "$1" >&2 ||
        die "$PY cannot make an environment; on Debian and Ubuntu: apt-get install python3-venv"
}

# add_packages ENV runtime|dev -- from the distribution when it has them, else
# the locked ones.
add_packages() {
    if [ "$2" = dev ]; then
        pip_install "$1" runtime
        pip_install "$1" http
        pip_install "$1" postgres
        pip_install "$1" development
    elif ! "$1/bin/python" -I -c 'import yaml, sdnotify' 2>/dev/null; then
        pip_install "$1" runtime
    fi
    "$1/bin/python" -I -c 'import systemd.journal' 2>/dev/null || add_journal "$1"
    has_http "$1" || add_http "$1"
    has_postgres "$1" || add_postgres "$1"
}

pip_install() { # ENV SECTION
    get_pip
    say "fetching Python packages ($2)"
    if [ "$2" = runtime ] && [ ! -d "$TMP/build" ]; then
        run_pip "$1" build --only-binary :all: --target "$TMP/build"
    fi
    run_pip "$1" "$2" --no-build-isolation --use-pep517
}

run_pip() { # ENV SECTION OPTION...
    env=$1 section=$2
    shift 2
    awk -v want="# == $section ==" '/^# == /{keep = ($0 == want)} keep' "$SOURCE/requirements.lock" >"$TMP/$section.txt"
    (cd "$TMP" && PYTHONPATH=$TMP/pip:$TMP/build PIP_USER=0 PIP_REQUIRE_VIRTUALENV=0 \
        "$env/bin/python" -P -m pip install --quiet --disable-pip-version-check --no-input --retries 2 \
        --no-cache-dir --no-deps --require-hashes "$@" -r "$section.txt" >&2) ||
        die "the Python packages could not be fetched (see above).  On Debian and Ubuntu these will do to run it:
    apt-get install python3-yaml python3-sdnotify"
}

# A pip to run once, out of a temporary folder: the distribution's own may be
# missing, and what is installed keeps none.
get_pip() {
    [ ! -d "$TMP/pip" ] || return 0
    wheel=$("$PY" -I -c 'import glob, os, sysconfig
bundled = os.path.join(sysconfig.get_path("stdlib"), "ensurepip", "_bundled")
folders = [sysconfig.get_config_var("WHEEL_PKG_DIR"), bundled, "/usr/share/python-wheels"]
print(next((w for f in folders if f for w in sorted(glob.glob(f + "/pip-*.whl"))), ""))')
    if [ -z "$wheel" ] && fetch_deb python3-pip-whl; then
        wheel=$(find "$TMP/deb" -name 'pip-*.whl')
    fi
    [ -n "$wheel" ] || die "no pip here and none to be had.  On Debian and Ubuntu one of these mends it:
    apt-get install python3-yaml python3-sdnotify     (to run it)
    apt-get install python3-venv                      (to develop it)"
    "$PY" -I -m zipfile -e "$wheel" "$TMP/pip"
}

# The journal's library has no wheel, and a compiler is not asked for: take the
# distribution's build, for this environment only.
add_journal() { # ENV
    site=$("$1/bin/python" -I -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    if fetch_deb python3-systemd && cp -R "$TMP/deb/usr/lib/python3/dist-packages/systemd" "$site/systemd"; then
        "$1/bin/python" -I -c 'import systemd.journal' 2>/dev/null && return 0
        rm -rf "$site/systemd"
    fi
    say "going on without python3-systemd: journal entries will lack their fields (install it, and it is used)"
}

has_http() { # ENV
    "$1/bin/python" -I -c 'import httpx2' 2>/dev/null || "$1/bin/python" -I -c 'import httpx' 2>/dev/null
}

has_postgres() { # ENV
    "$1/bin/python" -I -c 'import psycopg' 2>/dev/null
}

# Only `http:` steps need it, so a machine without a network is installed all the same.
add_http() { # ENV
    try_packages "$1" http
    has_http "$1" ||
        say "going on without httpx2: 'http:' steps will fail (install python3-httpx, and it is used)"
}

# Only a ledger that machines share needs it.
add_postgres() { # ENV
    try_packages "$1" postgres
    has_postgres "$1" ||
        say "going on without psycopg: 'ledger: postgresql://' will fail (install python3-psycopg, and it is used)"
}

# Where one section could not be fetched the next one is not waited for.
try_packages() { # ENV SECTION
    [ -z "$OFFLINE" ] || return 0
    say "fetching Python packages ($2)"
    (get_pip && run_pip "$1" "$2" --only-binary :all: --no-compile --retries 0 --timeout 10) >/dev/null 2>&1 || OFFLINE=1
}

# fetch_deb PACKAGE -- unpack one below $TMP/deb, as any user, without installing
# it.  The machine's package lists may be missing or old: then with lists of our own.
fetch_deb() {
    command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || return 1
    mkdir -p "$TMP/apt/lists/partial" "$TMP/apt/archives/partial" "$TMP/apt/$1"
    if [ -n "${OWN_LISTS-}" ] || ! (cd "$TMP/apt/$1" && apt -o Acquire::Retries=1 download "$1"); then
        OWN_LISTS=1
        [ -e "$TMP/apt/updated" ] || { apt -o "Dir::State::lists=$TMP/apt/lists" update && : >"$TMP/apt/updated"; } || return 1
        (cd "$TMP/apt/$1" && apt -o "Dir::State::lists=$TMP/apt/lists" download "$1") || return 1
    fi
    dpkg-deb -x "$TMP/apt/$1"/*.deb "$TMP/deb"
}

apt() {
    apt-get -qq -o APT::Sandbox::User=root -o "Dir::Cache=$TMP/apt" -o Acquire::http::Timeout=20 "$@" >/dev/null 2>&1
}

# --- user, configuration, units ---------------------------------------------

check_user() { # NAME
    [ -z "$DESTDIR" ] && [ "$1" != agent ] || return 0
    id "$1" >/dev/null 2>&1 || die "--user $1: there is no such user"
}

make_user() {
    [ -z "$DESTDIR" ] && ! id agent >/dev/null 2>&1 || return 0
    command -v useradd >/dev/null ||
        die "there is no user 'agent' and no useradd to make it: make it, then run:  sudo make install USER=agent"
    shell=$(command -v nologin || echo /usr/sbin/nologin)
    # An existing group of that name is used rather than refused.
    if getent group agent >/dev/null; then with='--gid agent'; else with=--user-group; fi
    # shellcheck disable=SC2086 # two words on purpose
    useradd --system $with --home-dir $STATE --no-create-home --shell "$shell" --comment "$GECOS" agent
    changed "made user agent"
}

group_of() { # NAME
    id -gn "$1" 2>/dev/null || echo "$1"
}

install_config() {
    whose=$(folder_state etc "$ETC")
    folder 750 "$ETC"
    case "$whose" in absent | empty | ours) mark 640 "$ETC" ;; esac
    folder 750 "$ETC/config.d"
    folder 750 "$ETC/supervisor"
    if [ ! -e "$DESTDIR$ETC/config.yaml" ]; then
        put 640 "$SOURCE/config.example.yaml" "$ETC/config.yaml"
    fi
    [ -z "$DESTDIR" ] || return 0
    # The worker reads its configuration, and does not write it.
    watched=''
    if [ "$(stat -c %G $ETC/config.d)" != "$group" ] && has_systemd && systemctl --quiet is-active agent.path; then
        watched=1
        systemctl stop agent.path   # or it would take this for new work
    fi
    for path in $ETC $ETC/config.d $ETC/config.yaml; do
        [ "$(stat -c %G "$path")" = "$group" ] && continue
        chgrp "$group" "$path"
        CHANGED=1
        [ "$first" = 1 ] || say "$path is now readable by group $group"
    done
    [ -z "$watched" ] || systemctl start agent.path
}

# add_workdir PATH -- one a line.  What a unit file cannot hold is refused here.
add_workdir() {
    case "$1" in
        *[\"\'\\:]* | *[[:cntrl:]]*) die "--workdir '$1': quotes, colons, backslashes and control characters cannot stand in a unit file; rename the folder" ;;
        /*) ;;
        *) die "--workdir '$1': must be an absolute path" ;;
    esac
    path=$1
    if [ -z "$DESTDIR" ]; then
        path=$(cd -P "$1" 2>/dev/null && pwd) || die "--workdir '$1': there is no such folder"
        case "$path" in *[\"\'\\:]* | *[[:cntrl:]]*) die "--workdir '$1': leads to '$path', which cannot stand in a unit file" ;; esac
    fi
    case "$path" in / | /home | /root | /run | /tmp | /var | /usr | /etc) die "--workdir '$1': too much to open; name one folder of the user's" ;; esac
    workdirs="$workdirs$path
"
}

# keep_workdirs USER -- what an earlier installation opened for the same user stays open.
keep_workdirs() {
    [ -n "$workdirs" ] && [ -f "$dropin" ] && grep -qx "User=$1" "$dropin" || return 0
    sed -n 's/^ReadWritePaths="\(.*\)"$/\1/p' "$dropin" | sed 's/%%/%/g' >"$TMP/kept"
    while IFS= read -r path; do
        case "
$workdirs" in *"
$path
"*) continue ;; esac
        [ ! -d "$DESTDIR$path" ] || workdirs="$workdirs$path
"
    done <"$TMP/kept"
}

check_workdirs() { # USER
    [ -n "$workdirs" ] && [ -z "$DESTDIR" ] || return 0
    printf %s "$workdirs" | while IFS= read -r path; do
        owner=$(stat -c %U "$path")
        [ "$owner" = "$1" ] || die "--workdir '$path' belongs to $owner, not to $1: add --user $owner (or chown it)"
    done
}

# A folder within another one is open with it.  By itself it would be a door: a step may move the folders above it away
# and put a link there, which systemd would follow at the next start.
drop_nested() {
    all=$workdirs workdirs=''
    while IFS= read -r path; do
        nested=''
        while IFS= read -r outer; do
            case "$path" in "${outer:-/none}"/*) nested=1 ;; esac
        done <<EOF
$all
EOF
        [ -z "$path" ] || [ -n "$nested" ] || workdirs="$workdirs$path
"
    done <<EOF
$all
EOF
}

install_dropin() { # USER
    dropin "$1" >"$TMP/$DROPIN"
    if [ -z "$workdirs" ] && [ -f "$dropin" ] && grep -qx "User=$1" "$dropin"; then return 0; fi
    for unit in agent.service agent@.service; do
        put 644 "$TMP/$DROPIN" "/etc/systemd/system/$unit.d/$DROPIN"
    done
}

# close_to_group USER -- where others have the user's own group, what the steps write is not for them.
close_to_group() {
    [ -f "$dropin" ] && [ -n "$(sharers "$1")" ] && ! grep -q '^StateDirectoryMode=' "$dropin" || return 0
    closed >"$TMP/lines"
    sed "/^Group=/r $TMP/lines" "$dropin" >"$TMP/closed"
    for unit in agent.service agent@.service; do
        put 644 "$TMP/closed" "/etc/systemd/system/$unit.d/$DROPIN"
    done
}

closed() {
    printf '# Others are in this group, too.\nStateDirectoryMode=0700\nRuntimeDirectoryMode=0700\n'
}

# sharers USER -- name the others who have the user's own group.
sharers() {
    [ -z "$DESTDIR" ] && gid=$(id -g "$1" 2>/dev/null) || return 0
    { getent group "$gid" | cut -d: -f4 | tr , '\n'
        getent passwd | awk -F: -v gid="$gid" '$4 == gid { print $1 }'
    } | grep -vx -e "$1" -e '' | sort -u | head -n 5 | paste -sd, -
}

# name_groups USER -- say what the steps may do beyond what the user's own group lets them.
name_groups() {
    [ -z "$DESTDIR" ] || return 0
    strong='' logs='' what=''
    for member in $(id -Gn "$1" 2>/dev/null); do
        case "$member" in
            root | docker | podman | lxd | incus | incus-admin | libvirt | disk | kmem | shadow | sudo | wheel | admin)
                strong="$strong${strong:+, }$member" ;;
            adm | systemd-journal) logs="$logs${logs:+, }$member" ;;
        esac
    done
    [ -z "$strong" ] || what="$strong (who is in there can become root)"
    [ -z "$logs" ] || what="$what${what:+, }$logs (reads all logs)"
    [ -z "$what" ] || say "careful: $1 is in $what, and so are the steps; better a user who is not: make install USER=name"
    others=$(sharers "$1")
    [ -z "$others" ] ||
        say "careful: the group $(id -gn "$1") of $1 has others in it ($others), who can read the task list in $ETC; the state folder is closed to them"
}

# match_kernel USER -- systemd starts no unit with PrivateUsers= where there are no user namespaces (a hardened kernel,
# some containers): then ours do without, until there are.
match_kernel() {
    has_systemd && command -v systemd-run >/dev/null || return 0
    try='systemd-run --quiet --wait --collect --property=Type=oneshot'
    with=1
    $try --property="User=$1" --property=PrivateUsers=yes true 2>/dev/null || ! $try --property="User=$1" true 2>/dev/null || with=
    for unit in agent.service agent@.service agent-alert@.service; do
        path=/etc/systemd/system/$unit.d/$NO_USERNS
        if [ -n "$with" ]; then
            there "$path" || continue
            remove_file "$path"
            UNITS_CHANGED=1
        else
            printf '# Written by install.sh from what this kernel can do.\n[Service]\nPrivateUsers=no\n' >"$TMP/$NO_USERNS"
            put 644 "$TMP/$NO_USERNS" "$path"
        fi
    done
    [ -n "$with" ] || say "careful: there are no user namespaces here (user.max_user_namespaces?), so the service does without PrivateUsers=: unconfined steps can look into other processes of $1"
}

# keep_told USER -- what an earlier installation has told, and wrote down in the state folder, is not told again.
keep_told() {
    [ -z "$DESTDIR" ] && [ ! -e "$ALERTS" ] && has_systemd || return 0
    for path in "$STATE" $(instances "$STATE"); do
        # With the rights of the steps, whose folder it is.
        runuser -u "$1" -- timeout 5 head -c 65536 "$path/alerted" >"$TMP/told" 2>/dev/null || continue
        install -d -m 755 "$ALERTS"
        install -d -m 700 -o "$1" -g "$group" "$ALERTS/${path##*/}"
        install -m 600 -o "$1" -g "$group" "$TMP/told" "$ALERTS/${path##*/}/alerted"
    done
}

# Whoever tells that the agent is down has its rights, and its folders, which %i names there.
share_dropin() {
    [ -f "$dropin" ] || return 0
    sed 's#^\(Environment=HOME=%S/\)%N$#\1%i#' "$dropin" >"$TMP/shared"
    put 644 "$TMP/shared" "/etc/systemd/system/agent-alert@.service.d/$DROPIN"
}

dropin() { # USER
    printf '# Written by install.sh from --user and --workdir.  Add your own settings in another file.\n[Service]\n'
    printf 'User=%s\nGroup=%s\n' "$1" "$(group_of "$1")"
    [ -z "$(sharers "$1")" ] || closed
    home=$(getent passwd "$1" | cut -d: -f6)
    case "
$workdirs" in
        *"
$home
"*) ;;
        *) printf '# The real one is closed to the steps, and many programs need one they can write.\nEnvironment=HOME=%%S/%%N\n' ;;
    esac
    [ -n "$workdirs" ] || return 0
    printf '# What the steps write there is somebody'"'"'s work, with the usual rights.\nUMask=0022\n'
    case "
$workdirs" in
        *"
/home/"* | *"
/root/"* | *"
/run/user/"*)
            echo '# Empty folders in place of everybody'"'"'s files, but for the ones named here.'
            echo '# Not ProtectHome=tmpfs: those may be written to, and what is written is lost.'
            echo 'ProtectHome=no'
            echo 'TemporaryFileSystem=/home:ro,mode=0755 /root:ro,mode=0755 /run/user:ro,mode=0755' ;;
    esac
    printf %s "$workdirs" | while IFS= read -r path; do
        quoted=\"$(printf %s "$path" | sed 's/%/%%/g')\"
        case "$path" in
            /home/* | /root/* | /run/user/* | /tmp/* | /var/tmp/*) printf 'BindPaths=%s\n' "$quoted" ;;
        esac
        printf 'ReadWritePaths=%s\n' "$quoted"
    done
}

# One file serves both names.  Not as a link in the folder: systemd rejects a
# template that is a link to a plain unit.
unit_source() { # UNIT
    case "$1" in agent@.service) set -- agent.service ;; esac
    echo "$SOURCE/units/$1"
}

# Before anything is touched, and so with a program that is surely there.
verify_units() {
    command -v systemd-analyze >/dev/null || return 0
    lenient=''
    if systemd-analyze --help | grep -q -- --recursive-errors; then lenient=--recursive-errors=no; fi
    mkdir "$TMP/units"
    for unit in $UNIT_FILES; do
        sed "s#$BIN#/bin/sh#" "$(unit_source "$unit")" >"$TMP/units/$unit"
    done
    # shellcheck disable=SC2086 # nothing, or one word
    systemd-analyze verify --man=no $lenient "$TMP/units"/* >&2 ||
        die "systemd does not accept the units (see above); nothing was changed"
}

activate() { # USER
    [ -z "$DESTDIR" ] || return 0
    if ! has_systemd; then
        [ -d $STATE ] || { install -d -m 750 $STATE && changed "made $STATE" && mark 640 $STATE && chown "$1:$group" $STATE; }
        say "systemd does not run here; in the foreground:
    runuser -u $1 -- agentctl run $ETC/config.yaml --state $STATE"
        return 0
    fi
    [ "$UNITS_CHANGED" = 0 ] || systemctl daemon-reload
    if [ "$first" = 1 ]; then
        for unit in agent.service agent.path; do
            if [ "$(systemctl is-enabled $unit 2>/dev/null)" = masked ]; then
                say "$unit is masked; left so"
            else
                systemctl --quiet enable $unit
                say "enabled $unit"
            fi
        done
        systemctl start agent.path 2>/dev/null || :
        say "edit $ETC/config.yaml, then:  systemctl start agent;  journalctl -fu agent"
    elif [ "$CHANGED" = 1 ]; then
        systemctl try-restart agent.path agent.service 'agent@*.service' 'agent-supervisor@*.service'
        say "restarted what was running"
    fi
}

relabel() { # only matters under SELinux
    [ -z "$DESTDIR" ] && command -v restorecon >/dev/null || return 0
    restorecon -RF $LIB $BIN $UNITS $ETC 2>/dev/null || :
}

# --- helpers ----------------------------------------------------------------

# put MODE SOURCE DEST -- replace DEST in one step, and only if it would differ.
put() {
    target=$DESTDIR$3
    if cmp -s "$2" "$target" && [ "$(stat -c %a "$target")" = "$1" ]; then
        return 0
    fi
    mkdir -p "${target%/*}"
    install -m "$1" "$2" "$target.new"
    mv -f "$target.new" "$target"
    changed "wrote $3"
    case "$3" in */systemd/system/*) UNITS_CHANGED=1 ;; esac
}

# mark MODE FOLDER -- from here on the folder is the agent's, with all that is in it.
mark() {
    echo "The agent's: 'make purge' removes this folder, with all that is in it." >"$TMP/mark"
    put "$1" "$TMP/mark" "$2/$MARK"
}

folder() { # MODE PATH
    [ ! -d "$DESTDIR$2" ] || return 0
    mkdir -p "$DESTDIR${2%/*}"
    mkdir -m "$1" "$DESTDIR$2"
    changed "made $2"
}

remove() { # PATH
    [ -e "$DESTDIR$1" ] || [ -L "$DESTDIR$1" ] || return 0
    rm -rf "$DESTDIR${1:?}"
    changed "removed $1"
}

has_systemd() {
    [ -z "$DESTDIR" ] && [ -d /run/systemd/system ]
}

need_root() { # COMMAND
    [ -n "$DESTDIR" ] || [ "$(id -u)" = 0 ] ||
        die "$1 changes the system and needs root: sudo make $1   (nothing was changed)"
}

mktmp() {
    TMP=$(mktemp -d)
}

cleanup() {
    [ -z "$TMP" ] || rm -rf "$TMP"
    [ -z "$NEW" ] || rm -rf "$NEW"
    rmdir "$DESTDIR$LIB/releases" "$DESTDIR$LIB" 2>/dev/null || :   # only if empty
}

changed() {
    CHANGED=1
    say "$1"
}

say() {
    printf '%s\n' "$1"
}

die() {
    printf 'install.sh: %s\n' "$1" >&2
    exit 1
}

main "$@"
