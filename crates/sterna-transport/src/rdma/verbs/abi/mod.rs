//! The structures of libibverbs and librdmacm, with the memory layout of the C compiler.
//!
//! Their names are those of C, so that each can be found in `infiniband/verbs.h` and `rdma/rdma_cma.h`. A test
//! compiles C code with those headers and compares every size and offset.
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
