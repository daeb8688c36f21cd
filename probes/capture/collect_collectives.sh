#!/bin/sh
# Collects what all ranks wrote into one archive for `kvbench deadlock-diagnose`.
#
#   collect_collectives.sh ARCHIVE.tar.gz SOURCE...
#
# A SOURCE is a local folder, or HOST:FOLDER, which is copied with scp. Only logs, dumps and exports are taken.
set -eu

if [ $# -lt 2 ]; then
    echo "usage: $0 ARCHIVE.tar.gz SOURCE... (a SOURCE is a folder or HOST:FOLDER)" >&2
    exit 2
fi
archive=$1
shift
staging=$(mktemp -d)
trap 'rm -rf "$staging"' EXIT

number=0
for source in "$@"; do
    number=$((number + 1))
    name=$(printf '%s' "$source" | tr -c 'A-Za-z0-9._\n-' '_')
    target="$staging/$number.$name"
    mkdir -p "$target"
    if [ -d "$source" ]; then
        (cd "$source" && find . -type f \( -name '*nccl*' -o -name '*.log' -o -name '*.err' -o -name '*.out' -o -name 'rank*' \
            -o -name '*trace*' -o -name '*.sqlite' -o -name '*ras*.json' \) ! -name '*.nsys-rep' -print) |
            while IFS= read -r file; do
                mkdir -p "$target/$(dirname "$file")"
                cp "$source/$file" "$target/$file"
            done
    elif [ "${source#*:}" != "$source" ]; then
        scp -q -r "$source" "$target/" || { echo "$0: $source could not be copied" >&2; exit 1; }
    else
        echo "$0: $source is no folder and no HOST:FOLDER" >&2
        exit 1
    fi
done

files=$(find "$staging" -type f | wc -l)
if [ "$files" -eq 0 ]; then
    echo "$0: no logs, dumps or exports in $*" >&2
    exit 1
fi
tar -C "$staging" -czf "$archive" .
echo "$archive: $files files; next: kvbench deadlock-diagnose $archive"
