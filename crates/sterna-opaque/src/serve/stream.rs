//! Encodes the stream of a postcopied machine, except its pages (specs/postcopy.md §2).

use sterna::internals::postcopy::{DEVICES_PING, HELLO_PING, LISTED_PING, LOADED_PING, PACKAGE_PING};
use sterna_image::Shape;
use sterna_wire::main::{Command, FileHeader, SectionHeader, encode_end, encode_footer, encode_section_part};
use sterna_wire::ram::{self, BlockEntry, BlockList, RamRecordWriter};
use sterna_wire::{PAGE_SIZE, WireError, limits};

/// The stream from the first byte to the block list. It contains no part of the guest's state.
pub(crate) fn opening(shape: &Shape) -> Result<Vec<u8>, WireError> {
    let mut out = Vec::new();
    FileHeader.encode(&mut out);
    shape.configuration.encode(&mut out)?;
    Command::OpenReturnPath.encode(&mut out)?;
    Command::Ping(HELLO_PING).encode(&mut out)?;
    // All blocks of a served image have pages of this size. A destination with other sizes refuses this.
    Command::PostcopyAdvise(Some((PAGE_SIZE as u64, PAGE_SIZE as u64))).encode(&mut out)?;
    out.extend_from_slice(&shape.early);
    let id = shape.ram.section_id;
    let (name, instance, version) = (ram::SECTION_NAME, ram::SECTION_INSTANCE, ram::SECTION_VERSION);
    SectionHeader { id, name, instance, version }.encode_start(&mut out)?;
    let blocks = shape.ram.blocks.iter().map(|block| BlockEntry::new(&*block.name, block.length_bytes));
    BlockList { blocks: blocks.collect() }.encode(&mut out)?;
    RamRecordWriter::eos(&mut out);
    encode_footer(id, &mut out);
    out.extend_from_slice(&shape.setup);
    // An empty PART, as QEMU sends before it switches.
    part(id, &mut out, |_| ());
    Command::Ping(LISTED_PING).encode(&mut out)?;
    Ok(out)
}

/// The image's data between RAM's sections, the devices in a package, and the command to run. The destination
/// reads the whole package before it acts on any part.
pub(crate) fn package(shape: &Shape) -> Result<Vec<u8>, WireError> {
    let mut inner = Vec::with_capacity(shape.devices.len() + 64);
    Command::PostcopyListen.encode(&mut inner)?;
    inner.extend_from_slice(&shape.devices);
    Command::Ping(DEVICES_PING).encode(&mut inner)?;
    Command::Ping(LOADED_PING).encode(&mut inner)?;
    Command::PostcopyRun.encode(&mut inner)?;
    let Some(length) = u32::try_from(inner.len()).ok().filter(|length| *length <= limits::PACKAGE_BYTES)
    else {
        let rule = format!(
            "devices of {} bytes, more than a package of {} holds",
            inner.len(),
            limits::PACKAGE_BYTES
        );
        return Err(WireError::local("package", 0, "specs/stream.md §9", rule));
    };
    let mut out = Vec::with_capacity(inner.len() + shape.between.len() + 64);
    out.extend_from_slice(&shape.between);
    // The destination has received no page, so nothing has to be discarded. But a QEMU 11 that gets no DISCARD
    // treats later pages as precopy pages. It writes them through its own page fault, and hangs.
    for block in shape.ram.blocks.iter().filter(|block| block.length_bytes > 0) {
        let ranges = vec![(0, block.length_bytes)];
        Command::PostcopyDiscard { block: block.name.clone(), ranges }.encode(&mut out)?;
    }
    Command::Ping(PACKAGE_PING).encode(&mut out)?;
    Command::Packaged(length).encode(&mut out)?;
    out.extend_from_slice(&inner);
    Ok(out)
}

/// The request for the bitmap of the block `name`.
pub(crate) fn bitmap_question(name: &str) -> Result<Vec<u8>, WireError> {
    let mut out = Vec::new();
    Command::ReceivedBitmap(name.to_owned()).encode(&mut out)?;
    Ok(out)
}

/// The command to resume after a lost connection.
pub(crate) fn resume() -> Result<Vec<u8>, WireError> {
    let mut out = Vec::new();
    Command::PostcopyResume.encode(&mut out)?;
    Ok(out)
}

/// A PART of RAM with the records that `records` appends.
pub(crate) fn part<T>(id: u32, out: &mut Vec<u8>, records: impl FnOnce(&mut Vec<u8>) -> T) -> T {
    encode_section_part(id, false, out);
    let result = records(out);
    RamRecordWriter::eos(out);
    encode_footer(id, out);
    result
}

/// The end of the stream, after the last missing page.
pub(crate) fn ending(id: u32) -> Vec<u8> {
    let mut out = Vec::new();
    encode_section_part(id, true, &mut out);
    RamRecordWriter::eos(&mut out);
    encode_footer(id, &mut out);
    encode_end(&mut out);
    out
}

#[cfg(test)]
mod tests {
    use sterna_image::{BlockShape, RamShape};

    use super::*;

    fn machine() -> Shape {
        let mut shape = Shape { has_configuration: true, has_end: true, has_eof: true, ..Shape::empty() };
        shape.configuration.machine_type = "none".into();
        let block = BlockShape {
            name: "m0".into(),
            length_bytes: 8192,
            address: None,
            host_page_bytes: None,
            is_skipped: false,
        };
        shape.ram = RamShape { section_id: 2, blocks: vec![block], footers: true };
        shape.between = vec![8, 0, 11, 0, 0];
        shape.devices = b"\x04devices".to_vec();
        shape
    }

    #[test]
    fn opening_is_what_qemu_expects_byte_for_byte() {
        let wanted = [
            &b"QEVM\0\0\0\x03\x07\0\0\0\x04none"[..],
            b"\x08\0\x01\0\0\x08\0\x02\0\x04\0\0\0\x01",
            b"\x08\0\x03\0\x10\0\0\0\0\0\0\x10\0\0\0\0\0\0\0\x10\0",
            b"\x01\0\0\0\x02\x03ram\0\0\0\0\0\0\0\x04",
            b"\0\0\0\0\0\0\x20\x04\x02m0\0\0\0\0\0\0\x20\0\0\0\0\0\0\0\0\x10\x7e\0\0\0\x02",
            b"\x02\0\0\0\x02\0\0\0\0\0\0\0\x10\x7e\0\0\0\x02",
            b"\x08\0\x02\0\x04\0\0\0\x10",
        ]
        .concat();

        assert_eq!(opening(&machine()).unwrap(), wanted);
    }

    #[test]
    fn package_holds_the_devices_as_they_are_between_listen_and_run() {
        let wanted = [
            &b"\x08\0\x0b\0\0\x08\0\x06\0\x15\0\x02m0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x20\0"[..],
            b"\x08\0\x02\0\x04\0\0\0\x02\x08\0\x07\0\x04\0\0\0\x24",
            b"\x08\0\x04\0\0\x04devices\x08\0\x02\0\x04\0\0\0\x03\x08\0\x02\0\x04\0\0\0\x42\x08\0\x05\0\0",
        ]
        .concat();

        assert_eq!(package(&machine()).unwrap(), wanted);
    }

    #[test]
    fn ending_is_rams_end_and_eof() {
        assert_eq!(ending(2), b"\x03\0\0\0\x02\0\0\0\0\0\0\0\x10\x7e\0\0\0\x02\0");
    }
}
