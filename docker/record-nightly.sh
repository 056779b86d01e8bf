#!/usr/bin/env bash
# Record the sha256 of the pinned nightly in locks/nightly-wheel.txt. Part of `make lock`; a recorded hash is never
# replaced: if the file at the address is another one today, this stops and says so.
set -euo pipefail
cd "$(dirname "$0")/locks"

url=$(sed -n 's/^vllm @ \([^ ]*\).*/\1/p' nightly-wheel.txt)
recorded=$(sed -n 's/.*--hash=sha256:\([0-9a-f]*\).*/\1/p' nightly-wheel.txt)
wheel=$(mktemp)
trap 'rm -f "$wheel"' EXIT
if ! curl --fail --silent --show-error --location --retry 2 --connect-timeout 20 --output "$wheel" "$url"; then
  echo "lock: WARNING: $url cannot be reached (see above): its sha256 stays ${recorded:-unrecorded}" >&2
  exit 0
fi
found=$(sha256sum "$wheel" | cut -d ' ' -f 1)
if [[ -n $recorded && $recorded != "$found" ]]; then
  echo "lock: $url is another file ($found) than the one recorded ($recorded). Nothing was changed" >&2
  exit 1
fi
sed -i "s|^vllm @ .*|vllm @ $url --hash=sha256:$found|" nightly-wheel.txt
echo "lock: the nightly's sha256 is $found"
