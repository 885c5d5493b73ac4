#!/bin/bash
# Proves docker-compose.yml for real, on a machine with root and without an image registry:
# starts a private container engine, makes the base images from Debian packages, builds our images,
# runs `docker compose up --scale worker=3`, asks for predictions, kills a worker, and takes it all
# down again. Exit status: 0 proven, 77 skipped (no engine can run here), anything else failed.
#
#   prove.sh [--cache DIR]    DIR keeps what is slow to make (base file system, compose); it may be
#                             deleted at any time. Default: ~/.cache/npufleet-containers
set -euo pipefail

HERE=$(cd "$(dirname "$0")" && pwd)
ROOT=$(cd "$HERE/../.." && pwd)
CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/npufleet-containers
SAMPLE=models/efficientnet-lite0
WORKERS=3
REQUESTS=300
BASE_NAME=python:3.11-slim-bookworm # what our Dockerfiles start from, supplied here from Debian
REDIS_NAME=redis:7-bookworm

if [ "${1:-}" = --cache ]; then CACHE=${2:?--cache needs a folder}; fi

say() { printf '\n[%3d s] %s\n' "$SECONDS" "$*"; }
fail() { printf '\nFAILED: %s\n' "$*" >&2; exit 1; }
skip() {
  printf '\n=====\n===== SKIPPED: the container proof did not run: %s\n=====\n' "$*" >&2
  exit 77
}
compose() { docker compose -f docker-compose.yml -f "$HERE/compose.build.yaml" "$@"; }
interfaces() { ls /sys/class/net; }
control_groups() { find /sys/fs/cgroup -depth -type d -path "*/$(basename "$WORK")*"; }

# Waits until a command succeeds: wait_for SECONDS COMMAND…
wait_for() {
  local limit=$((SECONDS + $1)); shift
  until "$@" >/dev/null 2>&1; do
    [ "$SECONDS" -lt "$limit" ] || return 1
    sleep 0.3
  done
}

# The Debian mirror that this machine's apt is set up with.
mirror() {
  # shellcheck disable=SC2016 # apt-get expands it, not the shell
  apt-get indextargets --format '$(REPO_URI)' \
    'Created-By: Packages' 'Label: Debian' 'Component: main' 2>/dev/null | sed -n '1{s,/$,,;p}'
}

install_engine() {
  if ! command -v dockerd >/dev/null || ! command -v debootstrap >/dev/null; then
    apt-get update -qq
    # The engine's own service is not started: RUNLEVEL=1 tells the package so.
    RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
      docker.io debootstrap iptables >"$WORK/apt.log" 2>&1 ||
      skip "the engine's packages cannot be installed: $(tail -n 1 "$WORK/apt.log")"
  fi
  [ -x "$CACHE/docker-compose" ] || fetch_compose
  install -D "$CACHE/docker-compose" "$DOCKER_CONFIG/cli-plugins/docker-compose"
}

# Debian 12's own compose is too old for modern files; Debian 13's is one program that runs here.
fetch_compose() {
  local lists=$WORK/apt options
  mkdir -p "$lists/lists/partial"
  echo "deb $MIRROR trixie main" >"$lists/sources.list"
  options=(-oDir::State::Lists="$lists/lists" -oDir::Etc::SourceList="$lists/sources.list"
    -oDir::Etc::SourceParts=/dev/null -oDir::Cache::pkgcache= -oDir::Cache::srcpkgcache=
    -oAPT::Sandbox::User=root)
  apt-get "${options[@]}" update -qq
  (cd "$lists" && apt-get "${options[@]}" download -qq docker-compose/trixie)
  dpkg -x "$lists"/docker-compose_*.deb "$lists/x"
  install -D "$lists/x/usr/libexec/docker/cli-plugins/docker-compose" "$CACHE/docker-compose"
}

# No firewall rules, no default bridge, no forwarding: the host's network stays as it is. Networks
# of compose, their DNS and ports published on the loopback work all the same.
start_engine() {
  setsid dockerd --iptables=false --ip6tables=false --ip-forward=false --bridge=none \
    --storage-driver=overlay2 --data-root="$WORK/data" --exec-root="$WORK/exec" \
    --exec-opt native.cgroupdriver=cgroupfs --cgroup-parent="/$(basename "$WORK")" \
    --pidfile="$WORK/dockerd.pid" --host="$DOCKER_HOST" >"$WORK/dockerd.log" 2>&1 </dev/null &
  ENGINE_PID=$!
  wait_for 30 eval "docker info || ! kill -0 $ENGINE_PID" || true
  if ! docker info >/dev/null 2>&1; then
    tail -n 5 "$WORK/dockerd.log" >&2
    skip "dockerd does not start here (the end of its log is above)"
  fi
}

stop_engine() {
  [ -n "${ENGINE_PID:-}" ] || return 0
  kill "$ENGINE_PID" 2>/dev/null || true
  wait_for 30 eval "! kill -0 $ENGINE_PID" || kill -KILL "$ENGINE_PID" || true
  ENGINE_PID=
  control_groups | xargs --no-run-if-empty rmdir
}

# Debian's Python, pip and Redis in one file system, imported under the names of the official
# images that our files ask for.
make_base_images() {
  local tar
  tar=$CACHE/bookworm-$(dpkg --print-architecture).tar
  [ -f "$tar" ] || make_file_system "$tar"
  docker import --change 'ENV PATH=/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin' \
    --change 'ENV LANG=C.UTF-8' --change 'CMD ["python3"]' "$tar" debian-base >/dev/null
  mkdir "$WORK/base"
  # The certificates that this machine trusts, so that pip can reach its index from inside a build.
  cp /etc/ssl/certs/ca-certificates.crt "$WORK/base/"
  printf '%s\n' 'FROM debian-base' \
    'COPY ca-certificates.crt /etc/ssl/certs/ca-certificates.crt' \
    'ENV PIP_CERT=/etc/ssl/certs/ca-certificates.crt' >"$WORK/base/python"
  printf '%s\n' 'FROM debian-base' 'RUN install -d -o redis -g redis /data' 'USER redis' \
    'WORKDIR /data' >"$WORK/base/redis"
  build_base "$BASE_NAME" "$WORK/base/python"
  build_base "$REDIS_NAME" "$WORK/base/redis"
}

# The older builder: it asks no registry for an image that is here already.
build_base() {
  DOCKER_BUILDKIT=0 docker build -t "$1" -f "$2" "$WORK/base" >"$WORK/base.log" 2>&1 ||
    { tail -n 20 "$WORK/base.log" >&2; fail "base image $1"; }
}

make_file_system() {
  local root=$WORK/rootfs
  debootstrap --variant=minbase \
    --include=python3,python3-pip,python3-venv,ca-certificates,redis-server \
    bookworm "$root" "$MIRROR" >"$WORK/debootstrap.log" 2>&1 ||
    skip "debootstrap failed: $(tail -n 1 "$WORK/debootstrap.log")"
  rm -rf "$root"/var/lib/apt/lists/* "$root"/var/cache/apt/archives/*.deb \
    "$root"/usr/share/{doc,man,locale}/*
  tar -C "$root" -cf "$1.part" . && mv "$1.part" "$1"
  rm -rf "$root"
}

check() { python3 "$HERE/check.py" "$@" || fail "check.py $1"; }

kill_one_worker() {
  local id pid killed_s
  id=$(compose ps -q worker | sed -n 1p)
  pid=$(docker inspect -f '{{.State.Pid}}' "$id")
  echo "  victim: container ${id:0:12}, process $pid of this machine"
  # The process, not `docker kill`: that one counts as a wish, and nothing would be restarted.
  killed_s=$SECONDS
  check spread "$GATEWAY" "$SAMPLE" --requests "$REQUESTS" --kill-pid "$pid" --workers 2
  wait_for 120 eval "[ \"\$(docker inspect -f '{{.RestartCount}} {{.State.Health.Status}}' $id)\" = '1 healthy' ]" ||
    fail "the killed worker was not replaced: $(docker inspect -f '{{.RestartCount}} restarts, {{json .State}}' "$id")"
  echo "  replaced by the restart policy (1 restart), healthy again within $((SECONDS - killed_s)) s"
}

# SIGTERM must reach the processes: each ends by itself, with status 0, well before the grace period.
check_stop() {
  compose stop 2>/dev/null
  local codes
  codes=$(docker ps -aq | xargs docker inspect -f '  {{.Name}} ended with {{.State.ExitCode}}' | sort)
  echo "$codes"
  ! grep -qv ' 0$' <<<"$codes" || fail "a container did not end by itself"
}

nothing_left_in_engine() {
  local left
  left=$(docker ps -aq; docker network ls -q --filter type=custom; docker volume ls -q)
  [ -z "$left" ] || fail "left behind after down: $left"
  echo "  containers 0, networks 0, volumes 0"
}

nothing_left_on_machine() {
  ! grep -F " $WORK/" /proc/mounts || fail "mounts are left under $WORK"
  # The pattern comes by standard input: as an argument it would find this very grep.
  # shellcheck disable=SC2062 # it is a list of files
  ! grep -alF --file=- /proc/[0-9]*/cmdline 2>/dev/null <<<"$WORK" ||
    fail "processes of the engine are left"
  [ -z "$(control_groups)" ] || fail "control groups are left: $(control_groups | xargs)"
  [ "$(interfaces)" = "$INTERFACES" ] || fail "network interfaces changed: $(interfaces | xargs)"
  rm -rf "$WORK" && [ ! -e "$WORK" ] || fail "$WORK cannot be removed"
  echo "  engine's processes 0, mounts 0, control groups 0, new network interfaces 0, $WORK removed"
}

# Whatever happened: nothing stays.
clean_up() {
  local status=$?
  trap - EXIT
  if [ -n "${ENGINE_PID:-}" ]; then
    if [ "$status" != 0 ] && [ "$status" != 77 ]; then
      compose ps --all >&2 || true
      compose logs --no-color --tail 40 >&2 || true
    fi
    compose down -v -t 5 >/dev/null 2>&1 || true
    stop_engine
  fi
  [ -n "${HAD_KEY:-}" ] || rm -f /etc/docker/key.json
  rm -rf "$WORK"
  exit "$status"
}

[ "$(uname -s)" = Linux ] || skip "not Linux"
[ "$(id -u)" = 0 ] || skip "not root (a private container engine needs it)"
command -v apt-get >/dev/null || skip "no apt-get: the base images are made from Debian packages"
MIRROR=${DEBIAN_MIRROR:-$(mirror)}
[ -n "$MIRROR" ] || skip "no Debian mirror is set up for apt (DEBIAN_MIRROR names one)"

cd "$ROOT"
WORK=$(mktemp -d /var/tmp/npufleet-containers.XXXXXX)
mkdir -p "$CACHE"
INTERFACES=$(interfaces)
[ ! -e /etc/docker/key.json ] || HAD_KEY=1
trap clean_up EXIT
trap 'exit 130' INT TERM
export DOCKER_HOST=unix://$WORK/docker.sock DOCKER_CONFIG=$WORK/cli
export COMPOSE_ANSI=never GATEWAY_PORT=0 # any free one

say "container engine: packages (cache: $CACHE)"
install_engine
say "container engine: start a private one"
start_engine
docker version --format '  dockerd {{.Server.Version}}'; docker compose version | sed 's/^/  /'
say "base images from Debian: $BASE_NAME, $REDIS_NAME"
make_base_images
say "build our images, up --scale worker=$WORKERS, wait until all are healthy"
compose build >"$WORK/build.log" 2>&1 || { tail -n 40 "$WORK/build.log" >&2; fail "build"; }
say "built"
docker image ls --format '  {{.Repository}} {{.Size}}' | grep npufleet
compose up -d --wait --wait-timeout 180 --scale worker=$WORKERS >"$WORK/up.log" 2>&1 ||
  { tail -n 20 "$WORK/up.log" >&2; fail "up"; }
compose ps --format '  {{.Name}}: {{.Status}}'
GATEWAY=http://$(compose port gateway 8080)

say "the sample images by HTTP, at $GATEWAY"
check http "$GATEWAY" "$SAMPLE"
say "the sample images by Redis, from a container with the Python client"
compose run --rm --no-deps -T -v "$HERE/check.py:/check.py:ro" -v "$ROOT/$SAMPLE:/sample:ro" \
  --entrypoint python3 gateway /check.py redis redis://redis:6379/0 /sample || fail "check.py redis"
say "$REQUESTS requests; each of the $WORKERS workers must serve some"
check spread "$GATEWAY" "$SAMPLE" --requests $REQUESTS --workers $WORKERS
say "$REQUESTS requests, one worker killed in the middle of them"
kill_one_worker
say "$REQUESTS requests; the replaced worker takes part again"
check spread "$GATEWAY" "$SAMPLE" --requests $REQUESTS --workers $WORKERS
say "stop"
check_stop
say "down -v"
compose down -v >/dev/null 2>&1
nothing_left_in_engine
stop_engine
nothing_left_on_machine
say "PROVEN: docker-compose.yml with $WORKERS workers, $((3 * REQUESTS + 6)) right answers, nothing left"
