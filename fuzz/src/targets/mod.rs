//! The fuzz targets: one module for each decoder, with a function that takes one input.

pub mod bare_records;
pub mod ch_offload;
pub mod colo_message;
pub mod configuration;
pub mod extension;
pub mod image;
pub mod image_tools;
pub mod libvirt_header;
pub mod libvirt_rpc;
pub mod main_channel;
pub mod mapped_ram;
pub mod multifd_packet;
pub mod nbd_request;
pub mod rdma_control;
pub mod rdma_private_data;
pub mod received_pages;
pub mod relay_dictionary;
pub mod relay_frame;
pub mod relay_greeting;
pub mod relay_packed;
pub mod relay_session;
pub mod replica;
pub mod replica_epoch;
pub mod return_path;
pub mod s3_lists;
pub mod store_header;
pub mod store_index;
pub mod store_layers;
pub mod store_recipe;
mod stream;
pub mod uffd_handshake;
pub mod unpack;
pub mod vfio_user;
pub mod virtio_queues;
pub mod vmdesc;
pub mod xbzrle;

/// A decoder under test, with the limits of its inputs.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// Name of the module and of the libFuzzer binary.
    pub name: &'static str,
    /// Takes one input; panics if it finds a bug.
    pub run: fn(&[u8]),
    /// Limit of an input's length, in bytes.
    pub longest: usize,
    /// Number of mutated inputs in a run of [`check`](crate::check); they take one or two
    /// seconds of one core.
    pub inputs: u64,
}

/// Limit of a message, or of a stream without pages, in bytes.
const MESSAGE: usize = 16 << 10;
/// Limit of an image, in bytes. It is larger because an image contains pages.
const IMAGE: usize = 64 << 10;

/// All targets, sorted by name.
pub const TARGETS: [Target; 35] = [
    Target { name: "bare_records", run: bare_records::target, longest: MESSAGE, inputs: 300_000 },
    Target { name: "ch_offload", run: ch_offload::target, longest: MESSAGE, inputs: 200_000 },
    Target { name: "colo_message", run: colo_message::target, longest: MESSAGE, inputs: 200_000 },
    Target { name: "configuration", run: configuration::target, longest: MESSAGE, inputs: 400_000 },
    Target { name: "extension", run: extension::target, longest: MESSAGE, inputs: 400_000 },
    Target { name: "image", run: image::target, longest: IMAGE, inputs: 50_000 },
    Target { name: "image_tools", run: image_tools::target, longest: IMAGE, inputs: 40_000 },
    Target { name: "libvirt_header", run: libvirt_header::target, longest: MESSAGE, inputs: 400_000 },
    Target { name: "libvirt_rpc", run: libvirt_rpc::target, longest: MESSAGE, inputs: 400_000 },
    Target { name: "main_channel", run: main_channel::target, longest: MESSAGE, inputs: 200_000 },
    Target { name: "mapped_ram", run: mapped_ram::target, longest: MESSAGE, inputs: 400_000 },
    Target { name: "multifd_packet", run: multifd_packet::target, longest: MESSAGE, inputs: 300_000 },
    Target { name: "nbd_request", run: nbd_request::target, longest: MESSAGE, inputs: 300_000 },
    Target { name: "rdma_control", run: rdma_control::target, longest: MESSAGE, inputs: 300_000 },
    Target { name: "rdma_private_data", run: rdma_private_data::target, longest: 256, inputs: 400_000 },
    Target { name: "received_pages", run: received_pages::target, longest: MESSAGE, inputs: 300_000 },
    Target { name: "relay_dictionary", run: relay_dictionary::target, longest: 256, inputs: 20_000 },
    Target { name: "relay_frame", run: relay_frame::target, longest: 2 << 10, inputs: 300_000 },
    Target { name: "relay_greeting", run: relay_greeting::target, longest: 512, inputs: 100_000 },
    Target { name: "relay_packed", run: relay_packed::target, longest: MESSAGE, inputs: 5_000 },
    Target { name: "relay_session", run: relay_session::target, longest: 2 << 10, inputs: 50_000 },
    Target { name: "replica", run: replica::target, longest: 1 << 10, inputs: 100_000 },
    Target { name: "replica_epoch", run: replica_epoch::target, longest: IMAGE, inputs: 60 },
    Target { name: "return_path", run: return_path::target, longest: MESSAGE, inputs: 400_000 },
    Target { name: "s3_lists", run: s3_lists::target, longest: 4 << 10, inputs: 60_000 },
    Target { name: "store_header", run: store_header::target, longest: 256, inputs: 200_000 },
    Target { name: "store_index", run: store_index::target, longest: 4 << 10, inputs: 60_000 },
    Target { name: "store_layers", run: store_layers::target, longest: 512, inputs: 4_000 },
    Target { name: "store_recipe", run: store_recipe::target, longest: 4 << 10, inputs: 200_000 },
    Target { name: "uffd_handshake", run: uffd_handshake::target, longest: MESSAGE, inputs: 200_000 },
    Target { name: "unpack", run: unpack::target, longest: MESSAGE, inputs: 30_000 },
    Target { name: "vfio_user", run: vfio_user::target, longest: MESSAGE, inputs: 300_000 },
    Target { name: "virtio_queues", run: virtio_queues::target, longest: 4 << 10, inputs: 500 },
    Target { name: "vmdesc", run: vmdesc::target, longest: MESSAGE, inputs: 200_000 },
    Target { name: "xbzrle", run: xbzrle::target, longest: MESSAGE, inputs: 300_000 },
];

/// A target that fails on demand, for the tests of the runner.
const SELF_TEST: Target = Target { name: "self_test", run: self_test, longest: 64, inputs: 0 };

/// Finds the target with this name; also finds the self test.
pub fn find(name: &str) -> Option<&'static Target> {
    TARGETS.iter().chain([&SELF_TEST]).find(|target| target.name == name)
}

fn self_test(data: &[u8]) {
    match data {
        b"panic" => panic!("told to"),
        b"thread" => drop(std::thread::spawn(|| panic!("told to")).join()),
        b"hang" => loop {
            std::thread::sleep(std::time::Duration::from_secs(1));
        },
        b"memory" => drop(std::hint::black_box(vec![1u8; 2 << 30])),
        b"seed input" => {}
        changed => assert!(!changed.starts_with(b"seed"), "changed"),
    }
}
