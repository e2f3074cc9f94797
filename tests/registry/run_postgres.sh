#!/usr/bin/env bash
# Runs a command with LORAPLEX_TEST_POSTGRES_URL naming a PostgreSQL of its own, and stops that again.
# The server lives in a temporary directory, listens on a socket in it only, and runs as an unprivileged user.
# Where PostgreSQL is missing it is installed from the distribution (Debian and Ubuntu, as root).
# Usage: tests/registry/run_postgres.sh COMMAND [ARGUMENT...]
set -euo pipefail

find_tools() {
    local folder
    for folder in $(ls -d /usr/lib/postgresql/*/bin 2>/dev/null | sort -rV) "$(dirname "$(command -v initdb || echo /nowhere/x)")"; do
        if [[ -x $folder/initdb && -x $folder/pg_ctl ]]; then
            echo "$folder"
            return
        fi
    done
}

install_postgres() {
    if [[ $(id -u) -ne 0 ]] || ! command -v apt-get >/dev/null; then
        echo "PostgreSQL is not installed (initdb, pg_ctl); install it, for example: sudo apt-get install postgresql" >&2
        exit 2
    fi
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -qq --yes --no-install-recommends postgresql-common >/dev/null
    # A server that starts by itself is not wanted.
    echo "create_main_cluster = false" >>/etc/postgresql-common/createcluster.conf
    apt-get install -qq --yes --no-install-recommends postgresql >/dev/null
}

tools=$(find_tools)
if [[ -z $tools ]]; then
    install_postgres
    tools=$(find_tools)
fi

root=$(mktemp -d /tmp/loraplex-postgres.XXXXXX) # short: the path of a socket has at most 107 characters
as_user=()
if [[ $(id -u) -eq 0 ]]; then # initdb refuses root
    chown nobody "$root"
    as_user=(setpriv --reuid=nobody --regid="$(id -g nobody)" --clear-groups env HOME="$root")
fi

stop() {
    "${as_user[@]}" "$tools/pg_ctl" -D "$root/data" -m immediate -w stop >/dev/null 2>&1 || true
    rm -rf "$root"
}
trap stop EXIT

cd "$root"
"${as_user[@]}" "$tools/initdb" -D "$root/data" --username=postgres --auth=trust --encoding=UTF8 --locale=C >/dev/null
options="-c listen_addresses= -c unix_socket_directories=$root -c max_connections=200"
if ! "${as_user[@]}" "$tools/pg_ctl" -D "$root/data" -l "$root/log" -w -o "$options" start >/dev/null; then
    cat "$root/log" >&2
    exit 1
fi
cd "$OLDPWD"
"$tools/postgres" --version >&2
LORAPLEX_TEST_POSTGRES_URL="postgresql://postgres@/postgres?host=$root" "$@"
