#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
# zipperf's behaviour on bad input and dead peers: one clear line, a non-zero exit, within seconds, in both roles.
# usage: test_zipperf.sh PATH_OF_ZIPPERF [FOLDER_OF_THE_PLUGIN]   (UCX must be found: LD_LIBRARY_PATH)
# With the plugin's folder, the runs with dead peers are repeated over zip.
set -u

# A loopback interface of its own, where that is permitted: zipperf takes bytes that others move over its interface for progress.
own='mount -t sysfs own /sys && ip link set lo up' # /sys shows the interfaces of who mounted it
if [ -z "${own_loopback:-}" ] && unshare --net --mount bash -c "$own" 2>/dev/null; then
    exec env own_loopback=1 unshare --net --mount bash -c "$own"' && exec bash "$0" "$@"' "$0" "$@"
fi

zipperf=${1:-build/src/tools/zipperf}
plugin=${2:-}
[ -x "$zipperf" ] || { echo "not ok - no zipperf at $zipperf"; exit 1; }
dir=$(mktemp -d)
receiver=
trap '[ -z "$receiver" ] || kill -9 "$receiver" 2>/dev/null; rm -rf "$dir"' EXIT
# Loopback and, at first, no plugin: what is tested is zipperf, not zip.
export UCX_NET_DEVICES=lo
unset UCX_PLUGIN_PATH UCX_TLS
tls=tcp # of both strategies in the runs with dead peers
passed=0
failed=0

ok() { passed=$((passed + 1)); echo "ok - $1"; }
not_ok() {
    failed=$((failed + 1))
    echo "not ok - $1: $2"
    sed 's/^/#   /' "$dir/err" 2>/dev/null | tail -n 5
}

# What is no progress, note or log line of UCX must be the one error line.
error_lines() { grep -vE '^ *[0-9]+%  |^note: |^\[[0-9.]+\] |^$' "$1"; }

# check NAME STATUS WANTED_STATUS TEXT: the exit status and the one line of stderr, which is in $dir/err
check() {
    local name=$1 status=$2 wanted=$3 text=$4 lines
    lines=$(error_lines "$dir/err" | wc -l)
    if [ "$status" = 124 ]; then
        not_ok "$name" "hangs"
    elif [ "$status" != "$wanted" ]; then
        not_ok "$name" "exit status $status instead of $wanted"
    elif [ "$lines" != 1 ]; then
        not_ok "$name" "$lines lines instead of one"
    elif ! error_lines "$dir/err" | grep -q "^zipperf: error: .*$text"; then
        not_ok "$name" "the line does not say '$text'"
    else
        ok "$name"
    fi
}

# fails NAME TEXT ARGUMENTS...: a run that must fail by itself
fails() {
    local name=$1 text=$2 status=0
    shift 2
    timeout 10 "$zipperf" "$@" >"$dir/out" 2>"$dir/err" || status=$?
    check "$name" $status 1 "$text"
}

# A receiver in the background; sets $receiver and $port. Its stderr goes to $dir/receiver.
start_receiver() {
    : >"$dir/listening" # not the last one's port, should this be read before the receiver begins
    "$zipperf" model --listen 127.0.0.1:0 --wait 10 "$@" >"$dir/listening" 2>"$dir/receiver" &
    receiver=$!
    port=
    local i
    for i in $(seq 50); do
        port=$(sed -n 's/^listening on .*:\([0-9]*\)$/\1/p' "$dir/listening")
        [ -z "$port" ] || return
        sleep 0.1
    done
    echo "not ok - the receiver does not start"
    exit 1
}

# wait_for PID: its exit status, 124 after 10 s, or, where others may use the interface, when zipperf is not deceived by them any more
wait_for() {
    local i
    for i in $(seq $((${own_loopback:-7} * 100))); do
        kill -0 "$1" 2>/dev/null || { wait "$1"; return; }
        sleep 0.1
    done
    kill -9 "$1"
    wait "$1" 2>/dev/null
    return 124
}

python3 - "$dir" <<'PYTHON'
import json, random, struct, sys
folder = sys.argv[1]
random.seed(1)
values = struct.pack("<40000f", *[random.gauss(0, 0.02) for _ in range(40000)])
tensors, data, header = {"w%d" % i: values * 25 for i in range(4)}, b"", {}
for name, content in tensors.items():
    header[name] = {"dtype": "F32", "shape": [1000, 1000], "data_offsets": [len(data), len(data) + len(content)]}
    data += content
header["ids"] = {"dtype": "I64", "shape": [4], "data_offsets": [len(data), len(data) + 32]}
header["none"] = {"dtype": "F32", "shape": [0], "data_offsets": [len(data) + 32, len(data) + 32]}
data += struct.pack("<4q", 1, -2, 3, -4)
def write(name, head, content):
    with open(folder + "/" + name, "wb") as file:
        file.write(struct.pack("<Q", len(head)) + head + content)
good = json.dumps(header).encode()
write("good.safetensors", good, data)
write("truncated.safetensors", good, data[:-1000])
write("broken.safetensors", b'{"w": {"dtype"', b"")
one = {"w": {"dtype": "F128", "shape": [1], "data_offsets": [0, 4]}}
write("dtype.safetensors", json.dumps(one).encode(), b"1234")
one["w"]["dtype"] = "I32"
write("integers.safetensors", json.dumps(one).encode(), b"1234")
PYTHON
: >"$dir/empty.safetensors"
model=$dir/good.safetensors

# ---- bad input
send=(model --connect 127.0.0.1:1 --model)
fails "no such model" "No such file" "${send[@]}" "$dir/nothing"
fails "empty model" "is empty" "${send[@]}" "$dir/empty.safetensors"
fails "a directory as model" "is a directory" "${send[@]}" "$dir"
fails "truncated model" "truncated" "${send[@]}" "$dir/truncated.safetensors"
fails "broken model" "not valid JSON" "${send[@]}" "$dir/broken.safetensors"
fails "unknown dtype" "unknown dtype 'F128'" "${send[@]}" "$dir/dtype.safetensors"
fails "no float in the model" "holds no tensor" "${send[@]}" "$dir/integers.safetensors"
fails "bad size" "unknown unit" "${send[@]}" "$model" --size 64X
fails "size of 0" "size of 0" "${send[@]}" "$model" --size 0
fails "size beyond the memory" "does not fit" "${send[@]}" "$model" --size 1M,999999G
fails "unwritable JSON" "cannot write" "${send[@]}" "$model" --json "$dir/no/such/folder.json"
fails "unknown --dtype" "fp17" "${send[@]}" "$model" --dtype fp17
fails "no role" "give --listen" model
fails "connection refused" "Connection refused" "${send[@]}" "$model"
fails "bad port" "port up to 65535" model --connect 127.0.0.1:99999 --model "$model"
fails "unknown host" "cannot resolve" model --connect host.invalid:5 --model "$model"
fails "listen on another machine's address" "cannot listen" model --listen 192.0.2.1:0
fails "nobody connects" "no sender connected" model --listen 127.0.0.1:0 --wait 0.5

# ---- the codec alone
codec=(codec --on host --no-zstd)
fails "codec: unknown type" "fp17" "${codec[@]}" --dtype fp17
fails "codec: unknown shape" "not in {default" "${codec[@]}" --shape 2,2
fails "codec: unknown data set" "zeros" "${codec[@]}" --data zeros
fails "codec: unknown place" "tpu" codec --on tpu
fails "codec: weights without a model" "belong together" "${codec[@]}" --data weights
fails "codec: a model without weights" "belong together" "${codec[@]}" --model "$model"
fails "codec: no such model" "No such file" "${codec[@]}" --data weights --model "$dir/nothing"
fails "codec: no float in the model" "nothing to measure" "${codec[@]}" --data weights --model "$dir/integers.safetensors" --size 4K
fails "codec: bad size" "unknown unit" "${codec[@]}" --size 64X
fails "codec: size of 0" "size of 0" "${codec[@]}" --size 0
fails "codec: size beyond the memory" "does not fit" "${codec[@]}" --size 999999G
fails "codec: odd chunk" "multiple of 16" "${codec[@]}" --chunk 100
fails "codec: no threads" "threads" "${codec[@]}" --threads 0
fails "codec: misaligned too far" "misalign" "${codec[@]}" --misalign 256
fails "codec: unwritable JSON" "cannot write" "${codec[@]}" --json "$dir/no/such/folder.json"
fails "codec: two data sets in one file" "one --size" "${codec[@]}" --size 4K,8K --dump "$dir/dump"
fails "codec: unwritable dump" "cannot write" "${codec[@]}" --size 4K --dump "$dir/no/such/dump"
if ldconfig -p | grep -q 'libcuda\.so\.1'; then
    echo "ok - codec: no GPU # SKIP there is a driver"
else
    fails "codec: no GPU" "no CUDA driver (libcuda.so.1)" codec --on gpu
fi

status=0
timeout 60 "$zipperf" codec --on host --size 64K,100001 --dtype bf16,fp32 --data weights,random --model "$model" --repeat 2 --zstd 1 --shape default,dense \
    --cache warm --threads 2 --chunk 32K --json "$dir/codec.json" >"$dir/out" 2>"$dir/err" || status=$?
if [ "$status" = 0 ] && python3 - "$dir/codec.json" <<'PYTHON'; then ok "codec: host run, verified rows"; else not_ok "codec: host run" "status $status"; fi
import json, sys
rows = json.load(open(sys.argv[1]))["rows"]
zip_rows = [row for row in rows if row["codec"] == "zip"]
assert len(zip_rows) == 2 * 2 * 2 * 2 * 2, len(zip_rows)  # sizes, types, data sets, shapes, operations
assert {row["op"] for row in rows} == {"encode", "decode", "copy"}
assert all(row["verified"] is True and row["gbps_median"] > 0 and row["threads"] == 2 and row["chunk"] == 32768 for row in rows)
assert all(0.6 < row["ratio"] < 0.9 for row in zip_rows if row["data"].startswith("weights"))
assert all(1 <= row["ratio"] < 1.01 for row in zip_rows if row["data"] == "random")
peers = {row["codec"] for row in rows} - {"zip", "copy"}
assert peers <= {"zstd-1"}, peers
PYTHON
table=$(dirname "$0")/../../contrib/performance_table
if "$table" "$dir/codec.json" >"$dir/table" 2>"$dir/err" && [ "$(grep -c '^| fp32 | weights' "$dir/table")" -ge 4 ]; then
    ok "codec: a table of the run"
else
    not_ok "codec: a table of the run" "$(wc -l <"$dir/table") lines"
fi
sed 's/"verified": true/"verified": false/' "$dir/codec.json" >"$dir/unverified.json"
if "$table" "$dir/unverified.json" >"$dir/table" 2>"$dir/err"; then
    not_ok "codec: no table of what was not verified" "exit status 0"
else
    ok "codec: no table of what was not verified"
fi

status=0
timeout 60 "$zipperf" codec --size 64K --dtype fp16 --data uniform --dump "$dir/dump" >"$dir/out" 2>"$dir/err" || status=$?
if [ "$status" = 0 ] && python3 - "$dir/dump" <<'PYTHON'; then ok "codec: the data set in a file"; else not_ok "codec: the data set in a file" "status $status"; fi
import struct, sys
data = open(sys.argv[1], "rb").read()
assert len(data) == 65536, len(data)
values = struct.unpack("<32768e", data)
assert all(-1 <= value <= 1 for value in values) and len(set(values)) > 4000
PYTHON

# ---- strangers on the control port
python3 - "$dir/port" <<'PYTHON' &
import socket, sys
listener = socket.create_server(("127.0.0.1", 0))
with open(sys.argv[1] + ".tmp", "w") as file: file.write(str(listener.getsockname()[1]))
import os; os.rename(sys.argv[1] + ".tmp", sys.argv[1])
peer, _ = listener.accept()
peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 4)
peer.recv(100000); peer.recv(100000)
PYTHON
for _ in $(seq 50); do [ -e "$dir/port" ] || sleep 0.1; done
fails "receiver is something else" "does not speak" model --connect "127.0.0.1:$(cat "$dir/port")" --model "$model"
wait

# stranger NAME TEXT PYTHON_BYTES: what a receiver says to this
stranger() {
    local status=0
    start_receiver --timeout 2
    python3 -c "
import socket, struct, sys
s = socket.create_connection(('127.0.0.1', $port))
s.sendall($3)
s.settimeout(8)
try:
    while s.recv(65536): pass
except OSError: pass
" &
    local client=$!
    wait_for "$receiver" || status=$?
    receiver=
    wait "$client"
    cp "$dir/receiver" "$dir/err"
    check "$1" $status 1 "$2"
}
frame="lambda t, b: struct.pack('<IIQ', 0x4f50495a, t, len(b)) + b"
hello="b'{\"protocol\":1,\"plain_tls\":\"tcp\",\"zip_tls\":\"tcp\"}'"
stranger "sender is something else" "does not speak" "b'GET / HTTP/1.1' + b'x' * 100"
stranger "endless control message" "at most" "struct.pack('<IIQ', 0x4f50495a, 1, 2**63)"
stranger "control message that stops" "no answer from the peer" "struct.pack('<IIQ', 0x4f50495a, 1, 100) + b'half'"
stranger "hello that is no JSON" "broken control message" "($frame)(1, b'[[[[')"
stranger "another protocol version" "another version" "($frame)(1, b'{\"protocol\":999}')"
stranger "run before the addresses" "where 2 was due" "($frame)(1, $hello) + ($frame)(4, b'{}')"
stranger "transport that does not exist" "no usable transport" \
    "($frame)(1, b'{\"protocol\":1,\"plain_tls\":\"nothing\",\"zip_tls\":\"tcp\"}')"

# ---- a good run, and one without zip
start_receiver
status=0
timeout 60 "$zipperf" model --connect "127.0.0.1:$port" --model "$model" --zip-tls tcp --repeat 2 --size 4K,100001 \
    --json "$dir/out.json" >"$dir/out" 2>"$dir/err" || status=$?
wait_for "$receiver" || status="$status, receiver $?"
receiver=
if [ "$status" = 0 ] && python3 - "$dir/out.json" <<'PYTHON'; then ok "good run, verified rows"; else not_ok "good run" "status $status"; fi
import json, sys
doc = json.load(open(sys.argv[1]))
assert all(key in doc for key in ("tool", "version", "host", "device", "date")), doc.keys()
assert len(doc["rows"]) == 2 * 2 * 3, len(doc["rows"])
assert all(row["verified"] is True and row["gbps_median"] > 0 for row in doc["rows"])
whole = [row for row in doc["rows"] if row["messages"] == 6]
assert {(row["dtype"], row["size"]) for row in whole} == {("bf16", 8000032), ("fp32", 16000032)}, whole
PYTHON

start_receiver
status=0
timeout 20 "$zipperf" model --connect "127.0.0.1:$port" --model "$model" --require-zip >"$dir/out" 2>"$dir/err" || status=$?
check "zip not loaded" $status 3 "did not load the plugin"
status=0
wait_for "$receiver" || status=$?
receiver=
cp "$dir/receiver" "$dir/err"
check "zip not loaded, receiver" $status 1 "the peer gave up: zip was not used"

# ---- one bit changed on the way
cat >"$dir/flip.cc" <<'CPLUSPLUS'
// Changes one bit of the 40th message that is sent: as a broken transport would.
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
using send_t = void *(*)(void *, const void *, size_t, unsigned long, const void *);
extern "C" void *ucp_tag_send_nbx(void *ep, const void *data, size_t size, unsigned long tag, const void *param)
{
    static int count = 0;
    static const send_t real = reinterpret_cast<send_t>(dlsym(RTLD_NEXT, "ucp_tag_send_nbx"));
    if (++count == 40 && size > 0) {
        static char *copy; // for a leak checker
        copy = static_cast<char *>(std::malloc(size));
        std::memcpy(copy, data, size);
        copy[size - 1] = static_cast<char>(copy[size - 1] ^ 0x10);
        data = copy;
    }
    return real(ep, data, size, tag, param);
}
CPLUSPLUS
if ${CXX:-g++} -shared -fPIC -D_GNU_SOURCE "$dir/flip.cc" -o "$dir/flip.so" -ldl 2>"$dir/err"; then
    start_receiver
    status=0
    ASAN_OPTIONS=verify_asan_link_order=0 LD_PRELOAD=$dir/flip.so timeout 20 "$zipperf" model --connect "127.0.0.1:$port" --model "$model" --zip-tls tcp \
        --repeat 9 --json "$dir/flip.json" >"$dir/out" 2>"$dir/err" || status=$?
    check "one changed bit" $status 2 "tensor 'w[0-9]' .* did not arrive as it was sent"
    [ ! -e "$dir/flip.json" ] || not_ok "one changed bit" "results were written all the same"
    wait_for "$receiver" || true
    receiver=
else
    echo "ok - one changed bit # SKIP no compiler"
fi

# ---- peers that die or hang in the middle of a run
# dies NAME VICTIM SIGNAL STATUS TEXT: the other one's end
dies() {
    local name=$1 victim=$2 signal=$3 wanted=$4 text=$5 status=0 sender other=sender
    start_receiver --timeout 2
    "$zipperf" model --connect "127.0.0.1:$port" --model "$model" --plain-tls "$tls" --zip-tls "$tls" --repeat 1000 --no-sweep --timeout 2 \
        >"$dir/out" 2>"$dir/sender" &
    sender=$!
    sleep 1.5
    local -A pid=([sender]=$sender [receiver]=$receiver)
    [ "$victim" = sender ] && other=receiver
    kill "-$signal" "${pid[$victim]}"
    [ "$signal" != KILL ] || wait "${pid[$victim]}" 2>/dev/null
    wait_for "${pid[$other]}" || status=$?
    cp "$dir/$other" "$dir/err"
    check "$name" $status "$wanted" "$text"
    kill -9 "${pid[$victim]}" 2>/dev/null
    wait "$sender" "$receiver" 2>/dev/null
    receiver=
}
all_deaths() {
    dies "receiver killed, $tls" receiver KILL 1 "the peer's process ended"
    dies "sender killed, $tls" sender KILL 1 "the peer's process ended"
    dies "receiver stopped, $tls" receiver STOP 1 "hangs or the network is down"
    dies "sender stopped, $tls" sender STOP 1 "hangs or the network is down"
    dies "sender interrupted, receiver ends, $tls" sender INT 1 "the peer gave up: interrupted"
    dies "receiver interrupted, sender ends, $tls" receiver INT 1 "the peer gave up: interrupted"
}
all_deaths

start_receiver
kill -INT "$receiver"
status=0
wait_for "$receiver" || status=$?
receiver=
cp "$dir/receiver" "$dir/err"
check "interrupted while waiting" $status 130 "interrupted"

if [ -n "$plugin" ]; then
    export UCX_PLUGIN_PATH=$plugin UCX_ZIP_MEM_TYPES=host UCX_ZIP_BYPASS=never # on loopback it would have nothing to do
    start_receiver
    status=0
    timeout 60 "$zipperf" model --connect "127.0.0.1:$port" --model "$model" --require-zip --repeat 3 --size 100001,3M \
        >"$dir/out" 2>"$dir/err" || status=$?
    wait_for "$receiver" || status="$status, receiver $?"
    receiver=
    if [ "$status" = 0 ]; then ok "good run over zip"; else not_ok "good run over zip" "status $status"; fi

    tls=zip,tcp
    mkdir "$dir/shared"
    UCX_POSIX_DIR=$dir/shared all_deaths
    left=$(ls "$dir/shared")
    if [ -z "$left" ]; then ok "no shared memory left"; else not_ok "no shared memory left" "$left"; fi
fi

echo "$passed passed, $failed failed"
[ $failed = 0 ]
