#!/bin/bash
# Install what the system tests need: two generations of libvirt, QEMU and guest firmware.
#
#   install.sh debian12   the packages of this machine, where it is Debian 12
#   install.sh debian13   a Debian 13 tree below the cache folder, which the tests enter by chroot
#   install.sh boot       a Linux kernel for test guests, and what builds their init
#   install.sh boot-arm64  the same for aarch64 guests
#   install.sh all        all of these
#   install.sh systemd    a stock Debian 12 with systemd as an initramfs, for test guests
#   install.sh containers  what builds and runs the image: buildah, podman, runc
#
# Does nothing that is done already, and says what it does.  Without root it only says what is
# missing: the tests that would need it are skipped then.  Starts no service.
set -euo pipefail

# python3-libvirt is for the system's Python, which runs oracle_child.py; swtpm-tools because
# libvirt offers no TPM with swtpm alone.
DEBIAN12_PACKAGES=(
    libvirt-daemon-driver-qemu python3-libvirt
    qemu-system-x86 ovmf seabios swtpm swtpm-tools
    qemu-system-arm qemu-efi-aarch64
    mount # the tests enter the Debian 13 tree by mounts of their own; a small Debian has none
)
BOOT_PACKAGES=(gcc libc6-dev cpio)
ARM64_PACKAGES=(gcc-aarch64-linux-gnu libc6-dev-arm64-cross cpio)
ARM64_KERNEL_PACKAGE=linux-image-cloud-arm64
# A metapackage: it depends on the one kernel that is current. NUMA and PCIe are built in, so no
# module is needed.
KERNEL_PACKAGE=linux-image-cloud-amd64
# The smallest tree in which libvirt defines a domain and QEMU starts: no apt, no virsh, no manuals.
DEBIAN13_SUITE=trixie
DEBIAN13_PACKAGES=qemu-system-x86,libvirt-daemon-driver-qemu,python3-libvirt,ovmf
DEBIAN13_PACKAGES+=,swtpm,swtpm-tools,qemu-system-arm,qemu-efi-aarch64
DEBIAN13_RECIPE=(
    --variant=essential
    --include="$DEBIAN13_PACKAGES"
    --aptopt='APT::Install-Recommends "false"'
    --dpkgopt='path-exclude=/usr/share/doc/*'
    --dpkgopt='path-exclude=/usr/share/locale/*'
    --dpkgopt='path-exclude=/usr/share/man/*'
    "$DEBIAN13_SUITE"
)

# A guest that has nothing but systemd. Its only module is the one that shows QEMU's fw_cfg.
SYSTEMD_RECIPE=(
    --variant=minbase
    --include=systemd,systemd-sysv,udev,kmod
    --aptopt='APT::Install-Recommends "false"'
    --dpkgopt='path-exclude=/usr/share/doc/*'
    --dpkgopt='path-exclude=/usr/share/locale/*'
    --dpkgopt='path-exclude=/usr/share/man/*'
    bookworm
)
SYSTEMD_MODULE=kernel/drivers/firmware/qemu_fw_cfg.ko

CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/pcie-numa-hook
TREE=$CACHE/debian13
# oracle.py asks for this file: a tree without it is not whole.
STAMP=.pcie-numa-hook-recipe

say() { echo "install.sh: $*"; }

is_root() { [ "$(id -u)" -eq 0 ]; }

is_debian12() { grep -qs '^VERSION_ID="12"' /etc/os-release; }

# Print those of the packages that are not installed.
missing_packages() {
    local package
    for package in "$@"; do
        dpkg-query -W -f '${Status}\n' "$package" 2>/dev/null | grep -q '^install ok installed$' ||
            echo "$package"
    done
}

install_packages() {
    local missing
    mapfile -t missing < <(missing_packages "$@")
    if [ ${#missing[@]} -eq 0 ]; then
        say "packages are there: $*"
        return
    fi
    say "installing packages: ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends "${missing[@]}"
}

# libvirt's driver refuses to start without this user, whichever one runs QEMU.  Debian 12 makes it
# in libvirt-daemon-system, which would bring systemd and a firewall with it.
make_libvirt_user() {
    if getent passwd libvirt-qemu >/dev/null; then
        say "user libvirt-qemu is there"
        return
    fi
    say "making the user libvirt-qemu"
    useradd --system --user-group --home-dir /var/lib/libvirt --no-create-home \
        --shell /usr/sbin/nologin libvirt-qemu
}

debian12() {
    if ! is_debian12; then
        say "debian12: this machine is not Debian 12; its tests are skipped"
        return
    fi
    if ! is_root; then
        local missing
        missing=$(missing_packages "${DEBIAN12_PACKAGES[@]}" | tr '\n' ' ')
        say "debian12: not root, installing nothing; missing packages: ${missing:-none}"
        return
    fi
    install_packages "${DEBIAN12_PACKAGES[@]}"
    make_libvirt_user
}

debian13() {
    local recipe new old
    recipe=$(printf '%s\n' "${DEBIAN13_RECIPE[@]}" | sha256sum | cut -d ' ' -f 1)
    if [ "$(cat "$TREE/$STAMP" 2>/dev/null)" = "$recipe" ]; then
        say "debian13: the tree is there: $TREE"
        return
    fi
    if ! is_root; then
        say "debian13: not root, building nothing; missing: $TREE"
        return
    fi
    install_packages mmdebstrap

    mkdir -p "$CACHE"
    # One build at a time: whoever waited finds the other one's tree.  mmdebstrap inherits the lock,
    # and so holds it also when it outlives this script.
    exec 9>"$TREE.lock"
    flock 9
    if [ "$(cat "$TREE/$STAMP" 2>/dev/null)" = "$recipe" ]; then
        say "debian13: the tree was built meanwhile: $TREE"
        return
    fi
    # What an interrupted build left.
    rm -rf --one-file-system "$TREE".new.* "$TREE".old.*
    new=$TREE.new.$$ old=$TREE.old.$$
    say "debian13: building $TREE (half a minute to two, 730 MB)"
    mmdebstrap --quiet "${DEBIAN13_RECIPE[@]}" "$new"
    echo "$recipe" >"$new/$STAMP"
    if [ -e "$TREE" ]; then
        mv "$TREE" "$old"
    fi
    mv "$new" "$TREE"
    rm -rf --one-file-system "$old"
    say "debian13: built $TREE"
}

# Print the kernel package that is current.
kernel_package() {
    apt-cache depends "$KERNEL_PACKAGE" 2>/dev/null | sed -n 's/.*Depends: \(linux-image-[^ ]*\)$/\1/p' | head -n 1
}

# Unpack the current kernel package into a folder, and print the package's name.
unpack_kernel() {
    local folder=$1 package
    package=$(kernel_package)
    if [ -z "$package" ]; then
        apt-get update -qq
        package=$(kernel_package)
    fi
    if [ -z "$package" ]; then
        return 1
    fi
    # As root: the folder may be below one that apt's own user cannot enter.
    fetch() { (cd "$folder" && apt-get download -qq -o APT::Sandbox::User=root "$package"); }
    # What apt knows of the archive may be older than the archive.
    fetch >&2 || { apt-get update -qq >&2 && fetch >&2; }
    dpkg -x "$folder"/*.deb "$folder"
    echo "$package"
}

boot() {
    local kernel=$CACHE/boot/vmlinuz folder package
    if ! is_root; then
        say "boot: not root, installing nothing; kernel: $(ls "$kernel" 2>/dev/null || echo missing)"
        return
    fi
    install_packages "${BOOT_PACKAGES[@]}"
    if [ -e "$kernel" ]; then
        say "boot: the kernel is there: $kernel"
        return
    fi
    say "boot: fetching a kernel (27 MB)"
    mkdir -p "$CACHE/boot"
    folder=$(mktemp -d "$CACHE/boot/kernel.XXXXXX")
    if package=$(unpack_kernel "$folder"); then
        mv "$folder"/boot/vmlinuz-* "$kernel"
        say "boot: fetched $kernel of $package"
    else
        say "boot: no package $KERNEL_PACKAGE here; boot tests are skipped"
    fi
    rm -rf "$folder"
}

systemd_guest() {
    local guest=$CACHE/boot/systemd recipe folder package version tree
    recipe=$(printf '%s\n' "${SYSTEMD_RECIPE[@]}" "$SYSTEMD_MODULE" | sha256sum | cut -d ' ' -f 1)
    if [ "$(cat "$guest/$STAMP" 2>/dev/null)" = "$recipe" ]; then
        say "systemd: the guest is there: $guest"
        return
    fi
    if ! is_root; then
        say "systemd: not root, building nothing; missing: $guest"
        return
    fi
    install_packages mmdebstrap cpio gzip kmod
    mkdir -p "$CACHE/boot"
    # One build at a time, as for the tree of Debian 13.
    exec 8>"$guest.lock"
    flock 8
    if [ "$(cat "$guest/$STAMP" 2>/dev/null)" = "$recipe" ]; then
        say "systemd: the guest was built meanwhile: $guest"
        return
    fi
    rm -rf --one-file-system "$guest".new.* "$guest"
    folder=$(mktemp -d "$guest.new.XXXXXX")
    say "systemd: building $guest (half a minute to two, 90 MB)"
    mkdir "$folder/kernel"
    if ! package=$(unpack_kernel "$folder/kernel"); then
        say "systemd: no package $KERNEL_PACKAGE here; its tests are skipped"
        rm -rf "$folder"
        return
    fi
    version=$(basename "$folder"/kernel/lib/modules/*)
    tree=$folder/tree
    mmdebstrap --quiet "${SYSTEMD_RECIPE[@]}" "$tree"
    rm -rf --one-file-system "$tree"/var/lib/apt/lists "$tree"/var/cache
    install -D -m 644 -t "$tree/lib/modules/$version/$(dirname "$SYSTEMD_MODULE")" \
        "$folder/kernel/lib/modules/$version/$SYSTEMD_MODULE"
    cp "$folder/kernel/lib/modules/$version"/modules.{order,builtin,builtin.modinfo} "$tree/lib/modules/$version"
    depmod -b "$tree" "$version"
    (cd "$tree" && find . -xdev | cpio --create --format=newc --quiet | gzip -1) >"$folder/initrd"
    mv "$folder"/kernel/boot/vmlinuz-* "$folder/vmlinuz"
    rm -rf --one-file-system "$folder/kernel" "$tree"
    echo "$recipe" >"$folder/$STAMP"
    chmod 755 "$folder"
    mv "$folder" "$guest"
    say "systemd: built $guest with $package"
}

# apt with a state of its own that knows arm64 alone: this machine's list of architectures stays as it is.
apt_arm64() {
    local folder=$1 program=$2
    shift 2
    mkdir -p "$folder/state/lists/partial" "$folder/cache/archives/partial"
    touch "$folder/state/status"
    "$program" -qq -o APT::Architecture=arm64 -o APT::Architectures::=arm64 -o APT::Sandbox::User=root \
        -o Dir::State="$folder/state" -o Dir::State::status="$folder/state/status" -o Dir::Cache="$folder/cache" "$@"
}

boot_arm64() {
    local kernel=$CACHE/boot/vmlinuz-arm64 folder package
    if ! is_root; then
        say "boot-arm64: not root, installing nothing; kernel: $(ls "$kernel" 2>/dev/null || echo missing)"
        return
    fi
    install_packages "${ARM64_PACKAGES[@]}"
    if [ -e "$kernel" ]; then
        say "boot-arm64: the kernel is there: $kernel"
        return
    fi
    mkdir -p "$CACHE/boot"
    folder=$(mktemp -d "$CACHE/boot/kernel.XXXXXX")
    apt_arm64 "$folder" apt-get update
    package=$(apt_arm64 "$folder" apt-cache depends "$ARM64_KERNEL_PACKAGE" |
        sed -n 's/.*Depends: \(linux-image-[^ ]*\)$/\1/p' | head -n 1)
    if [ -z "$package" ]; then
        say "boot-arm64: no package $ARM64_KERNEL_PACKAGE here; its boot tests are skipped"
        rm -rf "$folder"
        return
    fi
    say "boot-arm64: fetching the kernel of $package (28 MB)"
    (cd "$folder" && apt_arm64 "$folder" apt-get download "$package" && dpkg -x ./*.deb .)
    mv "$folder"/boot/vmlinuz-* "$kernel"
    rm -rf "$folder"
    say "boot-arm64: fetched $kernel"
}

containers() {
    if ! is_root; then
        say "containers: needs root"
        return
    fi
    install_packages buildah podman runc mmdebstrap
}

case "${1:-}" in
    debian12) debian12 ;;
    debian13) debian13 ;;
    boot) boot ;;
    boot-arm64) boot_arm64 ;;
    systemd) systemd_guest ;;
    containers) containers ;;
    all)
        debian12
        debian13
        boot
        boot_arm64
        ;;
    *)
        say "usage: install.sh debian12 | debian13 | boot | boot-arm64 | systemd | containers | all" >&2
        exit 2
        ;;
esac
