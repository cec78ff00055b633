#!/bin/bash
# Make a base image like docker.io/library/python:3.13-slim where no registry of images can be reached.
#
#   base.sh NAME    e.g. localhost/python-base:3.13
#
# Debian 13 with its Python 3.13 and pip. All bytecode is deleted, as the official images delete
# theirs: a Containerfile that forgets to compile must not look fast here. Kept in the cache folder.
set -euo pipefail

NAME=$1
CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/pcie-numa-hook
TAR=$CACHE/python-base.tar
export STORAGE_DRIVER=${STORAGE_DRIVER:-vfs} BUILDAH_ISOLATION=${BUILDAH_ISOLATION:-chroot}

if buildah images --quiet "$NAME" >/dev/null 2>&1; then
    echo "base.sh: $NAME is there"
    exit
fi
mkdir -p "$CACHE"
if [ ! -s "$TAR" ]; then
    echo "base.sh: making a Debian 13 tree with Python 3.13"
    mmdebstrap --quiet --variant=apt --include=python3,python3-pip,ca-certificates \
        --aptopt='APT::Install-Recommends "false"' \
        --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
        --customize-hook='find "$1/usr/lib/python3.13" "$1/usr/lib/python3" -name "*.pyc" -delete' \
        --customize-hook='rm -f "$1/usr/lib/python3.13/EXTERNALLY-MANAGED"' \
        trixie "$CACHE/python-base.new.tar"
    mv "$CACHE/python-base.new.tar" "$TAR"
fi
echo "base.sh: committing $NAME"
container=$(buildah from scratch)
buildah add --quiet "$container" "$TAR" / >/dev/null
buildah config --env PATH=/usr/local/bin:/usr/bin:/bin "$container"
buildah commit --quiet "$container" "$NAME" >/dev/null
buildah rm "$container" >/dev/null
