//! The integration tests of this crate, one module for each subject.
//!
//! All modules form one program, so that the linker runs once. `cargo test -p sterna-wire --test formats SUBJECT::`
//! runs the tests of one subject.

#[path = "../common/mod.rs"]
mod common;

mod colo_checkpoint;
mod colo_messages;
mod decoder_rules;
mod extension_numbers;
mod golden;
mod hostile;
mod packet_rules;
mod preempt;
mod properties;
mod rdma_admission;
mod rdma_chunk_size;
mod rdma_messages;
mod rdma_plan;
mod rdma_properties;
mod rdma_session;
mod rdma_stream;
mod received_pages;
mod replica;
mod status_question;
