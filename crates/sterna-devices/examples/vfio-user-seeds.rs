//! Writes seeds for the fuzz target `vfio_user`.
//!
//! `cargo run -p sterna-devices --example vfio-user-seeds -- fuzz/seeds` (the directory is the argument).

use std::path::PathBuf;

use sterna_devices::vfio::{MigState, feature};
use sterna_devices::vfio_user::wire::{
    Capabilities, Command, DMA_READ, DeviceInfo, DeviceState, DmaLogRange, DmaLogReport, DmaLogStart, DmaMap,
    DmaUnmap, FeatureRequest, HEADER_BYTES, Header, IrqInfo, IrqSet, Kind, MigData, MigrationCapability,
    RegionAccess, RegionInfo, Version,
};

fn main() -> std::io::Result<()> {
    let directory = std::env::args().nth(1).map(PathBuf::from);
    let directory = directory.ok_or_else(|| std::io::Error::other("give the directory to write to"))?;
    let directory = directory.join("vfio_user");
    std::fs::create_dir_all(&directory)?;
    let mut session = Vec::new();
    for (name, command, payload) in messages() {
        let kind = Kind::Command { no_reply: false };
        let size = (HEADER_BYTES + payload.len()) as u32;
        let header = Header { id: 1, command: command.number(), size, kind };
        let message = [&header.encode()[..], &payload].concat();
        std::fs::write(directory.join(name), &message)?;
        session.extend(message);
    }
    let refusal = Header { id: 1, command: 16, size: 16, kind: Kind::ErrorReply(22) };
    session.extend(refusal.encode());
    std::fs::write(directory.join("session"), session)
}

fn messages() -> Vec<(&'static str, Command, Vec<u8>)> {
    let capabilities =
        Capabilities { migration: Some(MigrationCapability::default()), ..Capabilities::default() };
    let range = DmaLogRange { address: 1 << 32, length: 1 << 20 };
    let feature = |feature, method, data: &[u8]| FeatureRequest { feature, method, data }.encode(8);
    let start =
        DmaLogStart { page_size: 4096, ranges: vec![DmaLogRange { address: 0, length: 4096 }, range] };
    let data = |head: Vec<u8>, data: &[u8]| [head, data.to_vec()].concat();
    vec![
        ("version", Command::Version, Version { major: 0, minor: 1, capabilities }.encode()),
        ("map", Command::DmaMap, DmaMap { flags: DMA_READ, offset: 0, address: 4096, size: 8192 }.encode()),
        ("unmap", Command::DmaUnmap, DmaUnmap { flags: 0, address: 4096, size: 8192 }.encode()),
        ("info", Command::DeviceGetInfo, DeviceInfo { flags: 1, regions: 9, irqs: 5 }.encode()),
        ("region", Command::DeviceGetRegionInfo, RegionInfo { flags: 3, index: 1, size: 4096 }.encode()),
        ("irq", Command::DeviceGetIrqInfo, IrqInfo { flags: 1, index: 2, count: 3 }.encode()),
        (
            "set-irqs",
            Command::DeviceSetIrqs,
            IrqSet { flags: 2 | 32, index: 0, start: 0, count: 2, data: &[1, 0] }.encode(),
        ),
        ("read", Command::RegionRead, RegionAccess { offset: 8, region: 0, count: 16 }.encode()),
        (
            "write",
            Command::RegionWrite,
            data(RegionAccess { offset: 8, region: 0, count: 3 }.encode(), b"abc"),
        ),
        (
            "state",
            Command::DeviceFeature,
            feature(2, feature::SET, &DeviceState(MigState::StopCopy).encode()),
        ),
        ("flags", Command::DeviceFeature, feature(1, feature::GET, &7u64.to_le_bytes())),
        ("log", Command::DeviceFeature, feature(6, feature::SET, &start.encode())),
        (
            "report",
            Command::DeviceFeature,
            feature(8, feature::GET, &data(DmaLogReport { range, page_size: 4096 }.encode(), &[0xff; 32])),
        ),
        ("mig-read", Command::MigDataRead, MigData { size: 4096 }.encode().to_vec()),
        ("mig-write", Command::MigDataWrite, data(MigData { size: 4 }.encode().to_vec(), b"data")),
    ]
}
