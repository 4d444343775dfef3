//! The integration tests of this crate, one module for each subject. They are one program, because linking
//! one program for each file takes longer. `cargo test -p sterna-interop --test interop SUBJECT::` runs the tests
//! of one subject.

#[path = "../../../crates/sterna-transport/tests/support/certificates.rs"]
mod certificates;
#[path = "../../../crates/sterna-vmm/tests/support/registers.rs"]
mod registers;
#[path = "../../../crates/sterna-devices/tests/support/virtqueue.rs"]
mod virtqueue;

mod etcd;
mod host;
mod library;
mod libvirt_baseline;
mod libvirt_domains;
mod libvirt_images;
mod libvirt_relay;
mod qemu_baseline;
mod qemu_colo;
mod qemu_convert;
mod qemu_disks;
mod qemu_image_tools;
mod qemu_images;
mod qemu_migrate;
mod qemu_plan;
mod qemu_postcopy;
mod qemu_protect;
mod qemu_protected;
mod qemu_relay;
mod qemu_releases;
mod qemu_restore;
mod qemu_save;
mod qemu_schema;
mod qemu_store;
mod qemu_streams;
mod qemu_tls;
mod qemu_tls_streams;
mod vhost_user;
mod vhost_user_transport;
