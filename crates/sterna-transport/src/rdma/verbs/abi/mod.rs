//! The structures of libibverbs and librdmacm, as their C compiler lays them out.
//!
//! Names are C's, so that each can be found in `infiniband/verbs.h` and `rdma/rdma_cma.h`. A test compiles C against
//! those headers and compares every size and offset.
#![allow(non_camel_case_types, reason = "the names are C's")]
#![allow(dead_code, reason = "a structure is whole, whatever of it is used here")]

mod cm;
mod values;
mod verbs;

#[cfg(test)]
mod tests;

pub(crate) use cm::*;
pub(crate) use values::*;
pub(crate) use verbs::*;
