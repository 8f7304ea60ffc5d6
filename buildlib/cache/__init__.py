"""The stage cache of the Gen AI Builder, in the documented layout.

    <cache_root>/<model>/<operation>_<first 32 hex of the hash>/
        builder_cache_info.json     operation, source, config, hash, created_at
        .files.json                 the rest of the hash's input; size and hash of every file
        ...                         the output

A stage's hash is the SHA-256 of its operation, its options, the versions of its tools, and the
hashes of its inputs, so hashes form a chain: changing an option changes the hash of that stage
and of all after it, and of nothing else.

Layout and the five fields: "Gen AI Builder Overview", docs.qualcomm.com 80-87189-2.
"""
