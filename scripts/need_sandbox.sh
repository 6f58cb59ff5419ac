# Makes sure that a run can get sandboxes: a Docker engine that answers, or bubblewrap (installed here, as root).
set -eu
[ -z "$(sh "$(dirname "$0")/docker_marker.sh")" ] && exit 0
command -v bwrap >/dev/null && exit 0
command -v apt-get >/dev/null || {
  echo "Tools run in a sandbox: install bubblewrap with your package manager, or start a Docker engine." >&2
  exit 1
}
if [ "$(id -u)" != 0 ]; then
  echo "Tools run in a sandbox. Install one, then run make demo again: sudo apt-get install -y bubblewrap" >&2
  exit 1
fi
echo "installing bubblewrap"
apt-get update -qq
apt-get install -y -qq --no-install-recommends bubblewrap
