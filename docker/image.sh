#!/usr/bin/env bash
# The image that a team runs: build it, push it, pull it.
#
#     VLLM=nightly|release|cpu docker/image.sh build
#     REGISTRY=registry.example/team [TAG=...] docker/image.sh push
#     docker/image.sh pull
#
# Whatever was built, pushed or pulled last is what the compose services run: AERIE_IMAGE in .env. A push writes the
# image's digest to image.env; commit that file, and a teammate's pull gets the same bits.
# Also read: BASE (another base image), BASE_PYTHON (the one in it), INDEX (a package index; without credentials: they
# would be in the history), CA (certificates of a proxy), BUILD_FLAGS (more flags of docker build), STAGE (another stage
# than runtime), SBOM=1 (list the packages in an attestation as well: minutes, and another image that does it).
set -euo pipefail
cd "$(dirname "$0")/.."
export DOCKER_BUILDKIT=1
# The distribution that the CUDA base is made of.
CPU_BASE=ubuntu:24.04@sha256:786a8b558f7be160c6c8c4a54f9a57274f3b4fb1491cf65146521ae77ff1dc54

fail() {
  echo "image: $1" >&2
  exit 2
}

# Set a variable in .env (without a value: take it out), leaving every other line as it is.
remember() {
  local lines
  lines=$(grep -v "^$1=" .env 2> /dev/null || echo "# Written by make, and yours to add to: see .env.example")
  [[ $# == 1 ]] || lines+=$'\n'$1=$2
  printf '%s\n' "$lines" > .env
}

remembered() {
  local line
  line=$(grep "^$1=" "${2:-.env}" 2> /dev/null | tail -n 1) || return 1
  printf '%s\n' "${line#*=}"
}

# Make an image the one that the services run. Its label says whether that takes GPUs.
choose() {
  local user cache
  user=$(remembered UID) || user=${SUDO_UID:-$(id -u)}
  remember AERIE_IMAGE "$1"
  if [[ $(docker image inspect -f '{{index .Config.Labels "aerie.vllm"}}' "$1") == cpu ]]; then
    remember COMPOSE_FILE compose.yaml:compose.cpu.yaml
  elif [[ $(remembered COMPOSE_FILE) == compose.yaml:compose.cpu.yaml ]]; then
    remember COMPOSE_FILE
  fi
  remember UID "$user"
  remembered GID > /dev/null || remember GID "${SUDO_GID:-$(id -g)}"
  remember COMPOSE_PROJECT_NAME "aerie-$user-$(printf '%s' "$PWD" | sha256sum | cut -c1-8)"
  cache=${AERIE_CACHE:-$(remembered AERIE_CACHE || true)}
  if [[ -z $cache ]]; then
    cache=aerie-cache-$user
    remember AERIE_CACHE "$cache"
  fi
  docker volume create "$cache" > /dev/null
  if [[ $user == 0 ]]; then
    echo "image: WARNING: you are root, and so are the services. Set UID and GID in .env to whom runs/ belongs" >&2
  fi
  if [[ ${AERIE_IMAGE:-$1} != "$1" ]]; then
    echo "image: WARNING: AERIE_IMAGE=$AERIE_IMAGE is set in your environment, and comes before .env" >&2
  fi
}

# VERSION-VLLM-REVISION, e.g. 0.1.0-vllm0.16.0-1a2b3c4d5e6f; sets version, vllm (its version), revision and tag.
describe() {
  local pins engine
  # shellcheck source=docker/versions.env
  source docker/versions.env
  case $1 in
    nightly | release | cpu) pins=${!1} ;;
    *) fail "VLLM=$1: there are nightly, release and cpu" ;;
  esac
  engine=${pins%% *} vllm=${engine#*=}
  engine=${engine/=/} engine=${engine%%+*} # a tag takes neither = nor +
  version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
  if revision=$(git rev-parse --short=12 HEAD 2> /dev/null); then
    [[ -z $(git status --porcelain) ]] || revision+=-dirty
  else
    revision=unknown
  fi
  tag=$version-$engine-$revision
}

build() {
  local variant=${VLLM:-nightly} stage=${STAGE:-runtime} flags=()
  local version vllm revision tag patches
  describe "$variant"
  patches=$(PYTHONPATH=pipeline python3 -c 'import sys, patching as p
print(p.patch_set_digest("speculators"), p.patch_set_digest("vllm", sys.argv[1]))' "$vllm") \
    || fail "the patches cannot be read (see above); Python 3.10 or later is needed for that"
  [[ $variant != cpu ]] || BASE=${BASE:-$CPU_BASE}
  [[ -z ${BASE:-} ]] || flags+=(--build-arg "BASE=$BASE")
  [[ -z ${BASE_PYTHON:-} ]] || flags+=(--build-arg "PYTHON_VERSION=$BASE_PYTHON")
  [[ -z ${INDEX:-} ]] || flags+=(--build-arg "INDEX=$INDEX")
  [[ -z ${CA:-} ]] || flags+=(--secret "id=ca,src=$CA")
  if docker info -f '{{json .DriverStatus}}' | grep -q 'io.containerd.snapshotter'; then
    flags+=(--provenance=mode=max)
    [[ -z ${SBOM:-} ]] || flags+=(--sbom=true)
  elif [[ -n ${SBOM:-} ]]; then
    fail "this engine keeps images without SBOM and provenance. Turn its containerd image store on, or leave SBOM out"
  fi
  [[ $stage == runtime ]] || tag+=-$stage
  # shellcheck disable=SC2086 # several flags in one variable
  docker build -f docker/Dockerfile --target "$stage" -t "aerie:$tag" --build-arg "VLLM=$variant" \
    --build-arg "VERSION=$version" --build-arg "REVISION=$revision" \
    --build-arg "PATCHES=${patches% *}" --build-arg "VLLM_PATCHES=${patches#* }" \
    "${flags[@]}" ${BUILD_FLAGS:-} .
  [[ $stage != runtime ]] || choose "aerie:$tag"
  if [[ $variant == nightly ]] && ! grep -q '^vllm.*--hash=' docker/locks/nightly-wheel.txt; then
    echo "image: WARNING: the nightly was taken without a check: docker/locks/nightly-wheel.txt has no sha256. Run" >&2
    echo "image: WARNING: make lock on a machine that reaches its address, and commit the file" >&2
  fi
  echo "image: built aerie:$tag ($(docker image inspect -f '{{.Size}}' "aerie:$tag" | numfmt --to=si)B)"
}

push() {
  local image repository tag digest
  image=$(remembered AERIE_IMAGE) || fail "nothing is built yet. Run make build first"
  repository=${REGISTRY:?image: say where to: make push REGISTRY=registry.example/team}/aerie
  tag=${TAG:-$(docker image inspect -f '{{range .RepoTags}}{{println .}}{{end}}' "$image" \
    | sed -n 's/.*aerie://p' | head -n 1)}
  [[ -n $tag ]] || fail "$image has no tag of ours. Give one: make push REGISTRY=... TAG=..."
  [[ $tag != latest ]] || fail "TAG=latest says nothing of what is in the image. Leave TAG out, or name a version"
  [[ $tag != *-dirty ]] || echo "image: WARNING: $tag holds changes that are not committed" >&2
  docker tag "$image" "$repository:$tag"
  docker push "$repository:$tag"
  digest=$(docker image inspect -f '{{range .RepoDigests}}{{println .}}{{end}}' "$repository:$tag" \
    | grep "^$repository@" | head -n 1) || true
  [[ -n $digest ]] || fail "the registry gave no digest for $repository:$tag"
  printf '# The image of this team: %s\nAERIE_IMAGE=%s\n' "$repository:$tag" "$digest" > image.env.tmp
  mv image.env.tmp image.env
  choose "$digest"
  echo "image: pushed $repository:$tag"
  echo "image: $digest, written to image.env: commit it, and teammates run make pull"
}

pull() {
  local image
  image=$(remembered AERIE_IMAGE image.env) || fail "image.env names no image. It comes from a teammate's make push"
  [[ $image == *@sha256:* ]] || fail "image.env: $image is no reference by digest. Write it with make push"
  docker pull "$image"
  choose "$image"
  echo "image: the services now run $image"
}

case ${1:-} in
  build | push | pull) "$1" ;;
  *) fail "docker/image.sh build|push|pull" ;;
esac
