#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
# zipperf p2p: transfers on the wires that a machine without a card or a GPU has, verified; one clear line for what is wrong; nothing left
# behind, however it ends.
# usage: test_p2p.sh PATH_OF_ZIPPERF FOLDER_OF_THE_PLUGIN [wires]   (UCX must be found: LD_LIBRARY_PATH)
# wires: the good runs alone, on all wires, which is what another UCX may change.
# With ZIP_TEST_VERBS, the software verbs device, and a zipperf that is bound to a UCX with rc, that wire is tested too. With ZIP_TEST_FAKE_CUDA,
# the folder of a libcuda.so.1 for tests (host memory in place of a GPU's), the way of CUDA memory is.
set -u

zipperf=${1:-build/src/tools/zipperf}
plugin=${2:-build/src/uct/zip/.libs}
part=${3:-all}
[ -x "$zipperf" ] || { echo "not ok - no zipperf at $zipperf"; exit 1; }
dir=$(mktemp -d)
run=
trap '[ -z "$run" ] || kill "$run" 2>/dev/null; rm -rf "$dir"' EXIT
verbs=${ZIP_TEST_VERBS:-}
unset UCX_PLUGIN_PATH UCX_TLS UCX_NET_DEVICES ZIP_TEST_VERBS
export UCX_MODULES=^efa # a wheel's and the system's libefa would load libnl twice, which crashes at exit
export TMPDIR=$dir/tmp # what it leaves here is found
mkdir "$TMPDIR"
passed=0
failed=0

ok() { passed=$((passed + 1)); echo "ok - $1"; }
not_ok() {
    failed=$((failed + 1))
    echo "not ok - $1: $2"
    sed 's/^/#   /' "$dir/err" 2>/dev/null | tail -n 5
}
error_lines() { grep -vE '^ *[0-9]+%  |^$' "$1"; }

# check NAME STATUS WANTED_STATUS TEXT: the exit status and the one line of stderr, which is in $dir/err
check() {
    local name=$1 status=$2 wanted=$3 text=$4
    if [ "$status" = 124 ]; then
        not_ok "$name" "hangs"
    elif [ "$status" != "$wanted" ]; then
        not_ok "$name" "exit status $status instead of $wanted"
    elif [ "$(error_lines "$dir/err" | wc -l)" != 1 ]; then
        not_ok "$name" "$(error_lines "$dir/err" | wc -l) lines instead of one"
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
    timeout 20 "$zipperf" p2p "$@" >"$dir/out" 2>"$dir/err" || status=$?
    check "$name" $status 1 "$text"
}

# Processes of zipperf in the role of a side, whose folder for temporary files is ours.
sides() {
    local pid
    for pid in $(pgrep -f 'p2p-part [12]$'); do
        tr '\0' '\n' <"/proc/$pid/environ" 2>/dev/null | grep -qx "TMPDIR=$TMPDIR" && echo "$pid"
    done
}

# left NAME: that no process, no file and no shared memory is left of what ran
left() {
    local i files
    for i in $(seq 50); do
        [ -n "$(sides)" ] || break
        sleep 0.1
    done
    files=$(find "$TMPDIR" -mindepth 1 | head -n 3; find /dev/shm -name '*zipperf.*' -newer "$dir/started" 2>/dev/null | head -n 3)
    if [ -n "$(sides)" ]; then
        not_ok "$1: nothing is left" "processes $(sides)"
    elif [ -n "$files" ]; then
        not_ok "$1: nothing is left" "$files"
    else
        ok "$1: nothing is left"
    fi
}
: >"$dir/started"

# ---- bad input
with=(--plugin "$plugin")
if [ "$part" = all ]; then
    fails "no plugin" "needs the plugin" --strategy plain
    fails "another folder than the plugin's" "no libuct_zip.so in" --plugin "$dir"
    fails "unknown strategy" "unknown strategy fast" "${with[@]}" --strategy fast
    fails "a strategy twice" "names ucx twice" --strategy ucx,ucx
    fails "variables of a strategy that is not measured" "does not name" "${with[@]}" --strategy ucx --env-of plain:A=1
    fails "variables without a strategy" "STRATEGY:KEY=VALUE" --strategy ucx --env-of UCX_A=1
    fails "a variable without a value" "KEY=VALUE" --strategy ucx --env UCX_A
    fails "unknown wire" "not in {" --wire ib
    fails "custom wire without transports" "needs --tls" --strategy ucx --wire custom
    fails "rc without its device" "needs the software verbs device" --strategy ucx --wire rc
    fails "rc with no such device" "no file" --strategy ucx --wire rc --verbs "$dir/libswverbs.so"
    fails "a wire's speed that is none" "not a number of 10^9" --strategy ucx --wire rc --verbs /bin/true --wire-gbps fast
    fails "unknown operation" "not in {" --op get
    fails "unknown memory" "not in {" --memory rocm
    fails "several GPUs that puts go to" "are for --op send alone" --strategy ucx --op send,put --to-gpu 0,1
    fails "unknown type" "fp17" --dtype fp17
    fails "bad size" "unknown unit" --strategy ucx --size 64X
    fails "size beyond the memory" "does not fit" --strategy ucx --size 999999G
    fails "window beyond the memory" "do not fit" "${with[@]}" --size 64M --window 256
    fails "bad sweep" "FROM:TO" --strategy ucx --sweep 1M:64K
    fails "no sweep" "FROM:TO" --strategy ucx --sweep 1M
    fails "misaligned too far" "misalign" --misalign 256
    fails "weights without a model" "belong together" --data weights
    fails "unwritable JSON" "cannot write" --strategy ucx --json "$dir/no/such/folder.json"
    fails "unwritable logs" "cannot make the folder" --strategy ucx --logs /proc/nowhere
    fails "no such transport" "no usable transport" --strategy ucx --wire custom --tls nothing
    if ldconfig -p | grep -q 'libcuda\.so\.1'; then
        echo "ok - no GPU # SKIP there is a driver"
    else
        fails "no GPU" "no CUDA driver (libcuda.so.1)" --strategy ucx --memory cuda
    fi
    status=0
    timeout 20 env PATH=/nowhere "$zipperf" p2p --strategy ucx --mps >"$dir/out" 2>"$dir/err" || status=$?
    check "no MPS" $status 1 "no nvidia-cuda-mps-control in PATH"
    left "bad input"
fi

# ---- good runs
# good NAME PYTHON ARGUMENTS...: a run over zip without bypass, and what holds of its `rows` (and `doc`)
good() {
    local name=$1 python=$2 status=0
    shift 2
    rm -f "$dir/out.json"
    timeout 90 "$zipperf" p2p "${with[@]}" --rounds 2 --iterations 3 --warmup 2 --source-size 4M --env UCX_ZIP_BYPASS=never --json "$dir/out.json" "$@" \
        >"$dir/out" 2>"$dir/err" || status=$?
    ! grep -q 'warning:' "$dir/err" || status=warning
    if [ "$status" = 0 ] && python3 - "$dir/out.json" "$python" 2>>"$dir/err" <<'PYTHON'; then ok "$name"; else not_ok "$name" "status $status"; fi
import json, sys
doc = json.load(open(sys.argv[1]))
rows = doc["rows"]
assert doc["tool"] == "zipperf p2p" and all(key in doc for key in ("version", "host", "device", "date"))
assert rows and all(row["verified"] is True and row["gbps_median"] > 0 and row["us_median"] > 0 and row["repeats"] == 6 for row in rows)
assert all(row["gbps_p10"] <= row["gbps_median"] <= row["gbps_p90"] and row["mps"] is False for row in rows)
of = {}
for row in rows:
    of.setdefault(row["strategy"], []).append(row)
exec(sys.argv[2])
PYTHON
}
by_tcp='
assert list(of) == ["ucx", "plain", "auto"] and len(rows) == 6, list(of)
assert {(r["wire"], r["direction"], r["memory"], r["to_memory"], r["in_process"]) for r in rows} == {("tcp loopback", "send", "host", "host", False)}
assert all("ratio" not in r and "zip" not in r["lanes"] for r in of["ucx"])
assert all(0.6 < r["ratio"] < 0.75 and "zip/lo" in r["lanes"] for r in of["auto"]), of["auto"]
for r in rows:
    best = max(r["ucx_gbps_median"], r["plain_gbps_median"])
    assert abs(r["speedup"] - r["gbps_median"] / best) < 1e-6 and abs(r["speedup_plain"] - r["gbps_median"] / r["plain_gbps_median"]) < 1e-6'
good "two processes over tcp" "$by_tcp" --size 100001,1M
good "messages both ways, several at a time" 'assert all(r["window"] == 3 and r["direction"] == "bidirectional" for r in rows)
assert all(0.6 < r["ratio"] < 0.75 for r in of["auto"]), of["auto"]' --size 200000 --op bidirectional --window 3 --strategy ucx,auto
good "puts" 'assert {r["direction"] for r in rows} == {"put"} and 0.6 < of["auto"][0]["ratio"] < 0.75' --size 200000 --op put --window 2 --strategy ucx,auto
good "two threads of one process" 'assert all(r["in_process"] for r in rows) and 0.6 < of["auto"][0]["ratio"] < 0.75' \
    --size 200000 --in-process --strategy ucx,auto
good "misaligned, random bits" 'assert all(r["misalign"] == 3 and r["data"] == "random" for r in rows) and 0.99 < of["auto"][0]["ratio"] < 1.02' \
    --size 200000 --misalign 3 --data random --strategy ucx,auto --not-registered
good "shared memory" 'assert {r["wire"] for r in rows} == {"shared memory"} and 0.8 < of["auto"][0]["ratio"] < 0.9, of' \
    --size 1M --wire shm --dtype fp32 --strategy ucx,auto
good "another wire, under a name, by a strategy of its own" 'assert {r["wire"] for r in rows} == {"mine"} and list(of) == ["one", "ucx"]
assert 0.9 < of["one"][0]["ratio"] < 1.1 and "setting" in of["ucx"][0]' \
    --size 200000 --wire custom --tls tcp --wire-name mine --strategy one,ucx --env-of one:UCX_ZIP_DTYPE=none --ucx-scheme default,put_zcopy
good "every power of two" 'assert [r["size"] for r in of["ucx"]] == [65536, 131072, 262144] and "speedup" in of["ucx"][0]' --sweep 64K:300K --strategy ucx
if [ -n "$verbs" ]; then
    good "rc on the software verbs device" '
assert [r["wire"] for r in rows] == ["rc emulated 0.5 GB/s"] * 2 + ["rc emulated 1 GB/s"] * 2, rows
assert all("rc_verbs/swverbs0:1" in r["lanes"] and r["setting"] for r in of["ucx"])
assert all(r["gbps_median"] < r["wire_gbps"] for r in of["ucx"])
assert all(0.6 < r["ratio"] < 0.75 and r["bound_gbps"] == r["wire_gbps"] / r["ratio"] for r in of["auto"]), of["auto"]' \
        --size 1M --wire rc --wire-gbps 0.5,1 --verbs "$verbs" --strategy ucx,auto
fi
if [ -n "${ZIP_TEST_FAKE_CUDA:-}" ]; then
    LD_LIBRARY_PATH=$ZIP_TEST_FAKE_CUDA:${LD_LIBRARY_PATH:-} good "the way of CUDA memory, with a driver for tests" '
assert {(r["memory"], r["to_memory"]) for r in rows} == {("cuda", "cuda")} and doc["device"] != ""' \
        --size 100001,40M --memory cuda --strategy ucx --wire custom --tls tcp --env UCX_MODULES=^cuda --env UCX_NET_DEVICES=lo
    LD_LIBRARY_PATH=$ZIP_TEST_FAKE_CUDA:${LD_LIBRARY_PATH:-} good "messages to two GPUs in turn, with a driver for tests" '
assert {(r["gpus"], r["window"]) for r in rows} == {("0 to 0 and 1", 3)}' \
        --size 300001 --window 3 --memory cuda --to-gpu 0,1 --strategy ucx --wire custom --tls tcp --env UCX_MODULES=^cuda --env UCX_NET_DEVICES=lo
fi
left "good runs"
if [ "$part" = wires ]; then
    echo "$passed passed, $failed failed"
    exit $((failed > 0))
fi

# ---- bits that change on the way
cat >"$dir/flip.cc" <<'CPLUSPLUS'
// Changes one bit of the third message that is sent or put: as a broken transport would.
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
static const void *flipped(const void *data, size_t size)
{
    static int count = 0;
    if (size < 100000 || ++count != 3) {
        return data;
    }
    static char *copy;
    copy = static_cast<char *>(std::malloc(size));
    std::memcpy(copy, data, size);
    copy[70000] = static_cast<char>(copy[70000] ^ 0x10);
    return copy;
}
extern "C" void *ucp_tag_send_nbx(void *ep, const void *data, size_t size, unsigned long tag, const void *param)
{
    using send_t = void *(*)(void *, const void *, size_t, unsigned long, const void *);
    static const send_t real = reinterpret_cast<send_t>(dlsym(RTLD_NEXT, "ucp_tag_send_nbx"));
    return real(ep, flipped(data, size), size, tag, param);
}
extern "C" void *ucp_put_nbx(void *ep, const void *data, size_t size, unsigned long address, void *key, const void *param)
{
    using put_t = void *(*)(void *, const void *, size_t, unsigned long, void *, const void *);
    static const put_t real = reinterpret_cast<put_t>(dlsym(RTLD_NEXT, "ucp_put_nbx"));
    return real(ep, flipped(data, size), size, address, key, param);
}
CPLUSPLUS
if ${CXX:-g++} -shared -fPIC -D_GNU_SOURCE "$dir/flip.cc" -o "$dir/flip.so" -ldl 2>"$dir/err"; then
    # the copy is memory of its own: --not-registered
    for op in send put bidirectional; do
        for where in "" --in-process; do
            rm -f "$dir/flip.json"
            status=0
            timeout 30 "$zipperf" p2p "${with[@]}" --strategy ucx,plain --env-of "plain:LD_PRELOAD=$dir/flip.so" --size 100001 --op $op --rounds 3 $where \
                --not-registered --json "$dir/flip.json" >"$dir/out" 2>"$dir/err" || status=$?
            check "one changed bit, $op $where" $status 2 \
                "strategy plain, [a-z]*: a message of 97.7 KiB (100001 bytes, $op, iteration [23], message 1 of 1) .* from byte 70000 on (.*; 1 of the 34465 bytes"
            [ ! -e "$dir/flip.json" ] || not_ok "one changed bit, $op" "results were written all the same"
        done
    done
    timeout 30 "$zipperf" p2p --strategy ucx --env "LD_PRELOAD=$dir/flip.so" --size 100001 --rounds 3 --no-verify --not-registered \
        --json "$dir/flip.json" >"$dir/out" 2>"$dir/err"
    if [ $? = 0 ] && grep -q '"verified": false' "$dir/flip.json"; then ok "not verified, and says so"; else not_ok "not verified, and says so" "$?"; fi
else
    echo "ok - one changed bit # SKIP no compiler"
fi
left "changed bits"

# ---- processes that die or hang, and signals
start_long() {
    "$zipperf" p2p "${with[@]}" --strategy ucx,auto --size 256K --rounds 10000 --timeout 2 "$@" >"$dir/out" 2>"$dir/err" &
    run=$!
    local i
    for i in $(seq 100); do
        [ "$(sides | wc -l)" -lt 4 ] || break
        sleep 0.1
    done
    sleep 1
}
# wait_for PID: its exit status, 124 after 60 s
wait_for() {
    local i
    for i in $(seq 600); do
        kill -0 "$1" 2>/dev/null || { wait "$1"; return; }
        sleep 0.1
    done
    kill -9 "$1"
    wait "$1" 2>/dev/null
    return 124
}
for number in 1 4; do
    start_long
    kill -KILL "$(sides | sed -n ${number}p)"
    status=0
    wait_for "$run" || status=$?
    check "side $number killed" $status 1 "its process was killed by signal 9"
    run=
done
left "a side killed"
start_long
kill -STOP "$(sides | sed -n 2p)"
status=0
wait_for "$run" || status=$?
check "a side that hangs" $status 1 "longer than 2 s\|no answer for\|hangs"
run=
left "a side that hangs"
for signal in INT TERM; do
    start_long
    kill -$signal "$run"
    status=0
    wait_for "$run" || status=$?
    check "signal $signal" $status 130 "interrupted"
    run=
    left "signal $signal"
done
start_long
kill -KILL "$run"
wait "$run" 2>/dev/null
run=
rm -rf "${TMPDIR:?}"/* # nobody could
left "killed itself"

# ---- MPS, with a control program for tests
mkdir "$dir/bin"
cat >"$dir/bin/nvidia-cuda-mps-control" <<'SCRIPT'
#!/bin/bash
log=$(dirname "$0")/../mps
case ${1:-} in
    -d)
        [ ! -e "$log.broken" ] || { echo "no MPS today" >&2; exit 1; }
        [ -d "$CUDA_MPS_LOG_DIRECTORY" ] || exit 1
        sleep 1000 </dev/null >/dev/null 2>&1 &
        echo $! >"$CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-control.pid"
        echo "$!" >"$log.started" ;;
    *)
        read -r word
        [ "$word" = quit ] || exit 1
        kill "$(cat "$CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-control.pid")"
        echo quit >"$log.quit" ;;
esac
SCRIPT
chmod +x "$dir/bin/nvidia-cuda-mps-control"
runs() { [ -n "$(sed -n 's/^State:\t[^Z]/&/p' "/proc/$1/status" 2>/dev/null)" ]; } # nobody may be there who reaps orphans
# mps_ended NAME: that the daemon was started and has been told to quit
mps_ended() {
    local i
    for i in $(seq 50); do
        [ ! -e "$dir/mps.quit" ] || break
        sleep 0.1
    done
    if [ -e "$dir/mps.started" ] && [ -e "$dir/mps.quit" ] && ! runs "$(cat "$dir/mps.started")"; then
        ok "$1: MPS has ended"
    else
        not_ok "$1: MPS has ended" "$(cd "$dir" && ls mps.* 2>/dev/null)"
    fi
    rm -f "$dir"/mps.*
}
PATH=$dir/bin:$PATH
status=0
timeout 30 "$zipperf" p2p --strategy ucx --size 64K --rounds 1 --mps >"$dir/out" 2>"$dir/err" || status=$?
[ $status = 0 ] && mps_ended "a run" || not_ok "a run with MPS" "status $status"
fails "an error with MPS" "no usable transport" --strategy ucx --wire custom --tls nothing --mps
mps_ended "an error"
for signal in INT KILL; do
    start_long --mps
    kill -$signal "$run"
    wait "$run" 2>/dev/null
    run=
    mps_ended "signal $signal"
done
rm -rf "${TMPDIR:?}"/*
: >"$dir/mps.broken"
fails "MPS that does not start" "did not start (no MPS today)" --strategy ucx --mps
rm -f "$dir"/mps.*
left "MPS"

# ---- a picture
plot=$(dirname "$0")/../../contrib/plot
if /usr/bin/python3 -c 'import matplotlib' 2>/dev/null; then
    timeout 60 "$zipperf" p2p "${with[@]}" --size 64K,256K --rounds 2 --wire tcp,shm --json "$dir/out.json" >"$dir/out" 2>"$dir/err"
    if "$plot" "$dir/out.json" -o "$dir/p2p.png" 2>"$dir/err" && [ -s "$dir/p2p.png" ]; then ok "a picture"; else not_ok "a picture" "$?"; fi
    if "$plot" "$dir/out.json" -o "$dir/p2p.png" --dtype fp64 2>"$dir/err"; then
        not_ok "no picture of what there is not" "exit status 0"
    else
        ok "no picture of what there is not"
    fi
else
    echo "ok - a picture # SKIP no matplotlib"
fi
mkdir "$dir/none"
echo 'raise ImportError' >"$dir/none/matplotlib.py"
PYTHONPATH=$dir/none "$plot" "$dir/out.json" -o "$dir/p2p.png" 2>"$dir/err"
if [ $? = 1 ] && [ "$(cat "$dir/err")" = "plot: error: python3-matplotlib is missing: run contrib/setup" ]; then
    ok "no picture without matplotlib, in a line"
else
    not_ok "no picture without matplotlib, in a line" "$(tail -n 1 "$dir/err")"
fi

echo "$passed passed, $failed failed"
[ $failed = 0 ]
