//! What a peer's first bytes cost in memory. The test is alone in its program, because it measures the memory of the whole
//! process.
#![allow(clippy::print_stdout, reason = "says how much memory was resident")]

use std::sync::Arc;

use sterna::{Address, Capabilities, Parameters};
use sterna_image::MappedOptions;
use sterna_opaque::{ImagePlan, receive};
use sterna_wire::main::{Configuration, FileHeader, SectionHeader, encode_footer};
use sterna_wire::ram::{BlockEntry, flags};

fn resident_of_process() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("VmRSS");
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

/// A peer's first bytes cost the peer nothing, and must not make this side allocate gigabytes.
#[test]
fn block_list_of_many_tib_takes_no_memory_before_pages_come() {
    let directory = tempfile::tempdir().unwrap();
    let plan =
        ImagePlan { path: directory.path().join("image"), options: MappedOptions::default(), convert: None };
    let at = "tcp:127.0.0.1:0".parse().unwrap();
    let off = Capabilities::default();
    let receiving = receive(&at, plan, Parameters::default(), off, Arc::new(())).unwrap();
    let mut bytes = Vec::new();
    FileHeader.encode(&mut bytes);
    Configuration { machine_type: "plain".into(), ..Configuration::default() }.encode(&mut bytes).unwrap();
    SectionHeader { id: 2, name: "ram", instance: 0, version: 4 }.encode_start(&mut bytes).unwrap();
    let length = 15u64 << 40;
    bytes.extend_from_slice(&(length | flags::MEM_SIZE).to_be_bytes());
    BlockEntry::new("m0", length).encode(&mut bytes).unwrap();
    bytes.extend_from_slice(&flags::EOS.to_be_bytes());
    encode_footer(2, &mut bytes);
    let before = resident_of_process();
    let Address::Tcp { port, .. } = receiving.address() else { panic!("not TCP") };
    let mut peer = std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
    std::io::Write::write_all(&mut peer, &bytes).unwrap();

    let until = std::time::Instant::now() + std::time::Duration::from_secs(20);
    while receiving.ram_bytes() == 0 && std::time::Instant::now() < until {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    assert_eq!(receiving.ram_bytes(), length);
    // The destination allocates for the block list immediately after it has read the list.
    std::thread::sleep(std::time::Duration::from_millis(500));
    let held = resident_of_process().saturating_sub(before);

    println!("{} bytes from the peer: {} MiB held", bytes.len(), held >> 20);
    assert!(held < 64 << 20, "{held} bytes");
    drop(peer);
    assert!(receiving.wait().is_err());
}
