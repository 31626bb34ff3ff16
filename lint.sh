#!/usr/bin/env bash
# ./lint.sh formats, mends what ruff can mend and checks types; ./lint.sh check changes nothing. Needs the extra `dev`.
set -uo pipefail
cd "$(dirname "$0")" || exit 2
root=$PWD
python=${PYTHON:-python3}
failed=0

case "${1:-fix}" in
  fix)
    "$python" -m ruff format || failed=1
    "$python" -m ruff check --fix || failed=1
    ;;
  check)
    "$python" -m ruff format --check || failed=1
    "$python" -m ruff check || failed=1
    ;;
  *)
    echo "usage: ./lint.sh [fix | check]" >&2
    exit 2
    ;;
esac

# mypy does not follow the mapping of kernels/, dispatch/ and launch/ into hostir/, so it looks at a tree of links that has them there.
# Examples live in numbered folders, which are no module names: examples/01_x/main.py is seen as examples/01_x_main.py.
stage=$(mktemp -d) || exit 2
trap 'rm -rf "$stage"' EXIT
shopt -s nullglob
mkdir "$stage/hostir" "$stage/examples"
ln -s "$root"/hostir/* "$root"/{kernels,dispatch,launch} "$stage/hostir/"
ln -s "$root"/{tests,benchmarks} "$stage/"
for file in examples/*/*.py; do
  folder=$(basename "$(dirname "$file")")
  ln -s "$root/$file" "$stage/examples/${folder}_$(basename "$file")"
done
cd "$stage" && MYPYPATH=benchmarks "$python" -m mypy --config-file "$root/pyproject.toml" --cache-dir "$root/.mypy_cache" hostir tests examples benchmarks || failed=1
exit $failed
