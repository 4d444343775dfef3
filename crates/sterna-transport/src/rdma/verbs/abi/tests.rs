//! Compares every size, offset and value with the C headers.

use std::fmt::Write as _;
use std::io::Write as _;
use std::mem::{offset_of, size_of};
use std::path::{Path, PathBuf};
use std::process::Command;

use super::*;

/// Pairs of a C expression and its value here.
type Facts = Vec<(String, i64)>;

/// `structure in C => structure here { field in C: field here, … }`. Each field adds one expression, and each
/// structure that is declared whole adds its size.
macro_rules! layouts {
    ($facts:ident; $($kind:ident $c:literal => $rust:ident { $($c_field:literal: $field:ident),* $(,)? })*) => {
        $(
            layouts!(@size $kind $facts $c $rust);
            $($facts.push((format!("offsetof({}, {})", $c, $c_field), offset_of!($rust, $field) as i64));)*
        )*
    };
    (@size whole $facts:ident $c:literal $rust:ident) => {
        $facts.push((format!("sizeof({})", $c), size_of::<$rust>() as i64));
    };
    (@size part $facts:ident $c:literal $rust:ident) => {};
}

fn layouts() -> Facts {
    let mut facts = Facts::new();
    layouts! { facts;
        whole "struct ibv_context" => ibv_context {
            "device": device, "ops": ops, "cmd_fd": cmd_fd, "async_fd": async_fd,
            "num_comp_vectors": num_comp_vectors, "mutex": mutex, "abi_compat": abi_compat,
        }
        whole "struct ibv_context_ops" => ibv_context_ops {
            "poll_cq": poll_cq, "req_notify_cq": req_notify_cq, "post_send": post_send, "post_recv": post_recv,
        }
        whole "struct ibv_device_attr" => ibv_device_attr {
            "fw_ver": fw_ver, "node_guid": node_guid, "max_mr_size": max_mr_size, "vendor_id": vendor_id,
            "max_qp_wr": max_qp_wr, "device_cap_flags": device_cap_flags, "max_sge": max_sge, "max_cqe": max_cqe,
            "max_mr": max_mr, "max_pd": max_pd, "max_pkeys": max_pkeys, "phys_port_cnt": phys_port_cnt,
        }
        part "struct ibv_device_attr_ex" => ibv_device_attr_ex {
            "orig_attr": orig_attr, "comp_mask": comp_mask, "odp_caps": odp_caps,
        }
        whole "struct ibv_odp_caps" => ibv_odp_caps {
            "general_caps": general_caps, "per_transport_caps.rc_odp_caps": rc_odp_caps,
        }
        whole "struct ibv_query_device_ex_input" => ibv_query_device_ex_input { "comp_mask": comp_mask }
        whole "struct ibv_port_attr" => ibv_port_attr {
            "state": state, "max_mtu": max_mtu, "active_mtu": active_mtu, "gid_tbl_len": gid_tbl_len,
            "max_msg_sz": max_msg_sz, "pkey_tbl_len": pkey_tbl_len, "lid": lid, "active_width": active_width,
            "phys_state": phys_state, "link_layer": link_layer, "flags": flags, "port_cap_flags2": port_cap_flags2,
        }
        whole "struct ibv_pd" => ibv_pd { "context": context, "handle": handle }
        whole "struct ibv_mr" => ibv_mr {
            "context": context, "pd": pd, "addr": addr, "length": length, "handle": handle, "lkey": lkey, "rkey": rkey,
        }
        whole "struct ibv_comp_channel" => ibv_comp_channel { "context": context, "fd": fd, "refcnt": refcnt }
        part "struct ibv_cq" => ibv_cq {
            "context": context, "channel": channel, "cq_context": cq_context, "handle": handle, "cqe": cqe,
        }
        part "struct ibv_qp" => ibv_qp {
            "context": context, "qp_context": qp_context, "pd": pd, "send_cq": send_cq, "recv_cq": recv_cq, "srq": srq,
            "handle": handle, "qp_num": qp_num, "state": state, "qp_type": qp_type,
        }
        whole "struct ibv_qp_init_attr" => ibv_qp_init_attr {
            "qp_context": qp_context, "send_cq": send_cq, "recv_cq": recv_cq, "srq": srq, "cap": cap,
            "qp_type": qp_type, "sq_sig_all": sq_sig_all,
        }
        whole "struct ibv_qp_cap" => ibv_qp_cap {
            "max_send_wr": max_send_wr, "max_recv_wr": max_recv_wr, "max_send_sge": max_send_sge,
            "max_recv_sge": max_recv_sge, "max_inline_data": max_inline_data,
        }
        whole "union ibv_gid" => ibv_gid { "raw": raw }
        whole "struct ibv_ah_attr" => ibv_ah_attr { "grh": grh, "dlid": dlid, "port_num": port_num }
        whole "struct ibv_qp_attr" => ibv_qp_attr {
            "qp_state": qp_state, "cur_qp_state": cur_qp_state, "path_mtu": path_mtu, "dest_qp_num": dest_qp_num,
            "qp_access_flags": qp_access_flags, "cap": cap, "ah_attr": ah_attr, "alt_ah_attr": alt_ah_attr,
            "pkey_index": pkey_index, "min_rnr_timer": min_rnr_timer, "port_num": port_num, "timeout": timeout,
            "retry_cnt": retry_cnt, "rnr_retry": rnr_retry, "alt_timeout": alt_timeout, "rate_limit": rate_limit,
        }
        whole "struct ibv_sge" => ibv_sge { "addr": addr, "length": length, "lkey": lkey }
        whole "struct ibv_send_wr" => ibv_send_wr {
            "wr_id": wr_id, "next": next, "sg_list": sg_list, "num_sge": num_sge, "opcode": opcode,
            "send_flags": send_flags, "imm_data": imm_data, "wr": wr,
        }
        whole "struct ibv_recv_wr" => ibv_recv_wr {
            "wr_id": wr_id, "next": next, "sg_list": sg_list, "num_sge": num_sge,
        }
        whole "struct ibv_wc" => ibv_wc {
            "wr_id": wr_id, "status": status, "opcode": opcode, "vendor_err": vendor_err, "byte_len": byte_len,
            "imm_data": imm_data, "qp_num": qp_num, "src_qp": src_qp, "wc_flags": wc_flags,
            "pkey_index": pkey_index, "slid": slid, "sl": sl, "dlid_path_bits": dlid_path_bits,
        }
        whole "struct ibv_async_event" => ibv_async_event { "element": element, "event_type": event_type }
        whole "struct rdma_event_channel" => rdma_event_channel { "fd": fd }
        whole "struct rdma_cm_id" => rdma_cm_id {
            "verbs": verbs, "channel": channel, "context": context, "qp": qp, "route": route, "ps": ps,
            "port_num": port_num, "event": event, "send_cq": send_cq, "recv_cq": recv_cq, "srq": srq, "pd": pd,
            "qp_type": qp_type,
        }
        whole "struct rdma_route" => rdma_route { "addr": addr, "path_rec": path_rec, "num_paths": num_paths }
        whole "struct rdma_addr" => rdma_addr {
            "src_storage": src_storage, "dst_storage": dst_storage, "addr.ibaddr": ibaddr,
        }
        whole "struct rdma_ib_addr" => rdma_ib_addr { "sgid": sgid, "dgid": dgid, "pkey": pkey }
        whole "struct rdma_conn_param" => rdma_conn_param {
            "private_data": private_data, "private_data_len": private_data_len,
            "responder_resources": responder_resources, "initiator_depth": initiator_depth,
            "flow_control": flow_control, "retry_count": retry_count, "rnr_retry_count": rnr_retry_count,
            "srq": srq, "qp_num": qp_num,
        }
        whole "struct rdma_ud_param" => rdma_ud_param {
            "private_data": private_data, "ah_attr": ah_attr, "qp_num": qp_num, "qkey": qkey,
        }
        whole "struct rdma_cm_event" => rdma_cm_event {
            "id": id, "listen_id": listen_id, "event": event, "status": status, "param": param,
        }
    }
    // Fields in front of a context in memory, counted backwards from it.
    for (field, here) in [
        ("query_device_ex", size_of::<verbs_context_end>()),
        ("sz", size_of::<verbs_context_end>() - offset_of!(verbs_context_end, sz)),
    ] {
        let c = format!("offsetof(struct verbs_context, context) - offsetof(struct verbs_context, {field})");
        facts.push((c, here as i64));
    }
    let target = |field| format!("offsetof(struct ibv_send_wr, {field}) - offsetof(struct ibv_send_wr, wr)");
    facts.push((target("wr.rdma.remote_addr"), offset_of!(ibv_send_wr_target, remote_addr) as i64));
    facts.push((target("wr.rdma.rkey"), offset_of!(ibv_send_wr_target, rkey) as i64));
    facts.push((target("qp_type"), size_of::<ibv_send_wr_target>() as i64));
    facts.extend(VALUES.iter().map(|(name, value)| ((*name).to_owned(), *value)));
    facts
}

#[test]
fn structures_are_laid_out_as_c_lays_them_out() {
    let facts = layouts();
    let said = match ask_c(&facts.iter().map(|(c, _)| c.as_str()).collect::<Vec<_>>()) {
        Ok(said) => said,
        Err(why) => {
            // Written directly to standard error, past libtest's capture, because xtask collects these lines.
            let line = format!("SKIPPED structures_are_laid_out_as_c_lays_them_out: {why}\n");
            return std::io::stderr().write_all(line.as_bytes()).unwrap();
        }
    };
    assert_eq!(said.len(), facts.len());
    let wrong: Vec<String> = facts
        .iter()
        .zip(said)
        .filter(|((_, here), in_c)| here != in_c)
        .map(|((c, here), in_c)| format!("{c} is {in_c} in C and {here} here"))
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Values of C expressions; the error names the missing tool or header.
fn ask_c(expressions: &[&str]) -> Result<Vec<i64>, String> {
    let include = headers()?;
    let directory = tempfile::tempdir().unwrap();
    // Only these two directories are linked, because the C library's headers must be those of the compiler.
    for name in ["infiniband", "rdma"] {
        std::os::unix::fs::symlink(include.join(name), directory.path().join(name)).unwrap();
    }
    let (source, program) = (directory.path().join("ask.c"), directory.path().join("ask"));
    let mut text = String::from(
        "#include <stdio.h>\n#include <stddef.h>\n#include <rdma/rdma_cma.h>\nint main(void) {\n",
    );
    for expression in expressions {
        writeln!(text, "    printf(\"%lld\\n\", (long long)({expression}));").unwrap();
    }
    text += "    return 0;\n}\n";
    std::fs::write(&source, text).unwrap();
    let mut compiler = Command::new("cc");
    compiler.arg("-I").arg(directory.path()).arg("-o").arg(&program).arg(&source);
    let compiled = compiler.output().map_err(|error| format!("cc (Debian: gcc): {error}"))?;
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let output = Command::new(&program).output().unwrap();
    Ok(String::from_utf8(output.stdout).unwrap().lines().map(|line| line.parse().unwrap()).collect())
}

/// Directory of the headers: `/usr/include`, or the value of `STERNA_RDMA_HEADERS`.
fn headers() -> Result<PathBuf, String> {
    let include =
        std::env::var_os("STERNA_RDMA_HEADERS").map_or_else(|| "/usr/include".into(), PathBuf::from);
    for (file, package) in [("infiniband/verbs.h", "libibverbs-dev"), ("rdma/rdma_cma.h", "librdmacm-dev")] {
        if !Path::new(&include).join(file).is_file() {
            return Err(format!("{} is missing (Debian: {package})", include.join(file).display()));
        }
    }
    Ok(include)
}
