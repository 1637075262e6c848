#!/bin/bash
# SPDX-License-Identifier: BSD-3-Clause
# Gives the guard wrong copies of ucx_abi.h, one at a time, and wants each refused in one line that
# names the culprit. Every copy is a program and a process of its own: about 0.5 s of processor time.
#
# ZIP_TEST_UCX_LIB: folder of the UCX to test against, required. Optional: ZIP_TEST_UCX_INCLUDE (its
# headers, by default ../include), CXX, JOBS, and a folder to build in as the argument.
set -u
root=$(cd "$(dirname "$0")/../.." && pwd)
lib=${ZIP_TEST_UCX_LIB:?set it to the lib folder of an installed UCX}
include=${ZIP_TEST_UCX_INCLUDE:-$lib/../include}
work=${1:-}
[ -n "$work" ] || { work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT; }
mkdir -p "$work"
abi=$root/src/uct/zip/ucx_abi.h
compile=(${CXX:-g++} -std=c++20 -O0 -isystem "$include")
mutations=()
export UCX_MEM_MMAP_HOOK_MODE=reloc # the default spins for 0.4 s at each start

# refused CULPRIT EDIT...: the guard must answer with a line that matches CULPRIT.
refused() { mutations+=("$(printf '%s\t' refused "$@")"); }

# unseen WHY EDIT...: known to get past the guard, and why. Reported, and an error once it changes.
unseen() { mutations+=("$(printf '%s\t' unseen "$@")"); }

# Edits, of one structure: swap STRUCT MEMBER MEMBER; insert STRUCT MEMBER (a word before it);
# append STRUCT (a word at the end); change STRUCT FROM TO (the first occurrence; STRUCT may be "-").

refused 'Component::query_md_resources' swap Component query_md_resources md_open
refused 'Component::md_open' swap Component md_open cm_open
refused 'Component::cm_open' swap Component cm_open rkey_ptr
refused 'Component::rkey_unpack' swap Component rkey_unpack rkey_ptr
refused 'Component::rkey_release' swap Component rkey_release rkey_compare
refused 'Component::md_config' swap Component md_config cm_config
refused 'Component::tl_list|Component::list' swap Component tl_list list
refused 'Component::flags|Component::md_vfs_init' swap Component flags md_vfs_init
refused 'Component' insert Component name
refused 'Component' insert Component md_config
refused 'Component' insert Component tl_list
refused 'Component' insert Component flags
refused 'Component size' append Component
refused 'Component' change Component UCT_COMPONENT_NAME_MAX 32

refused 'Tl::query_devices' swap Tl query_devices iface_open
refused 'Tl::config|Tl::list' swap Tl config list
refused 'Tl' insert Tl name
refused 'Tl' insert Tl config
refused 'Tl size' append Tl
refused 'Tl' change Tl UCT_TL_NAME_MAX 32
refused 'TlDevice::type' swap TlDevice type sys_device
refused 'TlDevice' insert TlDevice type
refused 'TlDevice' append TlDevice
refused 'TlDevice' change TlDevice UCT_DEVICE_NAME_MAX 64

refused 'Md::ops' swap Md ops component
refused 'Md::ops' insert Md ops
refused 'Md::component' insert Md component
refused 'MdOps::close' swap MdOps close query
refused 'MdOps::query' swap MdOps query mem_alloc
refused 'MdOps::mem_alloc' swap MdOps mem_alloc mem_free
refused 'MdOps::mem_free' swap MdOps mem_free mem_advise
refused 'MdOps::mem_advise' swap MdOps mem_advise mem_query
refused 'MdOps::mem_reg' swap MdOps mem_reg mem_dereg
refused 'MdOps::mem_query' swap MdOps mem_query mem_attach
refused 'MdOps::mkey_pack' swap MdOps mkey_pack mem_attach
refused 'MdOps::detect_memory_type' swap MdOps detect_memory_type mem_elem_pack
refused 'MdOps::close' insert MdOps close
refused 'MdOps::mem_reg' insert MdOps mem_reg

refused 'MdAttr::max_reg' swap MdAttr max_alloc max_reg
refused 'MdAttr::flags' swap MdAttr flags reg_mem_types
refused 'MdAttr::reg_nonblock_mem_types' swap MdAttr reg_nonblock_mem_types cache_mem_types
refused 'MdAttr::detect_mem_types' swap MdAttr gva_mem_types detect_mem_types
refused 'MdAttr::alloc_mem_types' swap MdAttr alloc_mem_types access_mem_types
refused 'MdAttr::access_mem_types' swap MdAttr access_mem_types dmabuf_mem_types
refused 'MdAttr' swap MdAttr reg_cost component_name
refused 'MdAttr::rkey_packed_size' swap MdAttr rkey_packed_size exported_mkey_packed_size
refused 'MdAttr' swap MdAttr local_cpus global_id
refused 'MdAttr' insert MdAttr field_mask
refused 'MdAttr' insert MdAttr reg_mem_types
refused 'MdAttr' insert MdAttr required_mem_flags
refused 'MdAttr' append MdAttr
refused 'MdAttr' change MdAttr UCT_MD_GLOBAL_ID_MAX 64
refused 'MdAttr' change MdAttr 'uint8_t required_mem_flags' 'uint64_t required_mem_flags'

refused 'MemRegParams' swap MemRegParams field_mask flags
refused 'MemRegParams::flags' insert MemRegParams flags
refused 'MemDeregParams::memh' insert MemDeregParams memh
refused 'MemDeregParams::MEMH' change MemDeregParams 'MEMH = 1u << 0' 'MEMH = 1u << 3'

refused 'InternalOps::iface_query_v2' swap InternalOps iface_query_v2 iface_estimate_perf
refused 'InternalOps::iface_estimate_perf' swap InternalOps iface_estimate_perf iface_vfs_refresh
refused 'InternalOps::ep_query' swap InternalOps iface_vfs_refresh ep_query
refused 'InternalOps::ep_query' swap InternalOps ep_query ep_invalidate
refused 'InternalOps::ep_invalidate' swap InternalOps ep_invalidate ep_connect_to_ep_v2
refused 'InternalOps::ep_connect_to_ep_v2' swap InternalOps ep_connect_to_ep_v2 iface_is_reachable_v2
refused 'InternalOps::iface_is_reachable_v2' swap InternalOps iface_is_reachable_v2 ep_is_connected
refused 'InternalOps::ep_is_connected' swap InternalOps ep_is_connected ep_get_device_ep
refused 'InternalOps::ep_get_device_ep' swap InternalOps ep_get_device_ep ep_put_sgl_zcopy
refused 'InternalOps::iface_query_v2' insert InternalOps iface_query_v2
refused 'InternalOps::ep_put_sgl_zcopy' insert InternalOps ep_put_sgl_zcopy

refused 'BaseIface::internal_ops' swap BaseIface internal_ops md
refused 'BaseIface::md' swap BaseIface md worker
refused 'BaseIface::internal_ops' insert BaseIface internal_ops
refused 'BaseIface::md' insert BaseIface md
refused 'BaseIface' change BaseIface 2048 64
refused 'BaseEp' insert BaseEp super
refused 'IfaceConfig' change IfaceConfig 256 16

refused 'PerfAttr::send_pre_overhead' swap PerfAttr send_pre_overhead send_post_overhead
refused 'PerfAttr::send_post_overhead' swap PerfAttr send_post_overhead recv_overhead
refused 'PerfAttr::bandwidth' swap PerfAttr bandwidth path_bandwidth
refused 'PerfAttr' swap PerfAttr latency max_inflight_eps
refused 'PerfAttr::max_inflight_eps' swap PerfAttr max_inflight_eps flags
refused 'PerfAttr' insert PerfAttr operation
refused 'PerfAttr' insert PerfAttr local_sys_device
refused 'PerfAttr' insert PerfAttr latency
refused 'PerfAttr' change PerfAttr 'int operation' 'uint64_t operation'
refused 'PerfAttr::send_pre_overhead' change PerfAttr 'SEND_PRE_OVERHEAD = 1u << 5' 'SEND_PRE_OVERHEAD = 1u << 4'
refused 'PerfAttr::bandwidth' change PerfAttr 'BANDWIDTH = 1u << 8' 'BANDWIDTH = 1u << 9'
refused 'PerfAttr::latency' change PerfAttr 'LATENCY = 1u << 10' 'LATENCY = 1u << 13'
refused 'EP_OP_PUT_ZCOPY' change - 'EP_OP_PUT_ZCOPY = 5' 'EP_OP_PUT_ZCOPY = 4'
refused 'EP_OP_GET_ZCOPY' change - 'EP_OP_GET_ZCOPY = 8' 'EP_OP_GET_ZCOPY = 7'

refused 'ReachableParams::device_addr' swap ReachableParams device_addr iface_addr
refused 'ReachableParams::info_string' swap ReachableParams iface_addr info_string
refused 'ReachableParams::info_string_length' swap ReachableParams info_string_length device_addr_length
refused 'ReachableParams::scope' swap ReachableParams scope device_addr_length
refused 'ReachableParams::info_string' insert ReachableParams field_mask
refused 'ReachableParams' insert ReachableParams device_addr
refused 'ReachableParams::scope' insert ReachableParams scope
refused 'ReachableParams::DEVICE_ADDR' change ReachableParams 'DEVICE_ADDR = 1u << 0' 'DEVICE_ADDR = 1u << 7'
refused 'ReachableParams::IFACE_ADDR|ReachableParams::DEVICE_ADDR' change ReachableParams \
    'DEVICE_ADDR = 1u << 0,\n        IFACE_ADDR = 1u << 1' 'DEVICE_ADDR = 1u << 1, IFACE_ADDR = 1u << 0'
refused 'ReachableParams::INFO_STRING' change ReachableParams \
    'INFO_STRING = 1u << 2,\n        INFO_STRING_LENGTH = 1u << 3' 'INFO_STRING = 1u << 3, INFO_STRING_LENGTH = 1u << 2'
refused 'ReachableParams::info_string' change ReachableParams 'INFO_STRING_LENGTH = 1u << 3' 'INFO_STRING_LENGTH = 1u << 8'
refused 'ReachableParams::SCOPE' change ReachableParams 'SCOPE = 1u << 4' 'SCOPE = 1u << 5'
refused 'ConnectedParams::device_addr' swap ConnectedParams device_addr iface_addr
refused 'ConnectedParams::iface_addr' swap ConnectedParams iface_addr ep_addr
refused 'ConnectedParams::DEVICE_ADDR|ConnectedParams::device_addr' insert ConnectedParams device_addr
refused 'ConnectedParams::DEVICE_ADDR' change ConnectedParams 'DEVICE_ADDR = 1u << 0' 'DEVICE_ADDR = 1u << 3'
refused 'ConnectedParams::EP_ADDR' change ConnectedParams 'EP_ADDR = 1u << 2' 'EP_ADDR = 1u << 1'

unseen 'libuct only passes it on' swap ReachableParams device_addr_length iface_addr_length
unseen 'libuct only passes it on' change ReachableParams 'DEVICE_ADDR_LENGTH = 1u << 5' 'DEVICE_ADDR_LENGTH = 1u << 9'
unseen 'libuct only passes it on' insert ConnectedParams ep_addr
unseen 'libuct only passes it on' swap ConnectToEpParams device_addr_length ep_addr_length
unseen 'libuct only passes it on' change ConnectToEpParams 'EP_ADDR_LENGTH = 1u << 1' 'EP_ADDR_LENGTH = 1u << 2'
unseen 'libucp fills it, no call of libuct reads it' swap PerfAttr local_memory_type remote_memory_type
unseen 'libucp fills it, no call of libuct reads it' change PerfAttr 'OPERATION = 1u << 0' 'OPERATION = 1u << 1'
unseen 'its low half is where the whole was' change Component 'uint64_t flags' 'uint32_t flags'

# Applies an edit to standard input; fails if it changes nothing.
mutate() {
    perl -0777 -e '
        my ($verb, $struct, $from, $to) = @ARGV;
        $_ = my $original = <STDIN>;
        sub member { return qr/[^;{}\x01]*\b\Q$_[0]\E\b[^;{}]*;/ }
        sub edit {
            my ($body) = @_;
            if ($verb eq "swap") {
                my ($a, $b) = (member($from), member($to));
                $body =~ s/($a)/\x01/; my $first = $1;
                $body =~ s/($b)/$first/; my $second = $1;
                $body =~ s/\x01/$second/;
            } elsif ($verb eq "insert") {
                my $a = member($from);
                $body =~ s/($a)/\n    void *inserted;$1/;
            } elsif ($verb eq "append") {
                $body =~ s/$/\n    void *inserted;\n/;
            } else {
                $from =~ s/\\n/\n/g;
                $body =~ s/(?<!\w)\Q$from\E/$to/;
            }
            return $body;
        }
        if ($struct eq "-") { $_ = edit($_); }
        else { s/(\nstruct (?:alignas\(16\) )?$struct \{\n)(.*?)(\n\};)/$1 . edit($2) . $3/se; }
        exit 1 if $_ eq $original;
        print;' -- "$@"
}

# run NUMBER KIND EXPECTED EDIT...: prints one line, "ok" or "not ok".
run() {
    local number=$1 kind=$2 expected=$3 folder answer status
    shift 3
    folder=$work/$number
    mkdir -p "$folder/uct/zip"
    if ! mutate "$@" <"$abi" >"$folder/uct/zip/ucx_abi.h"; then
        echo "not ok $number - $*: changes nothing"
        return
    fi
    if ! { "${compile[@]}" -include "$work/headers.h" -I"$folder" -I"$root/src" -c "$root/src/uct/zip/ucx_guard.cc" -o "$folder/guard.o" &&
            "${compile[@]}" "$work/check_layout.o" "$work/ucx_bind.o" "$folder/guard.o" -ldl -o "$folder/check"; } 2>"$folder/log"; then
        echo "not ok $number - $*: does not compile: $(grep -m1 error "$folder/log")"
        return
    fi
    answer=$("$folder/check" "$lib" 2>&1)
    status=$?
    if [ "$kind" = unseen ]; then
        [ $status -eq 0 ] && echo "ok $number - $* # unseen: $expected" ||
            echo "not ok $number - $*: is seen by now, list it as refused: $answer"
    elif [ $status -ne 1 ] || [ "$(wc -l <<<"$answer")" -ne 1 ] || ! grep -qE "$expected" <<<"$answer"; then
        echo "not ok $number - $*: status $status: $answer"
    else
        echo "ok $number - $*: $answer"
    fi
    rm -rf "$folder"
}

# The headers that no edit touches are read once.
{
    grep -h '^#include <' "$root"/src/uct/zip/ucx_guard.{cc,h}
    echo 'extern "C" {'
    grep -h '^#include <uc' "$root"/src/uct/zip/ucx_{abi,bind}.h
    echo '}'
} >"$work/headers.h"
"${compile[@]}" -x c++-header "$work/headers.h" -o "$work/headers.h.gch" || exit 2

"${compile[@]}" -fPIC -I"$root/src" -c "$root/src/uct/zip/ucx_bind.cc" -o "$work/ucx_bind.o" &&
    "${compile[@]}" -I"$root/src" -c "$root/test/guard/check_layout.cc" -o "$work/check_layout.o" &&
    "${compile[@]}" -I"$root/src" "$root/src/uct/zip/ucx_guard.cc" "$work/check_layout.o" "$work/ucx_bind.o" -ldl -o "$work/check" || exit 2
truth=$("$work/check" "$lib" 2>&1) || { echo "not ok 0 - the true layout: $truth"; exit 1; }
echo "ok 0 - the true layout: $truth"

for ((i = 0; i < ${#mutations[@]}; ++i)); do
    while [ "$(jobs -rp | wc -l)" -ge "${JOBS:-$(nproc)}" ]; do
        wait -n
    done
    IFS=$'\t' read -ra fields <<<"${mutations[i]}"
    run $((i + 1)) "${fields[@]}" >"$work/result.$i" &
done
wait
for ((i = 0; i < ${#mutations[@]}; ++i)); do
    cat "$work/result.$i"
done >"$work/results"
cat "$work/results"
count() { grep -cE "$1" "$work/results"; }
failed=$(count '^not ok')
unseen=$(count '# unseen')
echo "1..${#mutations[@]}: $((${#mutations[@]} - failed - unseen)) refused, $unseen known to be unseen, $failed failed"
[ "$failed" -eq 0 ] && [ "$(wc -l <"$work/results")" -eq ${#mutations[@]} ]
