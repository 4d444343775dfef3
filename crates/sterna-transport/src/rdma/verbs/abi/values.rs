//! Values of the C enumerations that are used here.

use std::ffi::{c_int, c_uint};

/// Defines `name = value` pairs as constants, and for the test as a list.
macro_rules! values {
    ($($kind:ty { $($name:ident = $value:expr,)* })*) => {
        $($(pub(crate) const $name: $kind = $value;)*)*

        #[cfg(test)]
        pub(crate) const VALUES: &[(&str, i64)] = &[$($((stringify!($name), $name as i64),)*)*];
    };
}

values! {
    c_uint {
        RDMA_CM_EVENT_ADDR_RESOLVED = 0,
        RDMA_CM_EVENT_ADDR_ERROR = 1,
        RDMA_CM_EVENT_ROUTE_RESOLVED = 2,
        RDMA_CM_EVENT_ROUTE_ERROR = 3,
        RDMA_CM_EVENT_CONNECT_REQUEST = 4,
        RDMA_CM_EVENT_CONNECT_ERROR = 6,
        RDMA_CM_EVENT_UNREACHABLE = 7,
        RDMA_CM_EVENT_REJECTED = 8,
        RDMA_CM_EVENT_ESTABLISHED = 9,
        RDMA_CM_EVENT_DISCONNECTED = 10,
        RDMA_CM_EVENT_DEVICE_REMOVAL = 11,
        RDMA_CM_EVENT_TIMEWAIT_EXIT = 15,
        RDMA_PS_TCP = 0x106,
        IBV_QPT_RC = 2,
        IBV_QPS_RTS = 3,
        IBV_QPS_ERR = 6,
        IBV_ACCESS_LOCAL_WRITE = 1,
        IBV_ACCESS_REMOTE_WRITE = 1 << 1,
        IBV_ACCESS_ON_DEMAND = 1 << 6,
        IBV_WR_RDMA_WRITE = 0,
        IBV_WR_RDMA_WRITE_WITH_IMM = 1,
        IBV_WR_SEND = 2,
        IBV_SEND_SIGNALED = 1 << 1,
        IBV_WC_SEND = 0,
        IBV_WC_RDMA_WRITE = 1,
        IBV_WC_RECV = 1 << 7,
        IBV_WC_RECV_RDMA_WITH_IMM = (1 << 7) + 1,
        IBV_WC_WITH_IMM = 1 << 1,
        IBV_WC_SUCCESS = 0,
        IBV_WC_LOC_LEN_ERR = 1,
        IBV_WC_LOC_QP_OP_ERR = 2,
        IBV_WC_LOC_PROT_ERR = 4,
        IBV_WC_WR_FLUSH_ERR = 5,
        IBV_WC_LOC_ACCESS_ERR = 8,
        IBV_WC_REM_INV_REQ_ERR = 9,
        IBV_WC_REM_ACCESS_ERR = 10,
        IBV_WC_REM_OP_ERR = 11,
        IBV_WC_RETRY_EXC_ERR = 12,
        IBV_WC_RNR_RETRY_EXC_ERR = 13,
        IBV_EVENT_CQ_ERR = 0,
        IBV_EVENT_QP_FATAL = 1,
        IBV_EVENT_QP_REQ_ERR = 2,
        IBV_EVENT_QP_ACCESS_ERR = 3,
        IBV_EVENT_DEVICE_FATAL = 8,
        IBV_EVENT_PORT_ACTIVE = 9,
        IBV_EVENT_PORT_ERR = 10,
        IBV_LINK_LAYER_INFINIBAND = 1,
        IBV_LINK_LAYER_ETHERNET = 2,
        IBV_PORT_INIT = 2,
        IBV_PORT_ARMED = 3,
        IBV_PORT_ACTIVE = 4,
        IBV_MTU_256 = 1,
        IBV_MTU_4096 = 5,
    }
    c_int {
        IBV_QP_STATE = 1,
        IBV_QP_ACCESS_FLAGS = 1 << 3,
        IBV_QP_MIN_RNR_TIMER = 1 << 15,
        RDMA_OPTION_ID = 0,
        RDMA_OPTION_ID_REUSEADDR = 1,
        RDMA_OPTION_ID_AFONLY = 2,
    }
    u64 {
        IBV_ODP_SUPPORT = 1,
    }
    u32 {
        IBV_ODP_SUPPORT_WRITE = 1 << 2,
    }
}
