//! The structures of `rdma/rdma_cma.h`.

use std::ffi::{c_int, c_uint, c_void};

use super::{ibv_ah_attr, ibv_comp_channel, ibv_context, ibv_cq, ibv_gid, ibv_pd, ibv_qp, ibv_srq};

#[repr(C)]
pub(crate) struct rdma_event_channel {
    pub(crate) fd: c_int,
}

#[repr(C)]
pub(crate) struct rdma_cm_id {
    pub(crate) verbs: *mut ibv_context,
    pub(crate) channel: *mut rdma_event_channel,
    pub(crate) context: *mut c_void,
    pub(crate) qp: *mut ibv_qp,
    pub(crate) route: rdma_route,
    pub(crate) ps: c_uint,
    pub(crate) port_num: u8,
    pub(crate) event: *mut rdma_cm_event,
    pub(crate) send_cq_channel: *mut ibv_comp_channel,
    pub(crate) send_cq: *mut ibv_cq,
    pub(crate) recv_cq_channel: *mut ibv_comp_channel,
    pub(crate) recv_cq: *mut ibv_cq,
    pub(crate) srq: *mut ibv_srq,
    pub(crate) pd: *mut ibv_pd,
    pub(crate) qp_type: c_uint,
}

#[repr(C)]
pub(crate) struct rdma_route {
    pub(crate) addr: rdma_addr,
    pub(crate) path_rec: *mut c_void,
    pub(crate) num_paths: c_int,
}

#[repr(C)]
pub(crate) struct rdma_addr {
    pub(crate) src_storage: libc::sockaddr_storage,
    pub(crate) dst_storage: libc::sockaddr_storage,
    pub(crate) ibaddr: rdma_ib_addr,
}

#[repr(C)]
pub(crate) struct rdma_ib_addr {
    pub(crate) sgid: ibv_gid,
    pub(crate) dgid: ibv_gid,
    /// Partition key in big-endian order.
    pub(crate) pkey: u16,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct rdma_conn_param {
    pub(crate) private_data: *const c_void,
    pub(crate) private_data_len: u8,
    pub(crate) responder_resources: u8,
    pub(crate) initiator_depth: u8,
    pub(crate) flow_control: u8,
    pub(crate) retry_count: u8,
    pub(crate) rnr_retry_count: u8,
    pub(crate) srq: u8,
    pub(crate) qp_num: u32,
}

/// Never read; it gives the event's union its size.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct rdma_ud_param {
    pub(crate) private_data: *const c_void,
    pub(crate) private_data_len: u8,
    pub(crate) ah_attr: ibv_ah_attr,
    pub(crate) qp_num: u32,
    pub(crate) qkey: u32,
}

#[repr(C)]
pub(crate) struct rdma_cm_event {
    pub(crate) id: *mut rdma_cm_id,
    pub(crate) listen_id: *mut rdma_cm_id,
    pub(crate) event: c_uint,
    pub(crate) status: c_int,
    pub(crate) param: rdma_cm_event_param,
}

#[repr(C)]
pub(crate) union rdma_cm_event_param {
    pub(crate) conn: rdma_conn_param,
    pub(crate) ud: rdma_ud_param,
}
