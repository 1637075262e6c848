#!/bin/bash
# SPDX-License-Identifier: BSD-3-Clause
# Runs programs that know nothing of the software verbs device on it: libibverbs's examples, perftest, and ucx_perftest. They have to
# work, to have used the device, and to measure the bandwidth and the latency that it was set to; never more, never less.
#   test/verbs/test_programs.sh LIBRARY [UCX_PREFIX [works|bandwidth]]     (default of the second: .deps/ucx-1.23 of this tree)
# "bandwidth": only what measures it, for which the machine should be idle; "works": only the rest.
# Needs ibverbs-utils, perftest and iproute2. A reading that is too low is taken again, up to three times, for other programs may have
# had the cores; one that is too high is wrong at once.
set -u
here=$(cd "$(dirname "$0")" && pwd)
[ $# -ge 1 ] && [ $# -le 3 ] && [[ "${3:-works}" =~ ^(works|bandwidth)$ ]] || { sed -n '3,6s/^# \?//p' "$0" >&2; exit 2; }
[ -f "$1" ] || { echo "not ok no file $1"; exit 1; }
library=$(realpath "$1") ucx=${2:-$here/../../.deps/ucx-1.23} only=${3:-}
for program in ibv_devinfo ib_write_bw ss; do
    command -v $program >/dev/null || { echo "not ok no $program: apt-get install ibverbs-utils perftest iproute2"; exit 1; }
done

work=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server" 2>/dev/null; rm -rf "$work"' EXIT
for name in $(compgen -e UCX_) $(compgen -e SWVERBS_); do unset "$name"; done
export SWVERBS_LIBRARY=$library SWVERBS_FABRIC=programs-$$
passed=0 failed=0

# verdict NAME STATUS [FILE...]: one line, and the files where it failed
verdict() {
    local name=$1 status=$2
    shift 2
    if [ "$status" = 0 ]; then
        passed=$((passed + 1))
        echo "ok $name"
    else
        failed=$((failed + 1))
        echo "not ok $name"
        [ $# = 0 ] || tail -n 25 "$@" | sed 's/^/#   /'
    fi
}

holds() { awk "BEGIN { exit !($*) }"; } # an expression of decimals

# device OPTION...: what both sides are started by from here on
device() { launch=("$here/run" --log "$@" --); }

port=$((20000 + $$ % 10000)) # below those that the system gives away
free_port() {
    port=$((port + 1))
    while ss -Htln "sport = :$port" 2>/dev/null | grep -q .; do port=$((port + 1)); done
}

# pair PROGRAM ARGUMENT...: a server and a client, into $work/server and $work/client; both have to end well. Again, where perftest says
# that it could not measure the speed of its clock, for then all its numbers are wrong.
pair() {
    local status
    for _ in 1 2 3; do
        pair_once "$@"
        status=$?
        grep -qs 'Correlation coefficient' "$work/client" "$work/server" || break
    done
    return $status
}

pair_once() {
    local client_status server_status server_arguments=("${@:2}")
    # ucx_perftest's server learns from the client which test to run, but not with which transport of UCT
    if [[ $1 == *ucx_perftest && " $* " != *" -x "* ]]; then server_arguments=(); fi
    free_port
    timeout --kill-after=5 25 "${launch[@]}" "$1" -p "$port" "${server_arguments[@]}" >"$work/server" 2>&1 </dev/null &
    server=$!
    for _ in $(seq 150); do
        ss -Htln "sport = :$port" 2>/dev/null | grep -q . && break
        kill -0 "$server" 2>/dev/null || break
        sleep 0.02
    done
    timeout --kill-after=5 20 "${launch[@]}" "$1" -p "$port" "${@:2}" 127.0.0.1 >"$work/client" 2>&1 </dev/null
    client_status=$?
    [ $client_status = 0 ] || kill "$server" 2>/dev/null
    wait "$server"
    server_status=$?
    server=
    [ $client_status = 0 ] && [ $server_status = 0 ]
}

# carried: bytes that the two sides say, at exit, to have put on the wire
carried() {
    cat "$work/client" "$work/server" | grep -o 'swverbs\[.*' | grep -oE 'sent [0-9]+ bytes' | awk '{ sum += $2 } END { printf "%.0f", sum }'
}

# works NAME BYTES PROGRAM ARGUMENT...: it ends well, and BYTES or more have gone through the device
works() {
    [ "$only" != bandwidth ] || return 0
    local name=$1 bytes=$2 status=1
    shift 2
    if pair "$@"; then
        [ "$(carried)" -ge "$bytes" ]
        status=$?
        [ $status = 0 ] || echo "# $name: the device carried $(carried) bytes, not $bytes"
    fi
    verdict "$name" $status "$work/server" "$work/client"
}

# The lines of numbers of perftest ("size iterations peak average ..." or "size iterations least most ..."), and the last of ucx_perftest
# ("iterations median average overall rate rate ..."). What others log may be glued to their ends.
perftest_rows() { grep -E '^ *[0-9]+ +[0-9]+ +[0-9.]+[[:space:]]+[0-9.]+' "$work/client"; }
ucx_row() { sed 's/^\[thread *[0-9]*\]//' "$work/client" | grep -E '^ *[0-9]+( +[0-9.]+){7}' | tail -n 1; }

# calm: waits, two seconds at most, until nobody else runs; whether that came
calm() {
    local running
    for _ in $(seq 20); do
        read -r _ _ _ running _ </proc/loadavg
        [ "${running%/*}" -gt 1 ] || return 0
        sleep 0.1
    done
    return 1
}

# bandwidth NAME GBPS LOWEST PROGRAM ARGUMENT...: every average is at least LOWEST of GBPS (10^9 bytes a second), and no average and no
# peak is ever above
bandwidth() {
    [ "$only" != works ] || return 0
    local name=$1 gbps=$2 lowest=$3 attempt status low high busy=0
    shift 3
    for attempt in 1 2 3 4; do
        status=1 low=0
        pair "$@" || break
        read -r low high < <(if [[ $1 == *ucx_perftest ]]; then ucx_row | awk '{ print $6, $6, $5 }'; else perftest_rows | awk '{ print $4, $3, $4 }'; fi |
            awk -v unit="$gbps" '
                { if (NR == 1 || $1 < low) low = $1; for (i = 2; i <= NF; i++) if ($i > high) high = $i }
                END { printf "%.4f %.4f\n", low * 1048576 / 1e9 / unit, high * 1048576 / 1e9 / unit }')
        if holds "$high > 1.005 || $low <= 0"; then
            echo "# $name: $low to $high of the bandwidth that was set"
            break
        fi
        holds "$low >= $lowest" && status=0 && break
        echo "# $name: only $low of the bandwidth that was set, attempt $attempt"
        calm || busy=$((busy + 1))
    done
    if [ $busy = 4 ]; then
        echo "# $name: not judged, for others use this machine all the time"
        return
    fi
    verdict "$name ($low)" $status "$work/server" "$work/client"
}

# latency NAME US PROGRAM ARGUMENT...: no time is below US (perftest: the smallest of each row; ucx_perftest: the average)
latency() {
    [ "$only" != bandwidth ] || return 0
    local name=$1 least=$2 status=1 found=0
    shift 2
    if pair "$@"; then
        found=$(if [[ $1 == *ucx_perftest ]]; then ucx_row; else perftest_rows; fi | awk '{ if (NR == 1 || $3 < least) least = $3 } END { print least + 0 }')
        holds "$found >= $least" && status=0
    fi
    verdict "$name ($found us)" $status "$work/server" "$work/client"
}

# ---- what there is

looks_around() {
    launch=(env) # without the device
    if [ -n "$(ls /sys/class/infiniband 2>/dev/null)" ]; then
        echo "# this machine has RDMA devices of its own: no checks of programs without the device"
    else
        ! ibv_devinfo >"$work/out" 2>&1
        verdict "without the device ibv_devinfo finds none" $? "$work/out"
        ! timeout 10 ib_write_bw >"$work/out" 2>&1 </dev/null
        verdict "without the device ib_write_bw does not start" $? "$work/out"
    fi
    "$here/run" -- ibv_devices >"$work/out" 2>&1 && grep -q swverbs0 "$work/out" && ! grep -q swverbs1 "$work/out"
    verdict "ibv_devices" $? "$work/out"
    "$here/run" -- ibv_devinfo -v >"$work/out" 2>&1 && grep -q 'hca_id:.*swverbs0' "$work/out" && grep -q PORT_ACTIVE "$work/out"
    verdict "ibv_devinfo -v" $? "$work/out"
    "$here/run" --devices 2 -- ibv_devices >"$work/out" 2>&1 && grep -q swverbs0 "$work/out" && grep -q swverbs1 "$work/out"
    verdict "ibv_devices with two devices" $? "$work/out"
    ! "$here/run" -- ibv_devinfo -d swverbs7 >"$work/out" 2>&1
    verdict "ibv_devinfo of a device that is not there fails" $? "$work/out"
}
[ "$only" = bandwidth ] || looks_around

# ---- libibverbs's examples

examples() { # PREFIX OF NAMES
    works "$1ibv_rc_pingpong, 4 KiB, validated" $((200 * 4096 * 2)) ibv_rc_pingpong -c -n 200
    works "$1ibv_ud_pingpong" $((500 * 1024 * 2)) ibv_ud_pingpong -s 1024 -n 500
    works "$1ibv_srq_pingpong, 16 queue pairs" $((500 * 4096 * 2)) ibv_srq_pingpong -n 500
}
device
examples ""
works "ibv_rc_pingpong, validated, asleep" $((200 * 4096 * 2)) ibv_rc_pingpong -c -e -n 200
works "ibv_rc_pingpong, 1 MiB, validated" $((50 * 1048576 * 2)) ibv_rc_pingpong -c -s 1048576 -n 50
works "ibv_rc_pingpong, 1 byte" 200 ibv_rc_pingpong -s 1 -n 200
works "ibv_rc_pingpong, MTU 256, few receives" $((300 * 3001 * 2)) ibv_rc_pingpong -c -s 3001 -m 256 -r 2 -n 300
works "ibv_ud_pingpong, asleep" $((200 * 1000 * 2)) ibv_ud_pingpong -s 1000 -e -n 200
works "ibv_srq_pingpong, asleep, 3 queue pairs" $((200 * 4096 * 2)) ibv_srq_pingpong -e -q 3 -n 200
device --devices 2
works "ibv_rc_pingpong on swverbs1" $((200 * 4096 * 2)) ibv_rc_pingpong -c -d swverbs1 -n 200
device --reorder 200 --seed 7
works "ibv_srq_pingpong, out of order" $((500 * 4096 * 2)) ibv_srq_pingpong -n 500

mkdir "$work/instead" # the library in the place of the real one, not preloaded
ln -s "$library" "$work/instead/libibverbs.so.1"
launch=(env LD_LIBRARY_PATH="$work/instead" SWVERBS_LOG=1)
if [ "$only" != bandwidth ]; then
    "${launch[@]}" ibv_devinfo >"$work/out" 2>&1 && grep -q 'hca_id:.*swverbs0' "$work/out"
    verdict "as libibverbs.so.1: ibv_devinfo" $? "$work/out"
fi
examples "as libibverbs.so.1: "
works "as libibverbs.so.1: ib_write_bw" $((1000 * 65536)) ib_write_bw -F -n 1000

# ---- perftest

device
works "ib_write_bw, 2 bytes to 8 MiB" $((5 * 8388608)) ib_write_bw -F -a -n 5 # -a: perftest itself takes seconds for its 23 sizes
for size in 1 4097 1000001; do
    works "ib_read_bw, $size bytes" $((size * 300)) ib_read_bw -F -s $size -n 300
    works "ib_send_bw, $size bytes" $((size * 300)) ib_send_bw -F -s $size -n 300
done
works "ib_send_bw, shared receive queue, 4 queue pairs" $((1000 * 65536)) ib_send_bw -F -q 4 --use-srq -n 1000
works "ib_send_bw, UD" $((2000 * 2048)) ib_send_bw -F -c UD -s 2048 -n 2000
works "ib_send_bw, asleep" $((1000 * 65536)) ib_send_bw -F -e -n 1000
works "ib_write_bw, inline" $((2000 * 32)) ib_write_bw -F -I 32 -s 32 -n 2000
works "ib_write_bw, 16 requests a call, 4 queue pairs" $((1600 * 65536)) ib_write_bw -F -l 16 -q 4 -n 1600
works "ib_write_bw, 8 requests a completion" $((1600 * 65536)) ib_write_bw -F -Q 8 -n 1600
works "ib_atomic_bw, fetch and add" $((2000 * 8)) ib_atomic_bw -F -A FETCH_AND_ADD -n 2000
works "ib_atomic_bw, compare and swap" $((2000 * 8)) ib_atomic_bw -F -A CMP_AND_SWAP -n 2000
works "ib_send_lat, asleep" $((500 * 64 * 2)) ib_send_lat -F -e -s 64 -n 500
works "ib_send_lat, UD" $((500 * 64 * 2)) ib_send_lat -F -c UD -s 64 -n 500

pair ib_write_bw -F -s 1048576 -n 500
fastest=$(perftest_rows | awk '{ print $4 * 1048576 / 1e9 }')
verdict "ib_write_bw, no bandwidth set (${fastest:-none} GB/s)" $? "$work/server" "$work/client"
for gbps in 0.5 2; do
    [ "$only" != works ] || break
    if holds "${fastest:-0} < 2 * $gbps"; then
        echo "# no checks at $gbps GB/s: this machine copies ${fastest:-0} GB/s"
        continue
    fi
    device --gbps $gbps
    short=$(awk "BEGIN { print int($gbps * 0.15e9 / 65536) }") # messages of 0.15 s
    for test in write read send; do
        bandwidth "ib_${test}_bw at $gbps GB/s, 64 KiB" $gbps 0.95 ib_${test}_bw -F -s 65536 -n "$short"
        bandwidth "ib_${test}_bw at $gbps GB/s, 4 MiB" $gbps 0.95 ib_${test}_bw -F -s 4194304 -n $((short / 64 + 5))
    done
done
device --gbps 1
for size in 2048 16384; do # so many messages that they may be slower, but not faster
    bandwidth "ib_write_bw at 1 GB/s, $size bytes" 1 0.01 ib_write_bw -F -s $size -n 5000
    bandwidth "ib_send_bw at 1 GB/s, $size bytes" 1 0.01 ib_send_bw -F -s $size -n 5000
done
bandwidth "ib_write_bw at 1 GB/s, 4 queue pairs" 1 0.95 ib_write_bw -F -q 4 -s 65536 -n 2000
bandwidth "ib_read_bw at 1 GB/s, 8 queue pairs" 1 0.95 ib_read_bw -F -q 8 -s 262144 -n 500
bandwidth "ib_send_bw at 1 GB/s, asleep" 1 0.95 ib_send_bw -F -e -s 1048576 -n 150
bandwidth "ib_send_bw at 1 GB/s, 64 KiB, asleep" 1 0.95 ib_send_bw -F -e -s 65536 -n 2400
bandwidth "ib_write_bw at 1 GB/s, both ways" 2 0.95 ib_write_bw -F -b -s 1048576 -n 150
bandwidth "ib_send_bw at 1 GB/s, both ways, 2 queue pairs" 2 0.95 ib_send_bw -F -b -q 2 -s 1048576 -n 80
bandwidth "ib_read_bw at 1 GB/s, both ways" 2 0.95 ib_read_bw -F -b -s 1048576 -n 150
device --gbps 1 --devices 2
bandwidth "ib_write_bw at 1 GB/s on swverbs1" 1 0.95 ib_write_bw -F -d swverbs1 -s 262144 -n 600
device --gbps 1 --latency 50
bandwidth "ib_write_bw at 1 GB/s and 50 us" 1 0.95 ib_write_bw -F -s 262144 -n 600
bandwidth "ib_read_bw at 1 GB/s and 50 us" 1 0.95 ib_read_bw -F -s 1048576 -n 150

device --latency 20
latency "ib_write_lat at 20 us" 20 ib_write_lat -F -s 8 -n 1000
latency "ib_send_lat at 20 us" 20 ib_send_lat -F -s 8 -n 1000
latency "ib_read_lat at 20 us, there and back" 40 ib_read_lat -F -s 8 -n 1000
latency "ib_atomic_lat at 20 us, there and back" 40 ib_atomic_lat -F -n 1000
device --latency 500 --gbps 1
latency "ib_write_lat at 500 us and 1 GB/s, 256 KiB" 762 ib_write_lat -F -s 262144 -n 100
latency "ib_read_lat at 500 us and 1 GB/s, 256 KiB" 1262 ib_read_lat -F -s 262144 -n 100

if [ "$only" != bandwidth ]; then
    device --rate 20000
    pair ib_write_bw -F -s 64 -n 4000
    rate=$(perftest_rows | awk '{ print $5 * 1e6 }')
    holds "${rate:-0} > 0 && ${rate:-0} <= 20000 * 1.005"
    verdict "ib_write_bw at 20000 messages a second (${rate:-none})" $? "$work/server" "$work/client"
fi

# ---- unmodified UCX

perftest=$ucx/bin/ucx_perftest
[ -x "$perftest" ] || { verdict "no $perftest" 1; echo "$passed passed, $failed failed"; exit 1; }
export LD_LIBRARY_PATH=$ucx/lib UCX_MODULES=^efa UCX_TLS=rc_verbs,ud_verbs UCX_NET_DEVICES=swverbs0:1
# A strong fence of UCX reads 8 bytes with an invalid remote key, which breaks the queue pair on any card that checks; one-sided tests fence.
export UCX_FENCE_MODE=weak

if [ "$only" != bandwidth ]; then
    launch=(env)
    ! pair "$perftest" -t tag_lat -n 10
    verdict "without the device ucx_perftest fails" $? "$work/server" "$work/client"
fi

device
works "tag_lat, 8 bytes" $((2000 * 8 * 2)) "$perftest" -t tag_lat -n 1000 -w 10
works "tag_lat, 1 MiB" $((100 * 1048576 * 2)) "$perftest" -t tag_lat -s 1000001 -n 110 -w 5
for size in 8 8192 65536 1000001 8388608; do
    count=$((size < 100000 ? 2000 : 40))
    works "tag_bw, $size bytes" $((size * count)) "$perftest" -t tag_bw -s $size -n $count -w 5
done
works "tag_bw, 1 MB, asleep" $((100 * 1000001)) "$perftest" -t tag_bw -s 1000001 -n 100 -w 5 -E sleep
works "tag_lat, asleep" $((300 * 8 * 2)) "$perftest" -t tag_lat -n 300 -w 5 -E sleep
works "tag_bw, two threads" $((2 * 100 * 1000001)) "$perftest" -t tag_bw -s 1000001 -n 100 -w 5 -M multi -T 2
works "ucp_am_lat, 4 KiB" $((1000 * 4096 * 2)) "$perftest" -t ucp_am_lat -s 4096 -n 1000 -w 5
works "ucp_am_bw, 1 MB, asleep" $((100 * 1000001)) "$perftest" -t ucp_am_bw -s 1000001 -n 100 -w 5 -E sleep
works "stream_lat, 64 KiB" $((50 * 65536 * 2)) "$perftest" -t stream_lat -s 65536 -n 50 -w 5
works "ucp_put_lat, 64 KiB" $((50 * 65536 * 2)) "$perftest" -t ucp_put_lat -s 65536 -n 50 -w 5
works "ucp_put_bw, 1 MB" $((100 * 1000001)) "$perftest" -t ucp_put_bw -s 1000001 -n 100 -w 5
works "ucp_get, 1 MB" $((100 * 1000001)) "$perftest" -t ucp_get -s 1000001 -n 100 -w 5
works "ucp_fadd" $((300 * 8)) "$perftest" -t ucp_fadd -n 300 -w 5
works "ucp_cswap" $((300 * 8)) "$perftest" -t ucp_cswap -n 300 -w 5
for test in "am_bw -D zcopy -s 4096" "put_bw -D zcopy -s 65536" "get -D zcopy -s 65536" "am_lat" "put_lat" "fadd" "cswap"; do
    works "uct $test over rc_verbs" 8000 "$perftest" -d swverbs0:1 -x rc_verbs -t $test -n 1000 -w 5
done
works "uct am_bw over ud_verbs" 8000 "$perftest" -d swverbs0:1 -x ud_verbs -t am_bw -n 1000 -w 5

device --gbps 1
# Two programs that spin leave nothing of two cores to the device, so only those that sleep have to come near.
for test in tag_bw ucp_am_bw; do
    bandwidth "$test at 1 GB/s, 1 MiB, asleep" 1 0.95 "$perftest" -t $test -s 1048576 -n 200 -w 5 -f -E sleep
done
bandwidth "stream_bw at 1 GB/s, 1 MiB, asleep" 1 0.1 "$perftest" -t stream_bw -s 1048576 -n 100 -w 5 -f -E sleep # copies of 8 KiB
bandwidth "tag_bw at 1 GB/s, 8 MiB, asleep" 1 0.95 "$perftest" -t tag_bw -s 8388608 -n 25 -w 2 -f -E sleep
bandwidth "tag_bw at 1 GB/s, 64 KiB, spinning" 1 0.2 "$perftest" -t tag_bw -s 65536 -n 4000 -w 5 -f
bandwidth "tag_bw at 1 GB/s, 8 MiB, spinning" 1 0.5 "$perftest" -t tag_bw -s 8388608 -n 25 -w 2 -f
# 1 GB/s is so slow that UCX prefers puts of copies of 8 KiB, more messages than two cores always manage
UCX_ZCOPY_THRESH=16384 bandwidth "ucp_put_bw at 1 GB/s, 4 MiB, spinning" 1 0.5 "$perftest" -t ucp_put_bw -s 4194304 -n 50 -w 2 -f
UCX_ZCOPY_THRESH=16384 bandwidth "ucp_get at 1 GB/s, 4 MiB, spinning" 1 0.3 "$perftest" -t ucp_get -s 4194304 -n 50 -w 2 -f
device --latency 50
latency "tag_lat at 50 us" 50 "$perftest" -t tag_lat -n 300 -w 5 -f
latency "ucp_put_lat at 50 us" 50 "$perftest" -t ucp_put_lat -n 300 -w 5 -f

echo "$passed passed, $failed failed"
[ $failed = 0 ]
