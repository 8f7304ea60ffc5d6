# SHA-256 of files with what a device has: sourced by common.sh, and put by the host before commands
# of its own, which check the other scripts.

# Prints `HASH  FILE` for each; a file that cannot be read has no line.
sha256() { # FILE...
  if command -v sha256sum >/dev/null 2>&1; then
    sha256sum "$@"
  elif toybox sha256sum </dev/null >/dev/null 2>&1; then # a system without a link of that name
    toybox sha256sum "$@"
  else
    echo 'error: the device has no sha256sum or toybox' >&2
    return 127
  fi
}
