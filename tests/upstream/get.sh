#!/usr/bin/env bash
# Fetch PyTorch's own FSDP tests, of torch 2.6, into a cache folder outside of this tree; print the folder's path.
# usage: get.sh [FOLDER]   (else $UPSTREAM_TESTS, else flatparam/torch-2.6-tests in the user's cache)
# They come from Debian's source package (27 MB), by the machine's apt configuration: its mirror, its proxies. Elsewhere
# than on Debian, let UPSTREAM_TESTS name a folder with torch 2.6's test/distributed/fsdp in it: nothing is fetched then.
set -euo pipefail

PACKAGE=pytorch VERSION=2.6.0+dfsg SUITE=trixie
SHA256=099a9601bc40d67656e75735c44abedb0fbe92d08817852ab7472eebb7e6ddff
KEYRING=/usr/share/keyrings/debian-archive-keyring.gpg

to=${1:-${UPSTREAM_TESTS:-${XDG_CACHE_HOME:-$HOME/.cache}/flatparam/torch-2.6-tests}}
if [ -f "$to/test/distributed/fsdp/test_fsdp_core.py" ]; then
    echo "$to"
    exit 0
fi

fail() {
    echo "get.sh: $1" >&2
    echo "get.sh: or let UPSTREAM_TESTS name a folder that has torch 2.6's test/distributed/fsdp" >&2
    exit 1
}

command -v apt-get >/dev/null || fail "expected apt-get, to fetch Debian's source package $PACKAGE"
[ -f "$KEYRING" ] || fail "expected $KEYRING: apt-get install debian-archive-keyring"
mirror=$(apt-get indextargets --format '$(SITE)' | grep -v security | sort | uniq -c | sort -rn | sed -n '1s/^ *[0-9]* //p')
[ -n "$mirror" ] || fail "apt's configuration names no mirror"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/tests"
echo "deb-src [signed-by=$KEYRING] $mirror $SUITE main" >"$work/sources.list"
apt=(apt-get -qq -o "Dir::Etc::sourcelist=$work/sources.list" -o Dir::Etc::sourceparts=/dev/null
    -o "Dir::State::lists=$work/lists" -o "Dir::Cache=$work/cache" -o "APT::Sandbox::User=$(id -un)")
(cd "$work" && "${apt[@]}" update && "${apt[@]}" source --download-only "$PACKAGE=$VERSION-7") >&2 ||
    fail "could not fetch $PACKAGE $VERSION of $SUITE from apt's mirror"
echo "$SHA256  $work/${PACKAGE}_$VERSION.orig.tar.xz" | sha256sum --check --quiet >&2 ||
    fail "the source package is not the one that was expected"
tar -xJf "$work/${PACKAGE}_$VERSION.orig.tar.xz" -C "$work/tests" --strip-components=1 --wildcards '*/test/distributed/fsdp'
mkdir -p "$to"
cp -R "$work/tests/." "$to"
echo "$to"
