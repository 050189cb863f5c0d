#!/usr/bin/env bash
# Serve on two hosts: gateway and prefill node on host A, decode node on host B. KV pages travel from A to B by TCP, over
# connections on which both ends prove that they know the cluster key.
#
#     docs/examples/two_hosts.sh                    # try it on one machine, with two loopback addresses
#
# On two machines, run the first two commands below on A and the third on B, with their real addresses, the same
# BATON_CLUSTER_KEY, and the folder of keys that baton keygen has made for each host. Arguments of this script go to both
# nodes.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/../.."

host_a=${HOST_A:-127.0.0.1} host_b=${HOST_B:-127.0.0.2} port=${PORT:-8000} control_port=${CONTROL_PORT:-8001}
BATON_CLUSTER_KEY=${BATON_CLUSTER_KEY:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}
export BATON_CLUSTER_KEY
keys=${KEYS:-$(mktemp -d)}
trap 'kill $(jobs -p) 2> /dev/null || true; wait; [ -n "${KEYS:-}" ] || rm -rf "$keys"' EXIT

# Once, anywhere; copy each folder to its host:
[ -d "$keys/a" ] || ./scripts/baton keygen "$keys" a b

# On host A:
./scripts/gateway --host "$host_a" --port "$port" --control-host "$host_a" --control-port "$control_port" --keys "$keys/a" &
./scripts/prefill --gateway "$host_a:$control_port" --advertise-host "$host_a" --keys "$keys/a" --transport tcp "$@" &

# On host B:
./scripts/decode --gateway "$host_a:$control_port" --advertise-host "$host_b" --keys "$keys/b" --transport tcp "$@" &

# Wait until a request would be served, send one, and show how its pages travelled.
get() { python3 -c 'import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1]).read().decode())' "$@"; }
until get "http://$host_a:$port/ready" 2> /dev/null > /dev/null; do
    for job in $(jobs -p); do kill -0 "$job" 2> /dev/null || { echo "two_hosts: a process ended early" >&2; exit 1; }; done
    sleep 0.5
done
python3 docs/examples/streaming_client.py "What news from Verona?" --url "http://$host_a:$port" --max-tokens 20
until get "http://$host_a:$port/v1/workers" | python3 -c '
import json, sys
workers = json.load(sys.stdin)["workers"]
if not all(worker["pairs"] for worker in workers):
    sys.exit(1)
for worker in workers:
    print(worker["role"], worker["name"], "pairs:", [pair["transport"] for pair in worker["pairs"]])'; do
    sleep 1 # nodes report their pairs with a heartbeat, every second
done
