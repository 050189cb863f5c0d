#!/usr/bin/env bash
# Two gateways that the nodes find through etcd. Needs etcd (Debian: etcd-server) and the extra etcd.
#
#     docs/examples/etcd.sh
#
# Arguments of this script go to both nodes.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/../.."

port=${PORT:-8000} other_port=${OTHER_PORT:-8010} etcd_port=${ETCD_PORT:-2379} peer_port=${ETCD_PEER_PORT:-2380}
data=$(mktemp -d)
trap 'kill $(jobs -p) 2> /dev/null || true; wait; rm -rf "$data"' EXIT

etcd=http://127.0.0.1:$etcd_port peers=http://127.0.0.1:$peer_port
etcd --data-dir "$data" --listen-client-urls "$etcd" --advertise-client-urls "$etcd" --listen-peer-urls "$peers" \
    --initial-advertise-peer-urls "$peers" --initial-cluster "default=$peers" --log-level error &
./scripts/gateway --port "$port" --control-port 0 --etcd "$etcd" &
./scripts/gateway --port "$other_port" --control-port 0 --etcd "$etcd" &
./scripts/prefill --etcd "$etcd" "$@" &
./scripts/decode --etcd "$etcd" "$@" &

# Wait until each gateway could serve a request, and send it one.
get() { python3 -c 'import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1]).read().decode())' "$@"; }
for gateway in "http://127.0.0.1:$port" "http://127.0.0.1:$other_port"; do
    until get "$gateway/ready" 2> /dev/null > /dev/null; do
        for job in $(jobs -p); do kill -0 "$job" 2> /dev/null || { echo "etcd.sh: a process ended early" >&2; exit 1; }; done
        sleep 0.5
    done
    python3 docs/examples/streaming_client.py "What news from Verona?" --url "$gateway" --max-tokens 20
done
