#!/bin/sh
# python3 of a run folder: starts the one in its folder `python`, a prefix with bin and lib.
here=${0%/*}
PYTHONHOME=$here/python LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$here/python/lib \
    exec "$here/python/bin/python3" "$@"
