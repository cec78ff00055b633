#!/bin/bash
# Build the image; what `make image` runs.
#
#   build.sh [NAME [TARGET]]    default localhost/pcie-numa-hook:dev; TARGET minimal has no shell
#
# BASE is the base image; BASE=local makes one from Debian packages (base.sh).
set -euo pipefail

cd "$(dirname "$0")/../.."
NAME=${1:-localhost/pcie-numa-hook:dev}
BASE=${BASE:-docker.io/library/python:3.13-slim}
# Neither overlay file systems nor user namespaces are everywhere; these two are.
export STORAGE_DRIVER=${STORAGE_DRIVER:-vfs} BUILDAH_ISOLATION=${BUILDAH_ISOLATION:-chroot}

arguments=()
if [ "$BASE" = local ]; then
    BASE=localhost/python-base:3.13
    tests/image/base.sh "$BASE"
    arguments+=(--pull=never)
    # This machine's way to its package index; nothing of it stays in the image.
    for path in /etc/ssl/certs /etc/pip.conf; do
        [ -e "$path" ] && arguments+=(--volume "$path:$path:ro")
    done
fi
[ -n "${2:-}" ] && arguments+=(--target "$2")
buildah build --build-arg "BASE=$BASE" "${arguments[@]}" --tag "$NAME" .
