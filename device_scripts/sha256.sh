# SHA-256 of files with what a device has: sourced by common.sh, and put by the host before commands
# of its own, which check the other scripts.

cr=$(printf '\r')

# Puts hash into lower case; some devices have no tr.
lower_hash() {
  upper=$hash
  hash=''
  while [ -n "$upper" ]; do
    case $upper in
      A*) hash=${hash}a ;;
      B*) hash=${hash}b ;;
      C*) hash=${hash}c ;;
      D*) hash=${hash}d ;;
      E*) hash=${hash}e ;;
      F*) hash=${hash}f ;;
      *) hash=$hash${upper%"${upper#?}"} ;;
    esac
    upper=${upper#?}
  done
}

# Puts lines of a tool as sha256sum has them; some mark binary files, end lines with CRLF, or write
# upper case.
put_hashes() {
  while read -r hash file; do
    case $hash in *[A-F]*) lower_hash ;; esac
    file=${file#\*}
    echo "$hash  ${file%"$cr"}"
  done
}

# Prints `HASH  FILE` for each, as sha256sum does; a file that cannot be read has no line.
sha256() { # FILE...
  if command -v sha256sum >/dev/null 2>&1; then
    sha256sum "$@" | put_hashes
  elif toybox sha256sum </dev/null >/dev/null 2>&1; then # a system without a link of that name
    toybox sha256sum "$@" | put_hashes
  elif command -v openssl >/dev/null 2>&1; then
    openssl dgst -sha256 -r "$@" | put_hashes
  elif command -v python3 >/dev/null 2>&1; then
    python3 -c '
import hashlib, sys
for name in sys.argv[1:]:
    digest = hashlib.sha256()
    try:
        with open(name, "rb") as file:
            for data in iter(lambda: file.read(1 << 20), b""):
                digest.update(data)
    except OSError:
        continue
    print(digest.hexdigest() + "  " + name)
' "$@"
  else
    echo 'error: the device has no sha256sum, toybox, openssl or python3' >&2
    return 127
  fi
}
