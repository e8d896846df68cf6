#!/usr/bin/env bash
# The suite in every environment that it has to be green in. Prints a row of the table in tests/README.md for each.
#
#   tests/matrix.sh                         all of them, one after another: about a quarter of an hour each
#   tests/matrix.sh sigint mkl_avx2         these
#   PARTS="tests/unit tests/faults" tests/matrix.sh aten_default      of the suite only these parts
#
# python3.12, python3.13 and space make an environment of their own in a clone of what is committed here.
set -uo pipefail
cd "$(dirname "$0")/.."

ALL="plain sigint load mkl_compatible mkl_avx2 mkl_instructions_avx2 aten_default aten_avx2 python3.12 python3.13 space"
LOGS="$(mktemp -d)"
WORKERS="${WORKERS:-3}"
read -r -a parts <<<"${PARTS:-}"

suite() { "${PYTHON:-.venv/bin/python}" -m pytest -n "$WORKERS" --dist loadfile ${parts[@]+"${parts[@]}"}; }

# As a shell starts `nohup make test &`: whoever is started inherits that SIGINT is ignored.
ignoring_sigint() { (trap '' INT; suite); }

# Four busy processes a core beside the suite.
under_load() {
  local busy=()
  for _ in $(seq $((4 * $(nproc)))); do (while :; do :; done) & busy+=($!); done
  suite
  local ended=$?
  kill "${busy[@]}"
  wait "${busy[@]}" 2>/dev/null
  return $ended
}

# What is committed, in a folder whose name contains a space, from nothing to the end of `make test`.
in_a_clone() {
  local folder
  folder="$(mktemp -d)/a clone"
  git clone --quiet . "$folder" && make -C "$folder" test PYTHON="$1" WORKERS="$WORKERS" PYTEST="${PARTS:-}"
  local ended=$?
  rm -rf "$folder"
  return $ended
}

one() {
  case "$1" in
    plain) suite ;;
    sigint) ignoring_sigint ;;
    load) under_load ;;
    mkl_compatible) MKL_CBWR=COMPATIBLE suite ;;
    mkl_avx2) MKL_CBWR=AVX2 suite ;;
    mkl_instructions_avx2) MKL_ENABLE_INSTRUCTIONS=AVX2 suite ;;
    aten_default) ATEN_CPU_CAPABILITY=default suite ;;
    aten_avx2) ATEN_CPU_CAPABILITY=avx2 suite ;;
    python3.1[123]) in_a_clone "$1" ;;
    space) in_a_clone "${PYTHON:-python3}" ;;
    *) echo "no environment is called '$1'; there are: $ALL" >&2; return 2 ;;
  esac
}

failed=0
echo "| environment | date | of the suite | outcome |"
echo "|---|---|---|---|"
for name in ${@:-$ALL}; do
  one "$name" >"$LOGS/$name.log" 2>&1 || failed=1
  outcome="$(grep -E "[0-9]+ (passed|failed|error)" "$LOGS/$name.log" | tail -1 | tr -d '=' | sed 's/^ *//; s/ *$//')"
  echo "| $name | $(date +%F) | ${PARTS:-whole} | ${outcome:-no outcome: $(tail -1 "$LOGS/$name.log")} |"
done
echo "logs: $LOGS" >&2
exit $failed
