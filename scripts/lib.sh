# shellcheck shell=sh
# What the scripts share; sourced, never run. POSIX sh. The caller has set `root` (the checkout) and `set -eu`.

say() { printf '%s\n' "$*" >&2; }
die() {
    say "cotenant: $*"
    exit 1
}

is_debian() { [ -r /etc/debian_version ] && command -v apt-get >/dev/null 2>&1; }
is_root() { [ "$(id -u)" -eq 0 ]; }

# apt_install PACKAGE...: install system packages; only for root on Debian or Ubuntu. 1 when it could not.
apt_install() {
    is_root && is_debian || return 1
    say "cotenant: installing system packages: $*"
    # A fresh machine has no package lists, and stale ones name files that are gone.
    apt-get update -qq >/dev/null 2>&1 || say "cotenant: apt-get update failed; trying with the lists that are there"
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

# new_enough PYTHON: 0 when it runs and is 3.11 or newer. (A pyenv shim of a version that is not selected does not run.)
new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

# can_venv PYTHON: 0 when it can make a virtual environment with pip in it. Debian ships that apart.
can_venv() {
    "$1" -c 'import ensurepip, venv' >/dev/null 2>&1
}

# pythons: every interpreter worth trying, one a line, best first.
pythons() {
    if [ -n "${COTENANT_PYTHON:-}" ]; then
        printf '%s\n' "$COTENANT_PYTHON"
        return
    fi
    for name in python3 python3.13 python3.12 python3.11 python3.14; do
        # Every place on PATH, not only the first: the first may be a shim that does not run.
        oldifs=$IFS
        IFS=:
        for dir in $PATH; do
            if [ -x "$dir/$name" ]; then printf '%s\n' "$dir/$name"; fi
        done
        IFS=$oldifs
    done
    for python in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.*/bin/python3 /usr/local/bin/python3.* /opt/python*/bin/python3; do
        case $python in
        *-config) ;;
        *) if [ -x "$python" ]; then printf '%s\n' "$python"; fi ;;
        esac
    done
}

# find_python: print the first interpreter of at least 3.11 that can make a virtual environment.
# Call it as $(find_python): a failure then ends the subshell, and `set -e` the caller.
find_python() {
    without_venv=
    candidates=$(pythons)
    IFS='
' # one path a line; runs in a subshell, so nobody else sees it
    for python in $candidates; do
        new_enough "$python" || continue
        if can_venv "$python"; then
            printf '%s\n' "$python"
            return
        fi
        [ -n "$without_venv" ] || without_venv=$python
    done
    if [ -z "$without_venv" ]; then
        if [ -n "${COTENANT_PYTHON:-}" ]; then
            die "COTENANT_PYTHON=$COTENANT_PYTHON does not run or is older than Python 3.11."
        fi
        die "no Python 3.11 or newer was found on PATH or under ~/.pyenv. Install one (Debian, Ubuntu: apt-get install" \
            "python3 python3-venv) or name it: COTENANT_PYTHON=/path/to/python3 scripts/setup"
    fi
    version=$("$without_venv" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    if apt_install "python$version-venv" && can_venv "$without_venv"; then
        printf '%s\n' "$without_venv"
        return
    fi
    if apt_install python3-venv && can_venv "$without_venv"; then
        printf '%s\n' "$without_venv"
        return
    fi
    die "$without_venv (Python $version) cannot make virtual environments: its venv module is not installed. On Debian and" \
        "Ubuntu: sudo apt-get install python$version-venv. Then run this again."
}
