#!/bin/sh
# Makes a folder with Debian's Python for arm64 and what it needs, for qemu's user mode:
#   tools/arm64_root.sh FOLDER
# Nothing of the system is changed. The packages are those of this machine's own Debian release.
set -eu

[ $# -eq 1 ] || { echo 'usage: arm64_root.sh FOLDER' >&2; exit 2; }
mkdir -p "$1/apt/lists/partial" "$1/apt/archives/partial" "$1/root"
folder=$(cd "$1" && pwd)
cd "$folder/apt"

arm64_apt() {
  apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures::=arm64 -o APT::Sandbox::User=root \
    -o Dir::State="$folder/apt" -o Dir::State::lists="$folder/apt/lists" \
    -o Dir::State::status=/dev/null -o Dir::Cache="$folder/apt" "$@"
}

python=$(apt-cache depends python3-minimal | sed -n 's/.*Depends: \(python3\.[0-9]*\)-minimal.*/\1/p')
arm64_apt update
arm64_apt download "$python-minimal" "lib$python-minimal" "lib$python-stdlib" \
  libc6 libgcc-s1 libstdc++6 libatomic1 zlib1g libexpat1 libffi8 liblzma5 libbz2-1.0 libuuid1
for package in ./*.deb; do
  dpkg -x "$package" "$folder/root"
done
ln -sf "$python" "$folder/root/usr/bin/python3"
rm -rf "$folder/apt"
echo "$folder/root"
